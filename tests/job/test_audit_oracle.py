"""The audit against numbers that other programs printed (the oracle's README says which), on the real test models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.engine.lockstep import tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.job.ladder import RunResult, audit_files
from quantkit.job.parts import read_parquet
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder, read_json
from quantkit.spec.protocol import load_protocol
from quantkit.spec.records import TierSummary

pytestmark = pytest.mark.engine

TIERS = ("Q8_0", "Q4_K_M", "IQ2_S", "IQ1_M")
# The oracle's logits came from another machine: README of the oracle.
ON_KLD, ON_PPL = 1e-3, 1e-4


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((shared / "oracle" / "oracle.json").read_text())
    return held


@pytest.fixture(scope="module")
def run(shared: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One audit of the four stock files and of the base itself, over the first 16 chunks."""
    folder = tmp_path_factory.mktemp("oracle run")
    files = [tiny_model, *(shared / "oracle" / f"stock-{tier}.gguf" for tier in TIERS)]
    result: RunResult = audit_files(tiny_model, load_protocol("wikitext2-first16-v1"), folder / "a run", files, Silent())
    assert result.failed == {}
    return result.folder


def summary(run: RunFolder, name: str) -> TierSummary:
    return TierSummary.from_json(read_json(run.summary(name))["summary"])


def test_tokens_are_the_oracles(oracle: dict[str, Any], run: RunFolder) -> None:
    assert read_json(run.manifest)["token_ids_sha256"] == oracle["token_ids_sha256_int32_le"]
    assert read_json(run.summary("stock-Q8_0"))["n_chunk_total"] == oracle["n_chunk_full"]


@pytest.mark.parametrize("tier", TIERS)
def test_a_tiers_numbers_are_the_oracles(oracle: dict[str, Any], run: RunFolder, tier: str) -> None:
    actual, expected = summary(run, f"stock-{tier}"), oracle["exact"][tier]
    assert actual.n_scored == expected["n_scored"] == 16 * 255
    assert actual.ppl_base.value == pytest.approx(expected["ppl_base"], rel=ON_PPL)
    assert actual.ppl_q.value == pytest.approx(expected["ppl_q"], rel=ON_PPL)
    assert actual.ln_ppl_ratio.value == pytest.approx(expected["ln_ppl_ratio"]["value"], rel=0.01, abs=2e-5)
    assert actual.kld.value == pytest.approx(expected["kld"]["value"], rel=ON_KLD)
    assert actual.p_diff.value == pytest.approx(expected["p_diff"]["value"], rel=0.01, abs=2e-6)
    assert actual.p_diff_rms.value == pytest.approx(expected["p_diff_rms"], rel=ON_KLD)
    assert actual.same_top_p.value == pytest.approx(expected["same_top_p"]["value"], abs=2 / 4080)
    for q in ("0.5", "0.9", "0.95", "0.99", "0.999"):
        assert actual.kld_quantile(float(q)).value == pytest.approx(expected["kld_quantiles"][q], rel=0.01)


@pytest.mark.parametrize("tier", TIERS)
def test_errors_are_the_oracles(oracle: dict[str, Any], run: RunFolder, tier: str) -> None:
    actual, expected = summary(run, f"stock-{tier}"), oracle["exact"][tier]
    for name in ("kld", "ln_ppl_ratio", "p_diff", "same_top_p"):
        estimate = getattr(actual, name)
        assert estimate.se_iid == pytest.approx(expected[name]["se_iid"], rel=0.01)
        assert estimate.se_chunk == pytest.approx(expected[name]["se_cluster"], rel=0.01)
        assert estimate.se is None
        assert "articles" in estimate.reason


@pytest.mark.parametrize("tier", TIERS)
def test_llama_perplexity_prints_the_same_where_its_base_file_does_not_clip(oracle: dict[str, Any], run: RunFolder,
                                                                            tier: str) -> None:
    actual, printed = summary(run, f"stock-{tier}"), oracle["llama_perplexity"][tier]
    assert actual.same_top_p.value is not None
    assert actual.same_top_p.se_iid is not None
    assert actual.ppl_q.value == pytest.approx(printed["ppl_q"][0], rel=ON_PPL)
    assert actual.kld.value == pytest.approx(printed["kld"][0], rel=2e-3, abs=2e-6)
    assert actual.kld.se_iid == pytest.approx(printed["kld"][1], rel=0.02, abs=1e-6)
    assert 100 * actual.same_top_p.value == pytest.approx(printed["same_top_p_pct"][0], abs=0.06)
    assert 100 * actual.same_top_p.se_iid == pytest.approx(printed["same_top_p_pct"][1], abs=2e-3)


@pytest.mark.parametrize("tier", TIERS)
def test_the_first_rows_are_the_oracles(oracle: dict[str, Any], run: RunFolder, tier: str) -> None:
    rows, _ = read_parquet(run.rows(f"stock-{tier}"))
    for row, expected in zip(rows, oracle["exact"][tier]["first_rows"], strict=False):
        assert (row["chunk"], row["pos"], row["token"]) == (0, expected["pos"], expected["token"])
        assert row["nll_base"] == pytest.approx(expected["nll_base"], rel=1e-3)
        assert row["nll_q"] == pytest.approx(expected["nll_q"], rel=5e-3)


def test_the_base_against_itself_is_exact_in_every_row(run: RunFolder, tiny_model: Path) -> None:
    rows, _ = read_parquet(run.rows(tiny_model.stem))
    assert len(rows) == 4080
    assert np.count_nonzero(rows["kld"]) == 0
    assert np.array_equal(rows["nll_q"], rows["nll_base"])
    own = summary(run, tiny_model.stem)
    assert (own.kld.value, own.ln_ppl_ratio.value, own.same_top_p.value) == (0.0, 0.0, 1.0)


def perplexity(folder: Path, model: Path, settings: list[str]) -> float:
    """Audit a model against itself; its perplexity."""
    protocol = load_protocol("wikitext2-first16-v1", settings)
    result = audit_files(model, protocol, folder, [model], Silent())
    assert result.failed == {}
    value = summary(result.folder, model.stem).ppl_q.value
    assert value is not None
    return value


def tokens_of(model: Path, text: bytes) -> npt.NDArray[np.int32]:
    with WorkerPool(1) as pool:
        ids: npt.NDArray[np.int32] = pool.call("tokenize", tokenize, path=model, text=text).ids
    return ids


def test_a_vocabulary_that_adds_bos(oracle: dict[str, Any], moe_model: Path, wiki_test: Path, tmp_path: Path) -> None:
    expected = oracle["moe_bos"]
    ids = tokens_of(moe_model, wiki_test.read_bytes())
    assert len(ids) == expected["n_tokens"]
    assert ids[:16].tolist() == expected["token_ids_first_16"]
    ppl = perplexity(tmp_path / "run", moe_model, ["eval.n_chunk=4"])
    assert ppl == pytest.approx(expected["ppl_exact"], rel=ON_PPL)
    assert ppl == pytest.approx(expected["ppl_llama_perplexity"], rel=ON_PPL)


def test_a_real_model_of_another_tokenizer(oracle: dict[str, Any], smollm2: Path, wiki_test: Path, tmp_path: Path) -> None:
    expected = oracle["smollm2"]
    assert len(tokens_of(smollm2, wiki_test.read_bytes())) == expected["n_tokens"]
    ppl = perplexity(tmp_path / "run", smollm2, [f"eval.n_chunk={expected['n_chunk']}"])
    assert ppl == pytest.approx(expected["ppl_exact"], rel=ON_PPL)
