"""Checks of the base and of what it says about itself: source, header, tokenizer, MTP head, and whether llama.cpp takes it."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.core.errors import GgufError, InputError
from quantkit.core.units import format_bytes
from quantkit.engine.fit import require_loadable
from quantkit.job.doctor_case import Case, Finding, not_applicable, ok, problem, warning
from quantkit.spec.model import ModelInfo, type_shares
from quantkit.spec.mtp_support import cannot_draft

_AGAIN = "convert the original model again, with the converter that belongs to llama.cpp"
_MTP_WORD = "nextn"  # in each problem that is about an MTP head


def look_at_source(case: Case) -> Iterator[Finding]:
    """Whether tiers can be made from the file, and which type it is."""
    model, check = case.model, "source"
    if model.is_head_only:
        error = InputError(f"expected a model with a trunk, found only an MTP head in {case.base}: give the whole model")
        yield problem(check, error)
        return
    if not model.problems:
        _ = case.base_model
    share, *others = type_shares(model.header.tensors)
    words = ", ".join(f"{s.type} {s.n_params / model.n_params:.1%}" for s in (share, *others))
    found = f"{model.name or model.header.path.name}, {model.architecture}: {words}; {format_bytes(model.header.file_bytes)}"
    fixes = {"F16": "say so where you publish; a model that was trained in BF16 is better converted again with --outtype bf16",
             "F32": "nothing is lost; a model that was published in BF16 gives the same base at half the size with --outtype bf16"}
    if share.type in fixes:
        yield warning(check, f"{found}. Tables will name {share.type} as the base's type, not BF16", fixes[share.type])
    else:
        yield ok(check, found)


def look_at_header(case: Case) -> Iterator[Finding]:
    """Whether the header agrees with itself, and all shards are there."""
    model, check = case.model, "header"
    header = model.header
    parts = "one file" if len(header.parts) == 1 else f"all {len(header.parts)} shards there"
    found = f"GGUF version {header.version}, {len(header.tensors)} tensors, {len(header.metadata)} keys, {parts}"
    problems = [text for text in model.problems if _MTP_WORD not in text]
    if problems:
        yield problem(check, GgufError(f"{header.path}: {'; '.join(problems)}"), _AGAIN)
    elif model.notes:
        yield warning(check, f"{found}. {'; '.join(model.notes)}", "correct the source if it is wrong: tables go by the tensors")
    else:
        yield ok(check, found)


def look_at_tokenizer(case: Case) -> Iterator[Finding]:
    """Whether the keys are there that tokens depend on."""
    model, check = case.model, "tokenizer"
    if model.tokenizer_model is None or "tokenizer.ggml.tokens" not in model.header.metadata:
        yield problem(check, GgufError(f"{model.header.path}: expected a tokenizer, got no key tokenizer.ggml.model or "
                                       f"tokenizer.ggml.tokens: {_AGAIN}, and with its tokenizer files"))
        return
    chat = [name for name in case.protocol.eval.corpora if case.protocol.corpus(name).format == "chat"]
    if chat and model.chat_template_sha256 is None:
        yield problem(check, InputError(f"expected a chat template in {model.header.path} for the corpus {chat[0]} of format chat, "
                                        "found none: convert a model that has one, or take the corpus out of the protocol"))
        return
    bos = {True: "adds BOS", False: "adds no BOS", None: "does not say whether BOS is added, so llama.cpp decides"}[model.add_bos]
    found = f"{model.tokenizer_model}, pre-tokenizer {model.tokenizer_pre or 'not said'}, {model.n_vocab} tokens, {bos}"
    if model.tokenizer_model == "gpt2" and model.tokenizer_pre is None:
        yield warning(check, f"{found}. Without tokenizer.ggml.pre llama.cpp cuts words by a default rule: tokens and perplexity "
                             "are not the model's", _AGAIN)
    elif model.add_bos and "tokenizer.ggml.bos_token_id" not in model.header.metadata:
        yield warning(check, f"{found}, but there is no tokenizer.ggml.bos_token_id: llama.cpp takes a default one", _AGAIN)
    else:
        yield ok(check, found)


def look_at_mtp(case: Case) -> Iterator[Finding]:
    """Whether key, block count and tensors tell one MTP head, and whether it can be run."""
    model, check = case.model, "MTP head"
    if problems := [text for text in model.problems if _MTP_WORD in text]:
        yield problem(check, GgufError(f"{model.header.path}: {'; '.join(problems)}"), f"{_AGAIN}; or strip the head with "
                                                                                       "`quantkit mtp strip`")
    elif not model.n_nextn:
        yield not_applicable(check, "none: key, block count and tensors agree")
    elif (why := cannot_draft(model)) is not None:
        yield warning(check, why, "leave it out of the tiers with --set plan.mtp_mode=strip, or publish it as it is")
    else:
        yield ok(check, f"{model.n_nextn} NextN block(s): key, block count and tensors agree; in the tiers: "
                        f"{_mtp_words(case)}")


def look_at_loading(case: Case) -> Iterator[Finding]:
    """Whether llama.cpp takes the base's header and tensor table."""
    model, _ = case.model, case.build
    case.pool.call("load the base", require_loadable, path=model.header.parts[0])
    yield ok("loading", f"llama.cpp reads its {_blocks(model)}")


def _mtp_words(case: Case) -> str:
    plan = case.protocol.plan
    return {"inside": f"inside, at {plan.mtp_type or 'the types of the ladder'}", "strip": "left out",
            "separate": f"a file of its own, at {plan.mtp_type or 'its own type'}"}[plan.mtp_mode]


def _blocks(model: ModelInfo) -> str:
    recurrent = f", {len(model.recurrent_blocks)} of them recurrent" if model.recurrent_blocks else ""
    return f"{model.n_trunk_block} trunk blocks{recurrent}"
