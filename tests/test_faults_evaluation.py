"""Faults of texts, tokens, perplexity and KLD that other tools have had, where no other test shows that they cannot occur here.

`docs/FAULTS.md` lists all of them with their tests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.engine import lockstep
from quantkit.job.ladder import RunOptions, audit_files
from quantkit.job.parts import read_parquet
from quantkit.job.progress import Silent
from quantkit.job.rundir import read_json
from quantkit.measure.scoring import Scorer
from quantkit.measure.summary import summarize
from quantkit.report.table import retention_md
from quantkit.spec.protocol import Protocol, load_protocol
from tests.gguf_factory import model_metadata, model_tensors, tiny_gguf, tiny_model
from tests.measure.synthetic import make_rows
from tests.report.test_table import HEADER, make_table


@pytest.mark.parametrize("setting", ["eval.n_ctx=256", "eval.n_ubatch=64", "eval.n_chunk=32", "eval.flash_attn=off"])
def test_another_chunk_length_or_micro_batch_is_another_evaluation(setting: str) -> None:
    frozen = load_protocol("wikitext2-quick-v1")
    assert load_protocol("wikitext2-quick-v1", [setting]).eval_id != frozen.eval_id


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", ["eval.n_ctx=64", "eval.chunks=spread", "eval.n_chunk=8"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "base-BF16.gguf")[0]


@pytest.mark.engine
def test_the_chunk_length_is_the_number_asked_for(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    """llama.cpp makes a context of 256 for 64; the chunk stays 64 and has 31 scored tokens."""
    result = audit_files(base, protocol, tmp_path / "run", [base], Silent(), RunOptions(n_workers=1))
    rows, _ = read_parquet(result.folder.rows(base.stem))
    assert np.unique(rows["chunk"], return_counts=True)[1].tolist() == [31] * 8
    assert (rows["pos"].min(), rows["pos"].max()) == (32, 62)


@pytest.mark.engine
def test_a_text_of_1023_tokens_at_512_is_an_error(base: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"x" * 1023)  # a token a byte
    frozen = load_protocol("demo-v1", ["eval.n_ctx=512", "eval.n_batch=512"])
    corpus = dataclasses.replace(frozen.corpora[0], name="short", file="short.txt", size_bytes=1023, documents="none",
                                 sha256=hashlib.sha256(text.read_bytes()).hexdigest())
    evaluated = dataclasses.replace(frozen.eval, corpora=("short",))
    short = dataclasses.replace(frozen, corpora=(corpus, *frozen.corpora), eval=evaluated)
    with pytest.raises(InputError, match="expected at least two chunks of 512 tokens, got 1023 tokens from short"):
        audit_files(base, short, tmp_path / "run", [base], Silent(), RunOptions(n_workers=1, corpus=text))


@pytest.mark.engine
def test_a_vocabulary_with_two_tokens_swapped_is_refused(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    keys = model_metadata()
    tokens = keys["tokenizer.ggml.tokens"]
    a, b = tokens.index("a"), tokens.index("e")
    tokens[a], tokens[b] = tokens[b], tokens[a]
    swapped = tiny_gguf(tmp_path / "swapped.gguf", model_tensors(), keys)[0]
    result = audit_files(base, protocol, tmp_path / "run", [swapped], Silent(), RunOptions(n_workers=1))
    assert "expected the base's tokens of demo-eval.txt, found others" in str(result.failed["swapped"])


@pytest.mark.engine
def test_an_f16_base_is_called_f16(protocol: Protocol, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "model.gguf", type_name="F16")[0]
    result = audit_files(base, protocol, tmp_path / "run", [base], Silent(), RunOptions(n_workers=1))
    assert read_json(result.folder.manifest)["base"]["type"] == "F16"
    text = retention_md(dataclasses.replace(HEADER, base_type="F16"), make_table())
    assert "tiny-BF16.gguf, F16, sha256" in text
    assert "| Size vs F16 |" in text


def test_perplexity_is_of_the_total_nll_over_all_tokens() -> None:
    """Two lines of 1 and 3 tokens: exp((2 + 3·4) / 4) = exp(3.5), where averaging per line would give (e² + e⁴) / 2."""
    rows = make_rows(n_article=1, n_chunk=2, n_pos=2)
    rows["nll_base"] = [2.0, 4.0, 4.0, 4.0]
    assert summarize(rows).ppl_base.value == pytest.approx(math.exp(3.5), rel=1e-14)


def test_one_chunk_shows_its_count_and_why_it_has_no_error() -> None:
    one = summarize(make_rows(n_article=1, n_chunk=1))
    table = [dataclasses.replace(row, summary=one) for row in make_table()]
    text = retention_md(dataclasses.replace(HEADER, n_chunk=1, n_scored=20, n_article=1, chunk_rule="all 1 chunks"), table)
    assert "20 tokens of 1 chunks" in text
    assert "No ± and no interval: 1 article." in text
    assert one.kld.se_iid is not None


def test_sizes_are_64_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16,384 x 151,940 logits are more than 2^31, their bytes more than 2^33."""
    asked: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda handle, start, size: asked.append(size))
    monkeypatch.setattr(np, "memmap", lambda file, kind, mode, shape: np.empty(0, kind))
    lockstep.scratch_array(tmp_path, (2, 8191, 151_940))
    assert asked == [2 * 8191 * 151_940 * 4]
    assert asked[0] > 2**33


def test_scoring_a_large_vocabulary_takes_bounded_memory() -> None:
    base = np.zeros((64, 150_000), np.float32)
    targets, scorer = np.zeros(64, np.int32), Scorer()
    tracemalloc.start()
    scorer.score(base, targets, [base, base])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20  # the logits are 38 MB, and nothing of their size is made
