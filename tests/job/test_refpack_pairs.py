"""Verdicts across references: what stands whatever a pack's KLD falls short by, and what does not."""

from __future__ import annotations

import dataclasses
import math

import pytest

from quantkit.core.errors import InputError
from quantkit.job.gate_obligations import TierEvidence, compare_tier
from quantkit.job.refpack_pairs import compare_kld
from quantkit.measure.numbers import Rows
from quantkit.measure.verdict import compare_pairs
from quantkit.spec.protocol import load_protocol
from quantkit.spec.refpack_records import PackReference
from tests.measure.synthetic import make_rows
from tests.measure.test_verdict import scaled

BASE = make_rows(n_article=20, level=0.01)
MARGIN = math.log1p(0.05)


def pack(shortfall: float | None, sha256: str = "a") -> PackReference:
    return PackReference(kind="pack", file="ref", sha256=sha256, mass=0.9, max_ids=9, tail_mass=0.1, backend="CPU",
                         same_arithmetic=True, n_full=20, shortfall=shortfall, shortfall_se=None if shortfall is None else 0.0)


def verdict(a: Rows, b: Rows, of_a: PackReference | None, of_b: PackReference | None) -> tuple[str, str | None]:
    (pair,) = compare_kld({"a": a, "b": b}, {"a": of_a, "b": of_b}, margin=MARGIN)
    return pair.verdict, pair.reason


MEAN = float(BASE["kld"].mean())
LESS, MORE = scaled(BASE, 0.8, noise=0.01), scaled(BASE, 1.25, noise=0.01, seed=1)


@pytest.mark.parametrize(("a", "b", "of_a", "of_b", "expected"), [
    (LESS, BASE, pack(0.001 * MEAN), None, "better"),
    (LESS, BASE, pack(0.3 * MEAN), None, "not resolved"),  # 0.8 + 0.3 is more than 1
    (LESS, BASE, pack(None), None, "not resolved"),  # by how much it falls short is not known
    (MORE, BASE, pack(None), None, "worse"),  # the bound is larger already
    (BASE, LESS, None, pack(0.3 * MEAN), "not resolved"),
    (BASE, MORE, None, pack(None), "better"),
    (LESS, BASE, pack(0.3 * MEAN, "a"), pack(0.0, "b"), "not resolved"),
    (LESS, BASE, pack(0.01 * MEAN, "a"), pack(0.3 * MEAN, "b"), "better"),
    (LESS, BASE, pack(None, "a"), pack(None, "b"), "not resolved"),
])
def test_only_what_does_not_hang_on_the_bound_is_said(a: Rows, b: Rows, of_a: PackReference | None, of_b: PackReference | None,
                                                      expected: str) -> None:
    word, reason = verdict(a, b, of_a, of_b)
    assert word == expected
    assert ("decides" in (reason or "")) == (expected == "not resolved")
    assert "reference" in (reason or "")


@pytest.mark.parametrize("ref", [None, pack(0.3 * MEAN)])
def test_of_one_reference_pairs_are_as_they_are(ref: PackReference | None) -> None:
    rows = {"less": LESS, "base": BASE, "more": MORE}
    assert compare_kld(rows, dict.fromkeys(rows, ref), margin=MARGIN) == compare_pairs(rows, "kld", margin=MARGIN)


def test_a_file_measured_both_ways_is_not_called_better_by_its_shortfall() -> None:
    word, reason = verdict(scaled(BASE, 0.99), BASE, pack(0.01 * MEAN), None)
    assert word in ("not resolved", "equivalent")
    assert reason is not None


def test_a_gate_takes_no_pack_beside_base() -> None:
    full = TierEvidence(size_bytes=1000, rows={"": make_rows(n_article=20, n_chunk=8)}, mtp=None, smoke=None, packs={"": None})
    packed = dataclasses.replace(full, packs={"": "a"})
    protocol = load_protocol("demo-v1")
    assert {o.verdict for o in compare_tier(packed, packed, protocol, "")} <= {"not worse", "not compared"}
    with pytest.raises(InputError, match="expected incumbent and candidate measured against one reference"):
        compare_tier(full, packed, protocol, "")
