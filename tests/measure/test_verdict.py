"""Paired verdicts: hand computations, mirror symmetry, the rate of false ones, letters."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.core.stats import group_by, student_quantile, student_upper_tail
from quantkit.measure.numbers import Rows
from quantkit.measure.summary import base_rows
from quantkit.measure.verdict import PairStatistic, compare_means, compare_pairs, letters, observe_pair
from quantkit.spec.verdict_records import PairVerdict
from tests.measure.synthetic import df_by_hand, make_rows

MARGIN = math.log(1.05)
STATISTICS: tuple[PairStatistic, ...] = ("kld", "ln_ppl_ratio", "same_top_p")


def scaled(rows: Rows, factor: float, *, noise: float = 0.0, seed: int = 1) -> Rows:
    """A tier whose kld is a factor of another's, token by token more or less, and so in the mean of many."""
    own = rows.copy()
    own["kld"] *= factor * np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)) - noise**2 / 2)
    return own


def log_ratios(a: Rows, b: Rows) -> list[float]:
    """θ without each article."""
    keep = [a["article"] != g for g in np.unique(a["article"])]
    return [math.log(a["kld"][k].mean() / b["kld"][k].mean()) for k in keep]


def pair(a: Rows, b: Rows, statistic: PairStatistic = "kld", **other: Any) -> PairVerdict:
    return compare_pairs({"A": a, "B": b}, statistic, **{"margin": MARGIN, **other})[0]


def test_ratio_by_hand() -> None:
    a = make_rows(n_article=12)
    b = scaled(a, 1.2, noise=0.5)
    got = pair(a, b)
    theta = math.log(a["kld"].mean() / b["kld"].mean())
    without = np.array(log_ratios(a, b))
    se = math.sqrt(11 / 12 * ((without - without.mean()) ** 2).sum())
    assert got.difference == pytest.approx(theta, rel=1e-12)
    assert got.se == pytest.approx(se, rel=1e-9)
    df = df_by_hand([80] * 12, without)
    assert got.p == pytest.approx(2 * student_upper_tail(abs(theta) / se, df), rel=1e-7)
    assert got.lo == pytest.approx(theta - student_quantile(0.975, df) * se, rel=1e-9)
    assert got.p_equivalent == pytest.approx(student_upper_tail((MARGIN - abs(theta)) / se, df), rel=1e-7)
    assert got.detectable == pytest.approx((student_quantile(0.975, df) + student_quantile(0.8, df)) * se, rel=1e-9)
    assert got.n_article_needed == math.ceil(12 * (got.detectable / MARGIN) ** 2)  # type: ignore[operator]


def test_differences_are_of_the_means() -> None:
    a, b = make_rows(seed=1), make_rows(seed=1)
    b["nll_q"] += 0.01 * (1 + b["article"] % 2)
    b["top1_q"][::7] += 1
    assert pair(a, b, "ln_ppl_ratio").difference == pytest.approx(-0.015, rel=1e-9)
    same = [np.mean(x["top1_q"] == x["top1_base"]) for x in (a, b)]
    assert pair(a, b, "same_top_p").difference == pytest.approx(same[0] - same[1], rel=1e-12)


def test_the_better_one_is_named_on_each_scale() -> None:
    a = make_rows(n_article=20)
    b = scaled(a, 3.0, noise=0.1)
    b["nll_q"] += 0.5
    b["top1_q"][::2] += 1
    for statistic in STATISTICS:
        assert pair(a, b, statistic, margin=1e-6).verdict == "better"
        assert pair(b, a, statistic, margin=1e-6).verdict == "worse"


def test_the_four_kinds_of_verdict() -> None:
    a = make_rows(n_article=20)
    assert pair(a, scaled(a, 1.3, noise=0.1)).verdict == "better"
    assert pair(a, scaled(a, 1.02, noise=0.01)).verdict == "better, by less than the margin"
    assert pair(a, scaled(a, 1.0, noise=0.05)).verdict == "equivalent"
    assert pair(a, scaled(a, 1.0, noise=2.0)).verdict == "not resolved"


@pytest.mark.parametrize("statistic", STATISTICS)
def test_equal_tiers_differ_by_exactly_zero(statistic: PairStatistic) -> None:
    for rows in (make_rows(), base_rows(make_rows())):
        got = pair(rows, rows.copy(), statistic)
        assert [got.difference, got.se, got.p, got.verdict] == [0.0, 0.0, 1.0, "equivalent"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2), st.sampled_from(STATISTICS))
def test_a_against_b_mirrors_b_against_a(seed: int, factor: float, statistic: PairStatistic) -> None:
    a, b = make_rows(n_chunk=2, n_pos=10, seed=seed), make_rows(n_chunk=2, n_pos=10, seed=seed)
    b["kld"] = scaled(a, factor, noise=0.3, seed=seed)["kld"]
    b["nll_q"] *= factor
    b["top1_q"][:: max(1, seed % 9)] += 1
    one, two = pair(a, b, statistic), pair(b, a, statistic)
    if one.difference is None or two.difference is None:
        assert one.reason == two.reason
        return
    assert one.difference == -two.difference
    assert one.se == pytest.approx(two.se, rel=1e-9, abs=1e-15)
    assert one.p_holm == pytest.approx(two.p_holm, rel=1e-9)
    assert one.p_equivalent == pytest.approx(two.p_equivalent, rel=1e-9)
    swap = {"better": "worse", "worse": "better"}
    word, *rest = one.verdict.split(",", 1)
    assert two.verdict == ",".join([swap.get(word, word), *rest])


