"""`quantkit doctor`: for each line of the table an input that shows its fault, and what a run makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quantkit.core.errors import (
    EngineError,
    EnvironmentFault,
    GgufError,
    InputError,
    NoSpace,
    PlanError,
    ProtocolError,
    QuantkitError,
)
from quantkit.core.files import FolderLock, sha256_file
from quantkit.core.units import GIB
from quantkit.engine.chunk_time import ChunkTime
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import Tokenized
from quantkit.engine.settings import Offload
from quantkit.job import doctor_host, doctor_work
from quantkit.job.audit import AuditOptions
from quantkit.job.doctor import CHECKS, examine, exit_code, require_healthy
from quantkit.job.doctor_case import Case, Finding, split_advice
from quantkit.job.evaluation import Evaluation
from quantkit.job.rundir import RunFolder, open_run, write_json
from quantkit.job.session import RunOptions
from quantkit.measure.summary import MIN_ARTICLES
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, write_imatrix
from quantkit.spec.json_records import record_to_json
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Corpus, Protocol, Rule, load_protocol
from tests.gguf_factory import model_metadata, model_tensors, tiny_gguf, tiny_model

BUILD = BuildFacts(backend="CPU", llama_cpp_python="0.3.36", llama_cpp_commit="abc", system_info="CPU : AVX2 = 1 | NEON = 1")
FULL = load_protocol("demo-v1")
GUARDED = dataclasses.replace(FULL, plan=dataclasses.replace(FULL.plan, tiers=(FULL.plan.tier("Q8_0"), FULL.plan.tier("Q4_K_M"))))


class Listener:
    """Keeps notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, step: str, total: int) -> None: ...

    def advance(self, n: int = 1) -> None: ...

    def finish(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


class CannedPool:
    """A worker that answers by the step's name; an error is raised."""

    def __init__(self, **answers: Any) -> None:
        tokens = Tokenized(np.arange(128 * 80, dtype=np.int32) % 260, np.arange(1, 128 * 80 + 1) * 3, 260, False)
        self.answers = {"build": BUILD, "load the base": None, "tokenize": tokens, "time of a chunk": ChunkTime(0.1, 3.0, 2.0),
                        **answers}
        self.steps: list[str] = []

    def call(self, step: str, command: Callable[..., Any], **arguments: Any) -> Any:
        self.steps.append(step)
        answer = self.answers[step]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Table(NamedTuple):
    """The lines of an examination, by name."""

    lines: Mapping[str, Finding]

    def state(self, check: str) -> str:
        return self.lines[check].state


def look(base: Path, protocol: Protocol | QuantkitError = GUARDED, pool: CannedPool | None = None, **case: Any) -> Table:
    """Every check of a case, with a canned worker."""
    with Case(base, protocol, pool=pool or CannedPool(), **case) as own:  # type: ignore[arg-type]
        findings = list(examine(own))
    assert all(f.fix for f in findings if f.state in {"warning", "problem"})
    assert all((f.error is not None) == (f.state == "problem") for f in findings)
    return Table({f.check: f for f in findings})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound base, whose rows 256 divides."""
    return tiny_model(tmp_path_factory.mktemp("base") / "tiny-BF16.gguf", n_embd=256, n_ff=256)[0]


def with_tiers(*names: str, **changes: Any) -> Protocol:
    """The demo's protocol with some of its tiers, and each of them changed."""
    tiers = tuple(dataclasses.replace(FULL.plan.tier(name), **changes) for name in names)
    return dataclasses.replace(GUARDED, plan=dataclasses.replace(GUARDED.plan, tiers=tiers))


@pytest.fixture(autouse=True)
def few_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a package's version takes milliseconds."""
    monkeypatch.setattr(doctor_host, "LIBRARIES", ("numpy",))


def test_nothing_is_wrong_with_a_sound_base(base: Path, tmp_path: Path) -> None:
    table = look(base, FULL, run=tmp_path / "run")
    assert {name: f.state for name, f in table.lines.items() if f.state != "ok"} == {
        "MTP head": "not applicable", "prompt text": "not applicable", "leftovers": "not applicable"}
    assert exit_code(table.lines.values()) == 0
    assert not (tmp_path / "run").exists()
    assert [name for name in table.lines if name.startswith("plan ")] == [f"plan {t.name}" for t in FULL.plan.tiers]


# Source


def checkpoint(folder: Path, config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x10" + bytes(40))
    return folder


@pytest.mark.parametrize(("config", "words", "outtype"), [
    ({"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}, "(Qwen3ForCausalLM, bfloat16)", "bf16"),
    ({"architectures": ["LlamaForCausalLM"], "dtype": "float16"}, "(LlamaForCausalLM, float16)", "f16"),
    ({"text_config": {"dtype": "float32"}, "quantization_config": {"quant_method": "fp8"}}, "(float32, quantized by fp8)", "f32"),
    ({"architectures": ["<script>"], "dtype": 7}, "a Hugging Face checkpoint: ", "bf16"),
    ("[" * 5000, "a Hugging Face checkpoint: ", "bf16"),
])
@pytest.mark.parametrize("part", ["", "model-00001-of-00002.safetensors"])
def test_a_checkpoint_gets_its_conversion_command(tmp_path: Path, config: Any, words: str, outtype: str, part: str) -> None:
    folder = checkpoint(tmp_path / "My Model", config)
    table = look(folder / part)
    found = table.lines["source"]
    assert isinstance(found.error, GgufError)
    assert words in str(found.error)
    assert found.fix == (f"convert it first with `python convert_hf_to_gguf.py '{folder}' --outtype {outtype} "
                         f"--outfile 'My Model-{outtype.upper()}.gguf'`")
    assert table.lines["plans"].found == "not looked at without the base's header"
    assert table.state("llama.cpp") == table.state("calibration text") == table.state("locale") == "ok"


def test_other_things_in_a_base_s_place_are_named(tmp_path: Path, base: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    lone = tmp_path / "weights.safetensors"
    lone.write_bytes(b"x" * 100)
    zipped = tmp_path / "model.gguf"
    zipped.write_bytes(b"PK\3\4" + bytes(100))
    imatrix = tiny_gguf(tmp_path / "imatrix.gguf", {"a.in_sum2": ((32,), "F32")}, {"general.type": "imatrix"}, arch="")[0]
    for path, words in ((base.parent, "got a folder: give one of its files (tiny-BF16.gguf)"), (adapter, "merge it into its model"),
                        (lone, "without its config.json"), (zipped, "a zip archive"), (imatrix, "expected a model"),
                        (tmp_path / "none.gguf", "No such file")):
        line = look(path).lines["source"]
        assert line.state == "problem"
        assert words in str(line.error)


@pytest.mark.parametrize(("type_name", "state"), [("F16", "warning"), ("F32", "warning"), ("Q8_0", "problem")])
def test_another_type_than_bf16_is_said(tmp_path: Path, type_name: str, state: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256, type_name=type_name)[0]
    table = look(path)
    assert table.state("source") == state
    assert type_name in table.lines["source"].found
    if state == "problem":
        assert table.lines["source"].fix == "start from the unquantized file"
        assert table.state("plans") == "not applicable"


def test_a_head_alone_is_no_base(tmp_path: Path) -> None:
    whole = {"token_embd.weight": ((32, 260), "BF16"), "blk.2.attn_q.weight": ((32, 32), "BF16"),
             "blk.2.nextn.eh_proj.weight": ((64, 32), "BF16")}
    keys = {"llama.block_count": 3, "llama.nextn_predict_layers": 1, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    line = look(tiny_gguf(tmp_path / "head.gguf", whole, keys)[0]).lines["source"]
    assert "found only an MTP head" in line.found
    assert line.fix == "give the whole model"


# Header, tokenizer, MTP, loading


def test_a_header_that_contradicts_itself(tmp_path: Path, base: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_block=2, metadata={"llama.block_count": 5})[0]
    line = look(path).lines["header"]
    assert line.state == "problem"
    assert "block_count is 5, but there are no tensors in blocks 2 to 4" in line.found
    named = tiny_model(tmp_path / "n.gguf", metadata={"general.file_type": 7})[0]
    line = look(named).lines["header"]
    assert (line.state, line.fix) == ("warning", "correct the source if it is wrong: tables go by the tensors")
    assert "general.file_type says Q8_0" in line.found


def test_shards(tmp_path: Path) -> None:
    parts = tiny_model(tmp_path / "m.gguf", n_part=3)
    assert "all 3 shards there" in look(parts[1]).lines["header"].found
    parts[2].unlink()
    table = look(parts[0])
    assert "missing m-00003-of-00003.gguf" in table.lines["source"].found
    assert table.lines["source"].fix == "fetch the missing shards"
    assert table.state("header") == "not applicable"


@pytest.mark.parametrize(("keys", "state", "words"), [
    ({"tokenizer.ggml.pre": None}, "warning", "Without tokenizer.ggml.pre"),
    ({"tokenizer.ggml.tokens": None}, "problem", "expected a tokenizer"),
    ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "warning", "no tokenizer.ggml.bos_token_id"),
    ({"tokenizer.ggml.add_bos_token": None}, "ok", "does not say whether BOS is added"),
    ({"tokenizer.ggml.add_bos_token": True}, "ok", "260 tokens, adds BOS"),
])
def test_tokenizer_keys(tmp_path: Path, keys: dict[str, Any], state: str, words: str) -> None:
    kept = {key: value for key, value in {**model_metadata(), **keys}.items() if value is not None}
    line = look(tiny_gguf(tmp_path / "m.gguf", model_tensors(), kept)[0]).lines["tokenizer"]
    assert line.state == state
    assert words in line.found


def test_conversations_need_a_chat_template(base: Path) -> None:
    chat = dataclasses.replace(GUARDED.corpus("demo-eval.txt"), format="chat")
    protocol = dataclasses.replace(GUARDED, corpora=tuple(chat if c.name == chat.name else c for c in GUARDED.corpora))
    line = look(base, protocol, CannedPool(**{"chat template": InputError("no template")})).lines["tokenizer"]
    assert "for the corpus demo-eval.txt of format chat, found none" in line.found


@pytest.mark.parametrize("claimed", [0, 1, 2])
def test_key_block_count_and_tensors_must_tell_one_head(tmp_path: Path, claimed: int) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256, n_nextn=1, metadata={"llama.nextn_predict_layers": claimed})[0]
    table = look(path)
    line = table.lines["MTP head"]
    if claimed == 1:  # sound, but nothing runs it
        assert (line.state, table.state("header")) == ("warning", "ok")
        assert "no draft graph for the architecture llama" in line.found
        assert "plan.mtp_mode=strip" in line.fix
    else:
        assert (line.state, table.state("header")) == ("problem", "ok")
        assert "nextn tensors are expected in" in line.found
        assert table.state("plans") == "not applicable"


def test_a_base_that_llama_cpp_refuses(base: Path) -> None:
    line = look(base, pool=CannedPool(**{"load the base": GgufError("m.gguf: llama.cpp cannot load it: convert the model again")}))
    assert (line.state("loading"), line.lines["loading"].fix) == ("problem", "convert the model again")


# Protocol, plans, shapes, importances


def test_without_a_protocol_the_rest_is_still_looked_at(base: Path) -> None:
    table = look(base, ProtocolError("x.toml: eval.n_ctx: expected a number, got 'a'"))
    assert table.state("protocol") == "problem"
    assert table.state("source") == table.state("header") == table.state("llama.cpp") == table.state("locale") == "ok"
    assert table.lines["plans"].found == "not looked at without the protocol"
    assert exit_code(table.lines.values()) == 2
    table = look(base, tiers=["Q9"])
    assert "got 'Q9'" in table.lines["protocol"].found
    assert table.state("plans") == "not applicable"


def test_a_rule_that_matches_nothing_stops_its_tier_alone(base: Path) -> None:
    rule = Rule(match="blk.*.attn_qqq.weight", layers="", type="Q6_K", at_least="", optional=False)
    protocol = with_tiers("Q8_0", "Q4_K_M")
    odd = dataclasses.replace(protocol.plan.tiers[1], rules=(rule,))
    protocol = dataclasses.replace(protocol, plan=dataclasses.replace(protocol.plan, tiers=(protocol.plan.tiers[0], odd)))
    table = look(base, protocol)
    assert table.state("plan Q8_0") == "ok"
    assert isinstance(table.lines["plan Q4_K_M"].error, PlanError)
    assert "matches none of the" in table.lines["plan Q4_K_M"].found


def exact(match: str, type_name: str, layers: str = "") -> Rule:
    return Rule(match=match, layers=layers, type=type_name, at_least="", optional=False)


@pytest.mark.parametrize(("tied", "rules", "words"), [
    (True, (exact("token_embd.weight", "Q2_K"),), "token_embd.weight, which is the output too (tied embeddings), would be Q2_K"),
    (False, (exact("output.weight", "Q3_K"),), "output.weight would be Q3_K"),
    (False, (exact("blk.*.ffn_up.weight", "Q5_K"), exact("blk.*.ffn_up.weight", "Q6_K", "0-1")),
     "rule 1: blk.*.ffn_up.weight: decides no tensor's type"),
])
def test_what_was_probably_meant_otherwise(tmp_path: Path, tied: bool, rules: tuple[Rule, ...], words: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256, tied=tied)[0]
    table = look(path, with_tiers("Q4_K_M", rules=rules))
    assert table.state("plan Q4_K_M") == "warning"
    assert words in table.lines["plan Q4_K_M"].found


def test_optional_rules_that_match_nothing_are_named(base: Path) -> None:
    table = look(base)
    assert table.lines["plan"].found == ("rules for all tiers that are optional, and match nothing here: blk.*.ssm_alpha.weight, "
                                         "blk.*.ssm_beta.weight, blk.*.ssm_ba.weight")
    assert (table.state("plan Q8_0"), "nothing" in table.lines["plan Q8_0"].found) == ("ok", False)
    assert "optional, and matching nothing here: blk.*.ssm_out.weight" in table.lines["plan Q4_K_M"].found


def test_tiers_that_do_not_fall(base: Path) -> None:
    line = look(base, with_tiers("Q6_K", "Q8_0")).lines["plan Q8_0"]
    assert (line.state, "no smaller than Q6_K before it" in line.found) == ("warning", True)


@pytest.mark.slow
def test_substitutions_cost_bits(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=288, n_ff=256, n_block=8)[0]
    protocol = with_tiers("Q8_0", "Q4_K_M", rules=())
    table = look(path, protocol)
    assert "shapes Q8_0" not in table.lines
    line = table.lines["shapes Q4_K_M"]
    assert line.state == "warning"
    assert "rows of 288 are not whole blocks" in line.found
    now, wanted = _shape_bpw(line.found)
    assert now > wanted
    assert wanted == pytest.approx(4.5, abs=0.05)  # Q4_K everywhere, but for the norms


def _shape_bpw(text: str) -> tuple[float, float]:
    now, wanted = text.split("; ", 1)[1].split(" bpw instead of ")
    return float(now), float(wanted.split(" ")[0])


def matrix_of(path: Path, base: Path, *, skip: str = "", rows: float = 1000.0) -> Path:
    entries = {t.name: ImatrixEntry(in_sum2=np.ones((1, t.shape[0]), np.float32), counts=np.array([rows], np.float32))
               for t in read_header(base).tensors if len(t.shape) > 1 and t.name != skip}
    write_imatrix(path, Imatrix(entries=entries, datasets=("c.txt",), chunk_count=2, chunk_size=512, legacy=False))
    return path


@pytest.mark.parametrize(("make", "state", "words"), [
    (lambda path, base: matrix_of(path, base), "ok", "entries over 2 chunks"),
    (lambda path, base: matrix_of(path, base, rows=3.0), "problem", "rows behind"),
    (lambda path, base: matrix_of(path, base, skip="blk.0.ffn_up.weight"), "problem", "none for 1 (blk.0.ffn_up.weight"),
    (lambda path, _: path.write_bytes(b"junk"), "problem", "imatrix.gguf"),
    (lambda path, _: None, "problem", "cannot be read"),
])
@pytest.mark.system
def test_a_given_matrix(tmp_path: Path, base: Path, make: Callable[[Path, Path], Any], state: str, words: str) -> None:
    make(tmp_path / "imatrix.gguf", base)
    table = look(base, with_tiers("Q8_0", "IQ2_S", rules=()), options=RunOptions(imatrix=tmp_path / "imatrix.gguf"))
    assert words in table.lines["importance matrix"].found
    assert table.state("importance matrix") == state
    assert table.state("calibration text") == table.state("overlap of texts") == "not applicable"


@pytest.mark.system
def test_thin_entries_are_a_warning_where_types_can_do_without(tmp_path: Path, base: Path) -> None:
    line = look(base, with_tiers("Q4_K_M"), options=RunOptions(imatrix=matrix_of(tmp_path / "i.gguf", base, rows=3.0)))
    assert line.state("importance matrix") == "warning"
    assert "few rows behind" in line.lines["importance matrix"].found


@pytest.mark.system
def test_importances_that_are_not_needed_or_there_already(tmp_path: Path, base: Path) -> None:
    assert look(base, with_tiers("Q8_0", rules=())).lines["importance matrix"].found == "no tier uses importances"
    run = RunFolder(path=tmp_path / "run")
    with open_run(run.path, GUARDED):
        (run.parts / "imatrix").mkdir(parents=True)
        (run.parts / "imatrix" / "0.sums").write_bytes(b"x")
    assert "a collection was begun and goes on" in look(base, run=run.path).lines["importance matrix"].found
    matrix_of(run.imatrix, base)
    write_json(run.record("imatrix", "imatrix"), {"imatrix_id": GUARDED.imatrix_id, "sha256": sha256_file(run.imatrix),
                                                  "offload": record_to_json(Offload())})
    assert "collected by this run" in look(base, run=run.path).lines["importance matrix"].found


# Texts


def text_of(folder: Path, name: str, data: bytes, **changes: Any) -> Corpus:
    (folder / name).write_bytes(data)
    return dataclasses.replace(GUARDED.corpus("demo-eval.txt"), name=name, file=name, size_bytes=len(data), documents="none",
                               sha256=hashlib.sha256(data).hexdigest(), **changes)


def with_texts(evaluation: Corpus, calibration: Corpus | None = None) -> Protocol:
    seen = calibration or GUARDED.corpus("demo-calibration.txt")
    return dataclasses.replace(GUARDED, corpora=(evaluation, seen),
                               eval=dataclasses.replace(GUARDED.eval, corpora=(evaluation.name,)),
                               imatrix=dataclasses.replace(GUARDED.imatrix, corpus=seen.name),
                               mtp=dataclasses.replace(GUARDED.mtp, corpus=evaluation.name))


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts, and nothing in the cache."""
    folder = tmp_path / "texts"
    folder.mkdir()
    monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


WORDS = b" ".join(b"word%d" % (i * i) for i in range(3000))


def test_a_text_with_other_bytes_or_on_no_hub(base: Path, corpora: Path) -> None:
    corpus = text_of(corpora, "e.txt", WORDS)
    table = look(base, with_texts(corpus))
    assert f"{len(WORDS):,} bytes, sha256 {corpus.sha256[:12]}" in table.lines["evaluation text e.txt"].found
    (corpora / "e.txt").write_bytes(WORDS.replace(b"word9 ", b"word8 "))
    line = look(base, with_texts(corpus)).lines["evaluation text e.txt"]
    assert (line.state, "it is another text" in line.found) == ("problem", True)
    (corpora / "e.txt").unlink()
    line = look(base, with_texts(corpus)).lines["evaluation text e.txt"]
    assert (line.state, "is on no hub" in line.found) == ("problem", True)


def test_a_text_that_is_fetched_later(base: Path, corpora: Path) -> None:
    corpus = text_of(corpora, "e.txt", WORDS, hub_dataset="a/b", hub_config="c", hub_split="d")
    (corpora / "e.txt").unlink()
    table = look(base, with_texts(corpus))
    assert table.state("evaluation text e.txt") == "warning"
    assert "fetches it from the hub's a/b" in table.lines["evaluation text e.txt"].found
    assert "when it starts (not all of them are here)" in table.lines["overlap of texts"].found
    assert table.lines["time"].found == "not measured: the text e.txt is not here"


def test_a_text_that_is_too_short_or_of_too_few_articles(base: Path, corpora: Path) -> None:
    protocol = with_texts(text_of(corpora, "e.txt", WORDS))
    short = Tokenized(np.zeros(200, np.int32), np.arange(1, 201), 260, False)
    line = look(base, protocol, CannedPool(tokenize=short)).lines["evaluation text e.txt"]
    assert (line.state, "expected at least two chunks of 128 tokens, got 200 tokens" in line.found) == ("problem", True)
    few = Tokenized(np.zeros(128 * 4, np.int32), np.arange(1, 128 * 4 + 1), 260, False)
    line = look(base, protocol, CannedPool(tokenize=few)).lines["evaluation text e.txt"]
    assert line.state == "warning"
    assert f"below {MIN_ARTICLES} no error can be told" in line.found


def test_a_folder_for_several_texts(base: Path, corpora: Path) -> None:
    protocol = with_texts(text_of(corpora, "e.txt", WORDS))
    protocol = dataclasses.replace(protocol, corpora=(*protocol.corpora, text_of(corpora, "f.txt", WORDS[::-1])),
                                   eval=dataclasses.replace(protocol.eval, corpora=("e.txt", "f.txt")))
    table = look(base, protocol, options=RunOptions(corpus=corpora / "e.txt"))
    assert "got the file" in table.lines["evaluation texts"].found
    assert table.lines["evaluation texts"].fix == "give the folder"
    assert look(base, protocol, options=RunOptions(corpus=corpora)).state("evaluation text f.txt") == "ok"


def test_a_calibration_text_that_is_too_short(base: Path, corpora: Path) -> None:
    short, near = text_of(corpora, "s.txt", b"a b c"), text_of(corpora, "n.txt", b"ab " * 500)
    evaluation = text_of(corpora, "e.txt", WORDS)
    line = look(base, with_texts(evaluation, short)).lines["calibration text"]
    assert (line.state, line.fix) == ("problem", "use a longer text or fewer chunks")
    line = look(base, with_texts(evaluation, near)).lines["calibration text"]
    assert (line.state, "1024 are asked for" in line.found) == ("warning", True)


def test_a_calibration_text_with_passages_of_the_evaluation_text(base: Path, corpora: Path) -> None:
    protocol = with_texts(text_of(corpora, "e.txt", WORDS), text_of(corpora, "c.txt", WORDS[:9000] + b" and other words"))
    line = look(base, protocol).lines["overlap of texts"]
    assert (line.state, line.fix) == ("problem", "calibrate on another text")
    assert "flatter the low tiers" in str(line.error)


def test_prompts_from_a_text_of_their_own(base: Path) -> None:
    protocol = dataclasses.replace(GUARDED, mtp=dataclasses.replace(GUARDED.mtp, corpus="demo-calibration.txt"))
    assert look(base, protocol).state("prompt text") == "ok"


# Library, disk, memory, time


def test_a_library_that_does_not_fit_its_binding(base: Path) -> None:
    broken = EnvironmentFault("llama-cpp-python does not fit its library: expected sizeof(llama_model_params) = 80, found 72; "
                              "install llama-cpp-python 0.3.36 again")
    table = look(base, pool=CannedPool(build=broken))
    assert table.lines["llama.cpp"].fix == "install llama-cpp-python 0.3.36 again"
    assert table.lines["loading"].found == "not looked at without llama.cpp"
    assert table.state("time") == table.state("build") == "not applicable"
    assert exit_code(table.lines.values()) == 3


@pytest.mark.parametrize(("info", "options", "words"), [
    ("CPU : SSE3 = 1 | AVX2 = 0", RunOptions(), "several times slower than it could be"),
    ("CPU : AVX2 = 1 | NEON = 1", RunOptions(offload=Offload(n_gpu_layers=9)), "this build has none: they stay on the CPU"),
])
def test_a_build_without_the_kernels_that_are_wanted(base: Path, monkeypatch: pytest.MonkeyPatch, info: str,
                                                     options: RunOptions, words: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    table = look(base, pool=CannedPool(build=dataclasses.replace(BUILD, system_info=info)), options=options)
    assert table.state("build") == "warning"
    assert words in table.lines["build"].found


def test_a_library_that_is_missing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "LIBRARIES", ("numpy", "no-such-package"))
    line = look(base).lines["libraries"]
    assert (line.found, line.fix) == ("expected the packages that quantkit was installed with, missing no-such-package",
                                      "install gguf-quantkit again")
    assert isinstance(line.error, EnvironmentFault)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_tiers_that_do_not_fit_the_disk(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(n_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, n_bytes))

    free(1000)
    table = look(base, run=tmp_path / "run")
    assert isinstance(table.lines["disk"].error, NoSpace)
    assert "for 2 tiers" in table.lines["disk"].found
    assert "--drop-files" in table.lines["disk"].fix
    assert table.state("temporary files") == "warning"
    protocol = with_tiers("Q8_0", "Q6_K")
    with Case(base, protocol, run=tmp_path / "run", pool=CannedPool()) as case:  # type: ignore[arg-type]
        case.evaluation("demo-eval.txt")
        both = sum(need.size_bytes for need in doctor_work.needs(case))
    free(both)
    assert look(base, protocol, run=tmp_path / "run").state("disk") == "ok"
    free(both - 1)
    assert look(base, protocol, run=tmp_path / "run").state("disk") == "problem"
    assert look(base, protocol, run=tmp_path / "run", options=RunOptions(drop_files=True)).state("disk") == "ok"


def needed(base: Path, run: Path, protocol: Protocol = GUARDED, **options: Any) -> dict[str, int]:
    with Case(base, protocol, run=run, options=RunOptions(**options), pool=CannedPool()) as case:  # type: ignore[arg-type]
        return {need.folder.name: need.size_bytes for need in doctor_work.needs(case)}


def test_what_stands_already_needs_no_space_again(base: Path, tmp_path: Path) -> None:
    fresh = needed(base, tmp_path / "run")
    (tmp_path / "run" / "quants").mkdir(parents=True)
    (tmp_path / "run" / "quants" / "tiny-Q8_0.gguf").write_bytes(bytes(100_000))
    assert needed(base, tmp_path / "run")["quants"] == fresh["quants"] - 100_000


def test_a_measured_tier_whose_file_was_dropped_needs_no_space(base: Path, tmp_path: Path) -> None:
    fresh = needed(base, tmp_path / "run", drop_files=True)
    write_json(RunFolder(path=tmp_path / "run").summary("Q8_0"), {})
    then = needed(base, tmp_path / "run", drop_files=True)
    assert then["quants"] < fresh["quants"]  # Q4_K_M is smaller
    assert needed(base, tmp_path / "run")["quants"] > fresh["quants"]
    write_json(RunFolder(path=tmp_path / "run").summary("Q4_K_M"), {})
    assert needed(base, tmp_path / "run", drop_files=True)["quants"] == 0


def test_what_is_asked_for_needs_scratch(tmp_path: Path, base: Path) -> None:
    plain = needed(base, tmp_path)["parts"]
    weights = needed(base, tmp_path, weights=True)["parts"]
    assert weights - plain > 2 * base.stat().st_size
    panels = needed(base, tmp_path, audit=AuditOptions(memory_bytes=1))["parts"]
    assert panels > plain
    head = tiny_model(tmp_path / "head-BF16.gguf", n_embd=256, n_ff=256, n_nextn=1)[0]
    plan = dataclasses.replace(GUARDED.plan, mtp_mode="strip")
    inside, stripped = needed(head, tmp_path), needed(head, tmp_path, dataclasses.replace(GUARDED, plan=plan))
    assert stripped["parts"] > inside["parts"]
    assert stripped["quants"] == inside["quants"]
    apart = needed(head, tmp_path, dataclasses.replace(GUARDED, plan=dataclasses.replace(plan, mtp_mode="separate")))
    assert apart["quants"] > stripped["quants"]


@pytest.mark.parametrize(("memory_bytes", "words"), [(1, "own buffers alone need"), (GIB, "base and 2 tiers side by side")])
def test_memory(base: Path, tmp_path: Path, memory_bytes: int, words: str) -> None:
    table = look(base, run=tmp_path / "run", options=RunOptions(n_workers=1, audit=AuditOptions(memory_bytes=memory_bytes)))
    assert words in table.lines["memory"].found
    assert table.state("memory") == ("warning" if memory_bytes == 1 else "ok")


def test_a_base_larger_than_the_memory_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hollow = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256)[0]
    big = 1 << 40
    monkeypatch.setattr("quantkit.job.doctor_case.describe_model",
                        lambda header: describe_model(dataclasses.replace(header, file_bytes=big)))
    pool = CannedPool()
    table = look(hollow, pool=pool)
    assert (table.state("memory"), "every pass reads it from disk again" in table.lines["memory"].found) == ("warning", True)
    assert (table.state("time"), "does not fit" in table.lines["time"].found) == ("not applicable", True)
    assert "time of a chunk" not in pool.steps


def test_time_is_estimated_from_one_chunk(base: Path) -> None:
    words = look(base, options=RunOptions(n_workers=1)).lines["time"].found
    # 80 chunks, two tiers and base, 2 s each
    assert "one chunk of base took 2 s on 1 thread(s)" in words
    assert "audit 8 min (80 chunks, 3 passes)" in words
    assert ", calibration " in words
    assert "calibration" not in look(base, with_tiers("Q8_0", rules=())).lines["time"].found
    pool = CannedPool()
    assert look(base, pool=pool, measure=False).lines["time"].found == "not measured, as asked"
    assert "time of a chunk" not in pool.steps
    crashed = look(base, pool=CannedPool(**{"time of a chunk": EngineError("the worker died")})).lines["time"]
    assert isinstance(crashed.error, EngineError)


# The run directory


def test_a_run_directory_that_cannot_be_one(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with open_run(tmp_path / "other", FULL):
        pass
    for path, words in ((tmp_path / "file", "found the file"), (tmp_path / "mine", "found other files in"),
                        (tmp_path / "other", "holds a run of protocol demo-v1")):
        line = look(base, run=path).lines["run directory"]
        assert isinstance(line.error, InputError)
        assert words in line.found
        assert line.fix.startswith("choose another")
    with FolderLock(tmp_path / "held"):
        line = look(base, run=tmp_path / "held").lines["run directory"]
    assert f"another process (pid {os.getpid()}) works in" in line.found
    assert line.error is not None
    assert line.error.exit_code == 3
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in look(base, run=tmp_path / "new").lines["run directory"].found


def begun(path: Path, base: Path, **record: Any) -> RunFolder:
    """A run directory as a run of this base leaves it."""
    with open_run(path, GUARDED) as run:
        write_json(run.manifest, {"base": {"sha256": sha256_file(base), "size_bytes": base.stat().st_size, **record}, "tiers": {}})
    return run


def test_a_run_of_another_base(base: Path, tmp_path: Path) -> None:
    assert look(base, run=begun(tmp_path / "same", base).path).state("run directory") == "ok"
    size = look(base, run=begun(tmp_path / "size", base, size_bytes=7).path).lines["run directory"]
    assert "holds a run of another base" in size.found
    sha256 = begun(tmp_path / "sha256", base, sha256="0" * 64).path
    assert f"found {sha256_file(base)}" in look(base, run=sha256).lines["run directory"].found
    assert look(base, run=sha256, measure=False).state("run directory") == "ok"  # the run hashes it itself


def test_leftovers(base: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", base)
    assert look(base, run=run.path).lines["leftovers"].found == "none"
    (run.path / ".lock").write_text("99999\n")
    line = look(base, run=run.path).lines["leftovers"]
    assert (line.state, line.found) == ("ok", "the lock of pid 99999, which is gone: it holds nothing")
    run.quants.mkdir()
    (run.quants / ".tiny-Q8_0.gguf.123-0123abcd.tmp").write_bytes(bytes(2048))
    (run.quants / "tiny-Q4_K_M.gguf").write_bytes(bytes(64))
    (run.quants / "other-Q4_K_M.gguf").write_bytes(base.read_bytes())
    line = look(base, run=run.path).lines["leftovers"]
    assert line.state == "warning"
    for words in ("1 temporary file(s) of a killed run, 2.00 KiB", "tiers of another protocol or base: other-Q4_K_M.gguf",
                  "damaged tiers, which are made again: tiny-Q4_K_M.gguf"):
        assert words in line.found
    assert f"delete them from {run.quants}" in line.fix
    assert sorted(p.name for p in run.quants.iterdir())[0].endswith(".tmp")  # nothing is removed


def test_part_files_that_go_on_and_those_that_nothing_takes_up(base: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", base)
    write_json(run.record("quantize", "Q4_K_M"), {"key": "k", "subject": {"sha256": "ab"}})
    with Case(base, GUARDED, run=run.path, pool=CannedPool()) as case:  # type: ignore[arg-type]
        evaluation = case.evaluation("demo-eval.txt")
    assert isinstance(evaluation, Evaluation)
    folder = run.parts / "audit"
    folder.mkdir(parents=True)
    (folder / f"{evaluation.audit_id(sha256_file(base), 'ab')}.rows").write_bytes(b"rows")
    line = look(base, run=run.path).lines["leftovers"]
    assert (line.state, line.found) == ("ok", "rows of Q4_K_M are there in part, and go on")
    (folder / "0123.rows").write_bytes(b"rows")
    line = look(base, run=run.path).lines["leftovers"]
    assert (line.state, "1 part file(s), 4 B, of no tier's audit here" in line.found) == ("warning", True)


# Places


def test_nowhere_to_write(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone"))
    monkeypatch.setattr(doctor_host, "cache_folder", lambda: None)
    monkeypatch.delenv("QUANTKIT_CORPUS_DIR", raising=False)
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    table = look(base)
    assert isinstance(table.lines["temporary files"].error, EnvironmentFault)
    assert table.lines["temporary files"].fix == "set TMPDIR to a folder where one can"
    assert (table.state("home"), table.state("locale")) == ("warning", "warning")


def test_an_os_error_in_a_check_is_its_finding(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/a/text")

    monkeypatch.setattr("quantkit.job.doctor_case.locate_corpus", refuse)
    line = look(base).lines["calibration text"]
    assert (line.state, line.found) == ("problem", "the system refused at /a/text: Permission denied")


# What a run makes of it


def healthy(base: Path, listener: Listener, pool: CannedPool, protocol: Protocol = GUARDED, **case: Any) -> list[str]:
    with Case(base, protocol, measure=False, progress=listener, pool=pool, **case) as own:  # type: ignore[arg-type]
        return [plan.tier for plan in require_healthy(own)]


def test_a_run_looks_without_a_worker_and_says_nothing_of_what_is_well(base: Path, tmp_path: Path) -> None:
    listener, pool = Listener(), CannedPool()
    assert healthy(base, listener, pool, run=tmp_path / "run") == [t.name for t in GUARDED.plan.tiers]
    assert (listener.notes, pool.steps) == ([], [])


def test_a_run_notes_warnings_and_goes_on(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256, type_name="F16")[0]
    listener = Listener()
    healthy(path, listener, CannedPool(), with_tiers("Q8_0"), run=tmp_path / "run")
    assert [note.split(":")[0] for note in listener.notes] == ["source"]


def test_a_run_stops_at_problems_with_the_first_one_s_words(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"found the file .*: choose another path$"):
        healthy(base, Listener(), CannedPool(), run=tmp_path / "file")
    broken = tiny_model(tmp_path / "q.gguf", type_name="Q8_0")[0]
    with pytest.raises(PlanError, match=r"(?s)start from the unquantized file\n\(1 more problem\(s\): `quantkit doctor`"):
        healthy(broken, Listener(), CannedPool(), run=tmp_path / "file")


def test_exit_codes(base: Path) -> None:
    lines = [Finding(check="a", state="problem", found="", fix="", error=error) for error in (NoSpace("x"), PlanError("y"))]
    assert [exit_code(lines[:1]), exit_code(lines), exit_code([])] == [3, 2, 0]
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(("message", "found", "fix"), [
    ("expected a, got b: take the rule out", "expected a, got b", "take the rule out"),
    ("found x; choose another run directory", "found x", "choose another run directory"),
    ("a: quantizing twice loses more than once; start from the unquantized file", "a: quantizing twice loses more than once",
     "start from the unquantized file"),
    ("m.gguf: cannot be read: No such file or directory", "m.gguf: cannot be read: No such file or directory", ""),
])
def test_advice_is_told_from_what_was_found(message: str, found: str, fix: str) -> None:
    assert split_advice(message) == (found, fix)
