"""What must hold between the keys of a protocol, beyond each key's own type and range.

One function per section; each raises at the first thing that is wrong, with the dotted path.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.spec.protocol_parts import ContextSpec, Corpus, Rule
from quantkit.spec.protocol_schema import Protocol
from quantkit.spec.tensor_types import FTYPES
from quantkit.spec.toml_records import Found, fail

_QUANTIZED_KV = {"Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"}
_SHARE_TOLERANCE = 1e-9


def check_protocol(protocol: Protocol) -> None:
    """All of it.

    Raises:
        ProtocolError: names the dotted path, what was expected and what was found.
    """
    _check_corpora(protocol)
    _check_eval(protocol)
    _check_floors(protocol)
    _check_imatrix(protocol)
    _check_plan(protocol)
    _check_mtp(protocol)
    _check_search(protocol)


def _check_corpora(protocol: Protocol) -> None:
    _check_unique([c.name for c in protocol.corpora], "corpora", "name")
    _check_unique([c.file for c in protocol.corpora], "corpora", "file")
    for i, corpus in enumerate(protocol.corpora):
        hub = (corpus.hub_dataset, corpus.hub_config, corpus.hub_split)
        if any(hub) and not all(hub):
            fail(f"corpora[{i}]", "hub_dataset, hub_config and hub_split all given or all ''", hub)


def _check_eval(protocol: Protocol) -> None:
    spec = protocol.eval
    _check_context(spec, "eval")
    if not spec.corpora:
        fail("eval.corpora", "at least one text", [], "name one")
    _check_unique(spec.corpora, "eval.corpora", "")
    for i, name in enumerate(spec.corpora):
        _named_corpus(protocol, name, f"eval.corpora[{i}]")
    if spec.n_threads == 0:
        fail("eval.n_threads", "a number of threads per worker of at least 1", 0)
    _check_chunk_set(spec.chunks, spec.n_chunk, "eval.n_chunk")
    offload = spec.offload
    if not offload.fixed and (offload.n_gpu_layers or offload.main_gpu or offload.tensor_split):
        fail("eval.offload", "n_gpu_layers = 0, main_gpu = 0 and tensor_split = [] unless fixed", offload.n_gpu_layers,
             "set fixed = true, or give them on the command line")


def _check_chunk_set(chunks: str, n_chunk: int, path: str) -> None:
    if (chunks == "all") != (n_chunk == 0):
        fail(path, "0 with chunks = 'all', and at least 1 otherwise", Found(f"{n_chunk} with {chunks!r}"))


def _check_context(spec: ContextSpec, path: str) -> None:
    if spec.n_ctx < 8 or spec.n_ctx % 2:
        fail(f"{path}.n_ctx", "an even number of at least 8", spec.n_ctx)
    if spec.n_ubatch > spec.n_batch:
        fail(f"{path}.n_ubatch", f"at most n_batch = {spec.n_batch}", spec.n_ubatch, "lower it, or raise n_batch")
    if spec.type_v in _QUANTIZED_KV and spec.flash_attn == "off":
        fail(f"{path}.type_v", "F32, F16 or BF16 while flash_attn is 'off' (llama.cpp quantizes V with flash attention only)",
             spec.type_v)


def _check_floors(protocol: Protocol) -> None:
    spec, floors = protocol.eval, protocol.floors
    _check_unique([k.name for k in floors.kernels], "floors.kernels", "name")
    for i, kernel in enumerate(floors.kernels):
        if spec.type_v in _QUANTIZED_KV and kernel.flash_attn == "off":
            fail(f"floors.kernels[{i}].flash_attn", f"'on' while eval.type_v is {spec.type_v}", kernel.flash_attn)
    _check_rising(protocol.sequential.looks, "sequential.looks")


def _check_imatrix(protocol: Protocol) -> None:
    _check_context(protocol.imatrix, "imatrix")
    _check_chunk_set(protocol.imatrix.chunks, protocol.imatrix.n_chunk, "imatrix.n_chunk")
    text = _named_corpus(protocol, protocol.imatrix.corpus, "imatrix.corpus")
    for name in protocol.eval.corpora:
        if protocol.corpus(name).sha256 == text.sha256:
            fail("imatrix.corpus", "a text that is not evaluated on: calibrating on the test text flatters the low tiers",
                 Found(f"{text.name!r}, the text of eval.corpora {name!r}"), "calibrate on another text")


def _check_plan(protocol: Protocol) -> None:
    plan = protocol.plan
    if not plan.tiers:
        fail("plan.tiers", "at least one tier", [])
    _check_unique([t.name.casefold() for t in plan.tiers], "plan.tiers", "name")
    _check_rules(plan.rules, "plan.rules")
    if plan.ladder == "stock" and plan.rules:
        fail("plan.rules", "[] with ladder = 'stock': the mix is llama.cpp's own", Found(f"{len(plan.rules)} rules"))
    for i, tier in enumerate(plan.tiers):
        path = f"plan.tiers[{i}]"
        _check_rules(tier.rules, f"{path}.rules")
        if plan.ladder != "stock":
            continue
        if tier.rules:
            fail(f"{path}.rules", "[] with ladder = 'stock': the mix is llama.cpp's own", Found(f"{len(tier.rules)} rules"),
                 "take them out, or take another ladder")
        expected = FTYPES[tier.ftype].default_type
        if tier.default != expected:
            fail(f"{path}.default", f"{expected!r} with ladder = 'stock', llama.cpp's default type of {tier.ftype}", tier.default,
                 "write that, or take another ladder")


def _check_rules(rules: tuple[Rule, ...], path: str) -> None:
    for i, rule in enumerate(rules):
        if bool(rule.type) == bool(rule.at_least):
            fail(f"{path}[{i}]", "exactly one of type and at_least, the other ''",
                 Found(f"type = {rule.type!r}, at_least = {rule.at_least!r}"))


def _check_mtp(protocol: Protocol) -> None:
    spec = protocol.mtp
    _check_context(spec, "mtp")
    _check_chunk_set(spec.teacher_chunks, spec.teacher_n_chunk, "mtp.teacher_n_chunk")
    _named_corpus(protocol, spec.corpus, "mtp.corpus")
    if not spec.n_prompt and not spec.prompts:
        fail("mtp.n_prompt", "at least one prompt, from the corpus or given in mtp.prompts", 0, "give one")
    if spec.prompt_n_tokens + spec.n_predict > spec.n_ctx:
        fail("mtp.n_ctx", f"at least prompt_n_tokens + n_predict = {spec.prompt_n_tokens + spec.n_predict}", spec.n_ctx,
             "raise it, or shorten the prompts")
    if not spec.n_draft:
        fail("mtp.n_draft", "at least one draft length", [], "add one")
    _check_rising(spec.n_draft, "mtp.n_draft")
    _check_unique(spec.head_types, "mtp.head_types", "")


def _check_search(protocol: Protocol) -> None:
    spec = protocol.search
    if not spec.types:
        fail("search.types", "at least one candidate type", [], "add one")
    _check_unique(spec.types, "search.types", "")
    for i, name in enumerate(spec.weights_types):
        if name not in spec.types:
            fail(f"search.weights_types[{i}]", "one of search.types", name)
    total = spec.search_share + spec.select_share + spec.report_share
    if abs(total - 1) > _SHARE_TOLERANCE or min(spec.search_share, spec.select_share, spec.report_share) == 0:
        fail("search.search_share", "three shares of the articles above 0 that add up to 1", total)
    if spec.second_n_chunk and not spec.second_corpus:
        fail("search.second_n_chunk", "0 while second_corpus is ''", spec.second_n_chunk, "name a text, or write 0")
    if spec.second_corpus:
        second = _named_corpus(protocol, spec.second_corpus, "search.second_corpus")
        if second.sha256 in {protocol.corpus(name).sha256 for name in (*protocol.eval.corpora, protocol.imatrix.corpus)}:
            fail("search.second_corpus", "a text that is neither evaluated nor calibrated on", second.name, "name another")


def _named_corpus(protocol: Protocol, name: str, path: str) -> Corpus:
    for corpus in protocol.corpora:
        if corpus.name == name:
            return corpus
    return fail(path, f"a name from [[corpora]] ({', '.join(c.name for c in protocol.corpora) or 'none'})", name,
                "name one of them, or add it")


def _check_unique(names: Iterable[str], path: str, key: str) -> None:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            fail(f"{path}[{i}]{'.' + key if key else ''}", "a name that stands once", Found(f"{name!r} again"), "take one out")
        seen.add(name)


def _check_rising(numbers: tuple[int, ...], path: str) -> None:
    for i in range(1, len(numbers)):
        if numbers[i] <= numbers[i - 1]:
            fail(f"{path}[{i}]", f"more than the {numbers[i - 1]} before it", numbers[i])