def test_few_articles_resolve_nothing_and_say_so() -> None:
    a = make_rows(n_article=5)
    got = pair(a, scaled(a, 3.0, noise=0.1))
    assert [got.difference, got.p, got.verdict, got.reason] == [None, None, "not resolved", "5 articles"]


def test_a_ratio_with_zero_is_not_a_number() -> None:
    a = make_rows()
    got = pair(a, base_rows(a))
    assert [got.difference, got.verdict] == [None, "not resolved"]
    assert got.reason is not None
    assert "exactly zero" in got.reason


def test_the_family_is_all_pairs() -> None:
    a = make_rows(n_article=20)
    tiers = {name: scaled(a, 1 + 0.1 * i, noise=0.3, seed=i) for i, name in enumerate("ABCD")}
    got = compare_pairs(tiers, "kld", margin=MARGIN)
    assert [(v.a, v.b) for v in got] == list(combinations("ABCD", 2))
    for v in got:
        assert v.p is not None
        assert v.p_holm is not None
        assert v.p <= v.p_holm <= min(1.0, 6 * v.p) + 1e-15
        assert v.se is not None
        assert v.difference is not None
        df = df_by_hand([80] * 20, log_ratios(tiers[v.a], tiers[v.b]))
        assert v.hi_simultaneous == pytest.approx(v.difference + student_quantile(1 - 0.025 / 6, df) * v.se, rel=1e-9)
    assert compare_pairs({"A": a}, "kld", margin=MARGIN) == ()


@pytest.mark.parametrize("column", ["token", "nll_base", "chunk"])
def test_rows_of_other_tokens_or_another_base_are_refused(column: str) -> None:
    a, b = make_rows(), make_rows()
    b[column][-1] += 1
    with pytest.raises(InputError, match=f"another {column} in B than in A"):
        pair(a, b)
    with pytest.raises(InputError, match="another chunk in B than in A"):
        pair(a, b[:-1])


@pytest.mark.slow
def test_false_verdicts_are_as_rare_as_promised() -> None:
    """1,000 pairs of tiers that are equal in the long run: at most 5 % and its Monte Carlo error are told apart."""
    rng = np.random.default_rng(7)
    rows = make_rows(n_article=24, n_chunk=2, n_pos=4)
    n_false = 0
    for _ in range(1000):
        effects = rng.normal(0, 0.25, (2, 24))[:, rows["article"]] + rng.normal(0, 0.1, (2, 48))[:, rows["chunk"]]
        a, b = rows.copy(), rows.copy()
        a["kld"], b["kld"] = np.exp(effects) * rng.gamma(0.7, 1, (2, len(rows)))
        n_false += pair(a, b).verdict.startswith(("better", "worse"))
    assert n_false <= 64


def resolved(a: str, b: str) -> PairVerdict:
    return PairVerdict(a=a, b=b, statistic="kld", verdict="better")


def test_tiers_share_a_letter_where_nothing_separates_them() -> None:
    assert letters("ABC", [resolved("A", "C")]) == {"A": "a", "B": "ab", "C": "b"}
    assert letters("ABC", []) == {"A": "a", "B": "a", "C": "a"}
    assert letters("ABC", [resolved(*p) for p in combinations("ABC", 2)]) == {"A": "a", "B": "b", "C": "c"}
    assert letters("ABCD", [resolved("A", "B"), resolved("C", "D")]) == {"A": "ab", "B": "cd", "C": "ac", "D": "bd"}
    assert letters([], []) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**28 - 1))
def test_letters_say_exactly_what_the_verdicts_say(n: int, bits: int) -> None:
    names = [f"T{i}" for i in range(n)]
    apart = [p for i, p in enumerate(combinations(names, 2)) if bits >> i & 1]
    got = letters(names, [resolved(*p) for p in apart])
    for p in combinations(names, 2):
        assert bool(set(got[p[0]]) & set(got[p[1]])) == (p not in apart)


def test_looks_share_the_errors() -> None:
    a = make_rows(n_article=20)
    b = scaled(a, 1.1, noise=0.3)
    once, often = pair(a, b), pair(a, b, n_looks=5)
    assert often.difference == once.difference
    assert once.p is not None
    assert once.se is not None
    assert once.difference is not None
    assert often.p == pytest.approx(min(1.0, 5 * once.p))
    df = df_by_hand([80] * 20, log_ratios(a, b))
    assert often.hi == pytest.approx(once.difference + student_quantile(1 - 0.025 / 5, df) * once.se)
    assert often.detectable == pytest.approx((student_quantile(1 - 0.025 / 5, df) + student_quantile(0.8, df)) * once.se)


def test_means_of_equal_chunks_give_the_verdicts_of_their_tokens() -> None:
    a = make_rows(n_article=10)
    b = scaled(a, 1.1, noise=0.5)
    b["nll_q"] += 0.01
    b["top1_q"][::5] += 1
    for statistic in STATISTICS:
        by_token = pair(a, b, statistic)
        means = {name: observe_pair(rows, statistic).reshape(40, 20).mean(axis=1) for name, rows in (("A", a), ("B", b))}
        by_chunk = compare_means(means, statistic, group_by(a["article"][::20]), margin=MARGIN)[0]
        assert by_chunk.difference == pytest.approx(by_token.difference, rel=1e-9)
        assert by_chunk.se == pytest.approx(by_token.se, rel=1e-9)
        assert by_chunk.verdict == by_token.verdict
