"""Records through JSON: they come back equal, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantkit.core.files import canonical_json
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import (
    Comparison,
    Floor,
    FloorVerdict,
    KernelFloor,
    PairVerdict,
    Slice,
    Slices,
    Verdicts,
)

PAIR = PairVerdict(a="Q8_0", b="Q4_K_M", statistic="kld", difference=-1.5, se=0.1, n_article_needed=12, verdict="better")
VERDICTS = Verdicts(
    tiers=("Q8_0", "Q4_K_M"), rows_sha256={"Q8_0": "a", "Q4_K_M": "b"}, n_article=60, g_eff=40.5, alpha=0.05, n_looks=1,
    comparisons=(Comparison(statistic="kld", margin=0.05, pairs=(PAIR,), letters={"Q8_0": "a", "Q4_K_M": "b"}),),
    floor_factor=2.0, floors=(FloorVerdict(tier="Q8_0", reason="5 articles"),))
FLOOR = Floor(floor_id="c", name="Q8_0", sha256="d", chunks=(1, 5), n_scored=510, n_article=2, kernels=(
    KernelFloor(rows_sha256="e", kernel="no_repack",
                flash_attn="on", use_extra_bufts=False, n_ubatch=512, kld=Estimate(value=1e-4), kld_max=0.1,
                same_top_p=Estimate(value=0.99, reason="2 articles")),))
SLICES = Slices(tier="Q8_0", rows_sha256="a", slices=(
    Slice(kind="entropy", name="below 1 nat", lo=0.0, hi=1.0, n_scored=10, n_article=3, share=0.1, kld_share=0.01, flip_share=None,
          kld=Estimate(value=0.1), same_top_p=None),))


@pytest.mark.parametrize("record", [PAIR, VERDICTS, FLOOR, SLICES])
def test_a_record_comes_back_equal(record: Any) -> None:
    assert record_from_json(type(record), json.loads(canonical_json(record_to_json(record)))) == record


def damaged(**other: Any) -> dict[str, Any]:
    data = record_to_json(VERDICTS)
    assert isinstance(data, dict)
    return {**data, **other}


@pytest.mark.parametrize(("data", "error"), [
    (damaged(extra=1), "expected the keys tiers, rows_sha256"),
    ({"tiers": []}, "expected the keys"),
    ([], "got list"),
    (damaged(tiers="Q8_0"), "expected a list, got str"),
    (damaged(rows_sha256=[]), "expected an object, got list"),
    (damaged(n_article="60"), "expected int, got str"),
    (damaged(n_article=True), "expected int, got bool"),
    (damaged(alpha=None), "expected float, got NoneType"),
])
def test_anything_else_is_refused(data: Any, error: str) -> None:
    with pytest.raises((KeyError, TypeError), match=error):
        record_from_json(Verdicts, data)


def test_the_largest_kernel_is_the_floor() -> None:
    small = KernelFloor(rows_sha256="e", kernel="x",
                        flash_attn="off", use_extra_bufts=True, n_ubatch=512, kld=Estimate(value=1e-6), kld_max=0.0,
                        same_top_p=Estimate(value=1.0))
    both = Floor(floor_id="c", name="Q8_0", sha256="d", chunks=(1,), n_scored=255, n_article=1, kernels=(small, *FLOOR.kernels))
    largest = both.largest()
    assert largest is not None
    assert largest.kernel == "no_repack"
    assert Floor(floor_id="c", name="x", sha256="d", chunks=(), n_scored=0, n_article=0, kernels=()).largest() is None


def test_a_comparison_is_found_by_its_statistic() -> None:
    assert VERDICTS.comparison("kld").pairs == (PAIR,)
    with pytest.raises(KeyError, match="no comparison by ppl: there are kld"):
        VERDICTS.comparison("ppl")
