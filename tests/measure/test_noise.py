"""Noise floors: hand computations, which tiers are indistinguishable, and how often one is called so wrongly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.core.stats import student_quantile, student_upper_tail
from quantkit.measure.noise import KernelSettings, compare_to_floors, mark_arithmetic, summarize_floor
from quantkit.measure.numbers import Rows
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.verdict_records import FloorVerdict, PairVerdict
from tests.measure.synthetic import df_by_hand, make_rows

KERNEL = KernelSettings("no_repack", "on", False, 512)


def scaled(rows: Rows, factor: float, *, noise: float = 0.1, seed: int = 1) -> Rows:
    own = rows.copy()
    own["kld"] *= factor * np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)) - noise**2 / 2)
    return own


def beside(tier: Rows, floor: Rows, factor: float = 2.0) -> FloorVerdict:
    return compare_to_floors({"A": tier}, {"A": {"k": floor}}, factor=factor)[0]


def test_the_ratio_by_hand() -> None:
    tier = make_rows(n_article=12)
    floor = scaled(tier, 0.8, noise=0.5)
    got = beside(tier, floor)
    keep = [tier["article"] != g for g in range(12)]
    theta = math.log(tier["kld"].mean() / floor["kld"].mean())
    without = np.array([math.log(tier["kld"][k].mean() / floor["kld"][k].mean()) for k in keep])
    se = math.sqrt(11 / 12 * ((without - without.mean()) ** 2).sum())
    assert got.ratio == pytest.approx(math.exp(theta))
    df = df_by_hand([80] * 12, without)
    assert got.hi == pytest.approx(math.exp(theta + student_quantile(0.975, df) * se))
    assert got.p == pytest.approx(student_upper_tail((math.log(2) - theta) / se, df))
    assert [got.kld, got.floor, got.kernel] == [tier["kld"].mean(), floor["kld"].mean(), "k"]


def test_a_tier_is_indistinguishable_only_below_the_factor_of_its_own_floor() -> None:
    tier = make_rows(n_article=20)
    assert beside(tier, scaled(tier, 0.9)).indistinguishable
    assert not beside(tier, scaled(tier, 0.4)).indistinguishable
    assert not beside(tier, scaled(tier, 0.6, noise=3.0)).indistinguishable  # the value is below, the upper limit is not
    assert beside(tier, scaled(tier, 0.4), factor=4.0).indistinguishable


def test_the_largest_perturbation_is_the_floor() -> None:
    tier = make_rows(n_article=20)
    got = compare_to_floors({"A": tier}, {"A": {"small": scaled(tier, 0.1), "large": scaled(tier, 0.9)}}, factor=2)[0]
    assert [got.kernel, got.indistinguishable] == ["large", True]


def test_the_floor_may_hold_some_of_the_chunks_only() -> None:
    tier = make_rows(n_article=20)
    part = scaled(tier, 0.9)[tier["chunk"] % 2 == 0]
    got = beside(tier, part)
    assert got.kld == tier["kld"][tier["chunk"] % 2 == 0].mean()
    part["token"][0] += 1
    with pytest.raises(InputError, match="expected the floor of A on tokens that its rows hold"):
        beside(tier, part)


def test_the_family_is_all_tiers() -> None:
    tiers = {name: make_rows(n_article=20, seed=i) for i, name in enumerate("ABC")}
    got = compare_to_floors(tiers, {name: {"k": scaled(rows, 0.55, noise=0.5)} for name, rows in tiers.items()}, factor=2.0)
    for v in got:
        assert v.p is not None
        assert v.p_holm is not None
        assert v.p <= v.p_holm <= min(1.0, 3 * v.p)


def test_what_has_no_ratio_says_why() -> None:
    tier = make_rows(n_article=20)
    assert beside(make_rows(n_article=3), make_rows(n_article=3)).reason == "3 articles"
    still = beside(tier, base_rows(tier))
    assert [still.ratio, still.indistinguishable] == [None, False]
    assert "no other arithmetic moves it" in (still.reason or "")
    exact = beside(base_rows(tier), tier)
    assert [exact.indistinguishable, exact.reason] == [True, "equal to base in every row"]
    assert compare_to_floors({"A": tier}, {"A": {}}, factor=2)[0].reason == "the protocol perturbs nothing"
    assert compare_to_floors({}, {}, factor=2) == ()


@pytest.mark.slow
def test_a_tier_at_the_factor_is_rarely_called_indistinguishable() -> None:
    """1,000 tiers whose KLD is twice their floor in the long run: at most 5 % and its Monte Carlo error pass a factor of 2."""
    rng = np.random.default_rng(11)
    rows = make_rows(n_article=24, n_chunk=2, n_pos=4)
    n_false = 0
    for _ in range(1000):
        effects = rng.normal(0, 0.25, (2, 24))[:, rows["article"]]
        tier, floor = rows.copy(), rows.copy()
        tier["kld"], floor["kld"] = np.array([[2.0], [1.0]]) * np.exp(effects) * rng.gamma(0.7, 1, (2, len(rows)))
        n_false += beside(tier, floor).indistinguishable
    assert n_false <= 64


def test_a_floor_is_summarized_as_any_kld() -> None:
    rows = make_rows()
    got = summarize_floor(rows, KERNEL, "x")
    assert got.kld == summarize(rows).kld
    assert [got.kernel, got.flash_attn, got.use_extra_bufts, got.n_ubatch] == list(KERNEL)
    assert got.kld_max == rows["kld"].max()
    assert summarize_floor(base_rows(rows), KERNEL, "x").kld.value == 0.0


def test_pairs_that_differ_by_less_than_a_floor_are_marked() -> None:
    pair = PairVerdict(a="A", b="B", statistic="kld", verdict="better")
    assert mark_arithmetic(pair, 0.010, 0.012, 0.003, 0.001).arithmetic is True
    assert mark_arithmetic(pair, 0.010, 0.020, 0.003, 0.001).arithmetic is False
    assert mark_arithmetic(pair, 0.010, 0.012, None, 0.001).arithmetic is None
