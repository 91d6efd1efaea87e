"""Summaries against the formulas written out, the published rules, and the oracle's own arithmetic."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.core.stats import group_by, jackknife_se, quantile_limits, student_quantile
from quantkit.measure.numbers import Rows, p_diff
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.records import ROW_DTYPE, Estimate, TierSummary
from tests.measure.synthetic import df_by_hand, make_rows

MEANS = ("ppl_base", "ppl_q", "ln_ppl_ratio", "ppl_drift", "kld", "p_diff", "p_diff_rms", "same_top_p")


def without(rows: Rows, article: int) -> Rows:
    return np.asarray(rows[rows["article"] != article])


def test_values_are_the_definitions() -> None:
    rows = make_rows()
    got = summarize(rows)
    assert [got.n_chunk, got.n_scored, got.n_article] == [40, 800, 10]
    assert got.g_eff == pytest.approx(10, rel=1e-15)
    assert got.kld.value == np.mean(rows["kld"])
    assert got.ppl_base.value == pytest.approx(math.exp(rows["nll_base"].sum() / 800), rel=1e-14)
    assert got.ppl_q.value == pytest.approx(math.exp(rows["nll_q"].sum() / 800), rel=1e-14)
    assert got.ln_ppl_ratio.value == pytest.approx(math.log(got.ppl_q.value / got.ppl_base.value), rel=1e-10)  # type: ignore[operator]
    assert got.ppl_drift.value == pytest.approx(got.ppl_q.value / got.ppl_base.value - 1, rel=1e-10)  # type: ignore[operator]
    difference = np.exp(-rows["nll_q"]) - np.exp(-rows["nll_base"])
    assert got.p_diff.value == pytest.approx(difference.mean(), rel=1e-12)
    assert got.p_diff_rms.value == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-14)
    assert got.same_top_p.value == pytest.approx(np.mean(rows["top1_q"] == rows["top1_base"]), rel=1e-15)
    assert got.nll_correlation.value == pytest.approx(np.corrcoef(rows["nll_base"], rows["nll_q"])[0, 1], rel=1e-12)
    for q in (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        assert got.kld_quantile(q).value == np.quantile(rows["kld"], q)
    assert got.p_diff_quantile(0.001).value == np.quantile(difference, 0.001)


def test_se_iid_is_llama_perplexitys() -> None:
    rows = make_rows()
    got = summarize(rows)

    def plain(x: Any) -> float:
        return math.sqrt((np.mean(x**2) - np.mean(x) ** 2) / (len(x) - 1))

    same = got.same_top_p.value
    assert same is not None
    assert got.kld.se_iid == pytest.approx(plain(rows["kld"]), rel=1e-10)
    assert got.ppl_q.se_iid == pytest.approx(np.exp(rows["nll_q"].mean()) * plain(rows["nll_q"]), rel=1e-10)
    assert got.same_top_p.se_iid == pytest.approx(math.sqrt(same * (1 - same) / 799), rel=1e-10)
    square = p_diff(rows) ** 2
    assert got.p_diff_rms.se_iid == pytest.approx(0.5 / math.sqrt(square.mean()) * plain(square), rel=1e-10)


def test_se_chunk_is_cr1_over_chunks() -> None:
    rows = make_rows()
    residual = rows["kld"] - rows["kld"].mean()
    total = sum(residual[rows["chunk"] == chunk].sum() ** 2 for chunk in range(40))
    assert summarize(rows).kld.se_chunk == pytest.approx(math.sqrt(40 / 39 * total) / 800, rel=1e-12)


def test_published_error_is_the_jackknife_over_articles_on_the_log_scale() -> None:
    rows = make_rows()
    got = summarize(rows).kld
    theta = np.array([np.log(without(rows, article)["kld"].mean()) for article in range(10)])
    se = math.sqrt(9 / 10 * ((theta - theta.mean()) ** 2).sum())
    t = student_quantile(0.975, df_by_hand([80] * 10, theta))
    mean = rows["kld"].mean()
    assert got.se == pytest.approx(mean * se, rel=1e-10)
    assert got.lo == pytest.approx(mean * math.exp(-t * se), rel=1e-10)
    assert got.hi == pytest.approx(mean * math.exp(t * se), rel=1e-10)
    assert got.reason is None


def test_published_error_of_a_ratio_is_paired_and_on_its_own_scale() -> None:
    rows = make_rows()
    got = summarize(rows).ln_ppl_ratio
    theta = np.array([(w["nll_q"] - w["nll_base"]).mean() for w in (without(rows, a) for a in range(10))])
    se = math.sqrt(9 / 10 * ((theta - theta.mean()) ** 2).sum())
    assert got.value is not None
    assert got.se == pytest.approx(se, rel=1e-10)
    reach = student_quantile(0.975, df_by_hand([80] * 10, theta)) * se
    assert got.hi == pytest.approx(got.value + reach, rel=1e-10)
    drift = summarize(rows).ppl_drift
    assert drift.se == pytest.approx(math.exp(got.value) * se, rel=1e-10)
    assert drift.lo == pytest.approx(math.expm1(got.value - reach), rel=1e-10)
    unpaired = summarize(rows).ppl_base
    assert unpaired.se is not None
    assert unpaired.value is not None
    assert se < unpaired.se / unpaired.value / 2


def test_unequal_articles_take_degrees_of_freedom_from_their_sizes() -> None:
    rows = make_rows(n_article=16)
    rows = rows[(rows["article"] >= 4) | (rows["chunk"] % 4 == 0)]  # four articles of one chunk, twelve of four
    got = summarize(rows)
    theta = np.array([p_diff(w).mean() for w in (without(rows, a) for a in range(16))])
    se = math.sqrt(15 / 16 * ((theta - theta.mean()) ** 2).sum())
    df = df_by_hand([20] * 4 + [80] * 12, theta)
    assert got.g_eff == pytest.approx(52**2 / (4 + 12 * 16), rel=1e-14)
    assert df <= 0.75 * ((4 + 12 * 16) ** 2 / (4 + 12 * 256) - 1)
    assert got.p_diff.value is not None
    assert got.p_diff.hi == pytest.approx(got.p_diff.value + student_quantile(0.975, df) * se, rel=1e-10)


def test_one_article_that_makes_the_error_takes_the_degrees_of_freedom_away() -> None:
    rows = make_rows(n_article=20)

    def factor() -> float:
        """How many standard errors the upper end is away, on the scale of the interval."""
        got = summarize(rows).kld
        assert None not in (got.value, got.se, got.hi)
        return math.log(got.hi / got.value) * got.value / got.se  # type: ignore[operator]

    assert factor() < 2.5
    rows["kld"][rows["article"] == 3] *= 30
    assert factor() == pytest.approx(student_quantile(0.975, 1.0), rel=0.1)


def test_ends_of_shares_and_roots_are_transformed_back() -> None:
    rows = make_rows()
    got = summarize(rows)
    flip = np.array([np.log(np.mean(w["top1_q"] != w["top1_base"])) for w in (without(rows, a) for a in range(10))])
    t = student_quantile(0.975, df_by_hand([80] * 10, flip))
    reach = t * math.sqrt(9 / 10 * ((flip - flip.mean()) ** 2).sum())
    share = np.mean(rows["top1_q"] != rows["top1_base"])
    assert got.same_top_p.lo == pytest.approx(1 - share * math.exp(reach), rel=1e-10)
    assert got.same_top_p.hi == pytest.approx(1 - share * math.exp(-reach), rel=1e-10)
    root = np.array([np.log((p_diff(w) ** 2).mean()) for w in (without(rows, a) for a in range(10))])
    se = math.sqrt(9 / 10 * ((root - root.mean()) ** 2).sum())
    assert got.p_diff_rms.value is not None
    assert got.p_diff_rms.se == pytest.approx(got.p_diff_rms.value * se / 2, rel=1e-10)
    t = student_quantile(0.975, df_by_hand([80] * 10, root))
    assert got.p_diff_rms.lo == pytest.approx(got.p_diff_rms.value * math.exp(-t * se / 2), rel=1e-10)


def test_the_share_never_leaves_its_range() -> None:
    rows = make_rows(n_article=10, n_chunk=1, n_pos=5, flip_share=0.0)
    rows["top1_q"][:3] += 1
    rows["top1_q"][25] += 1
    got = summarize(rows).same_top_p
    assert got.lo is not None
    assert got.hi is not None
    assert got.lo >= 0
    assert got.hi <= 1


@pytest.mark.parametrize(("n_article", "reason"), [(1, "1 article"), (2, "2 articles"), (9, "9 articles")])
def test_few_articles_have_no_interval_and_no_published_error(n_article: int, reason: str) -> None:
    got = summarize(make_rows(n_article=n_article))
    for name in MEANS:
        estimate: Estimate = getattr(got, name)
        assert [estimate.se, estimate.lo, estimate.hi, estimate.reason] == [None, None, None, reason]
        assert estimate.value is not None
        assert estimate.se_iid is not None
        assert estimate.se_chunk is not None
    assert {(x.lo, x.hi, x.reason) for x in got.kld_quantiles if 0 < x.q < 1} == {(None, None, reason)}


def test_ten_articles_worth_fewer_have_no_interval() -> None:
    rows = make_rows(n_article=12)
    rows = rows[(rows["article"] < 6) | (rows["chunk"] % 4 == 0)]  # six of four chunks, six of one
    assert summarize(rows).kld.reason == f"12 articles, worth {(6 * 16 + 6) ** 2 / (6 * 256 + 6):.1f} of equal length"
    assert summarize(make_rows(n_article=10)).kld.se is not None


def test_one_chunk_has_no_chunk_error() -> None:
    got = summarize(make_rows(n_article=1, n_chunk=1))
    assert [got.kld.se_chunk, got.kld.reason] == [None, "1 article"]
    assert got.kld.se_iid is not None


def test_one_token_has_no_error_at_all() -> None:
    got = summarize(make_rows(n_article=1, n_chunk=1, n_pos=1, flip_share=1.0))
    assert [got.kld.se_iid, got.kld.se_chunk, got.kld.se] == [None, None, None]
    assert [got.nll_correlation.value, got.nll_correlation.reason] == [None, "one of the two does not vary"]


def test_base_against_itself_is_exactly_zero() -> None:
    got = summarize(base_rows(make_rows()))
    zero = Estimate(value=0.0, se_iid=0.0, se_chunk=0.0, se=0.0, lo=0.0, hi=0.0, reason="exactly zero in every row")
    assert got.kld == zero
    assert got.p_diff_rms == zero
    assert got.ln_ppl_ratio == Estimate(value=0.0, se_iid=0.0, se_chunk=0.0, se=0.0, lo=0.0, hi=0.0)
    assert got.same_top_p.value == 1.0
    assert got.ppl_q == got.ppl_base
    assert got.nll_correlation.value == 1.0
    assert {x.value for x in got.kld_quantiles} == {0.0}


def test_no_flips_have_an_upper_limit_of_three_over_n() -> None:
    got = summarize(make_rows(flip_share=0.0)).same_top_p
    assert [got.value, got.se, got.lo, got.hi] == [1.0, None, 1 - 3 / 800, 1.0]
    assert got.reason == "no flips: lower limit 1 − 3/N"


def test_flips_of_one_article_only_have_no_interval() -> None:
    rows = make_rows(flip_share=0.0)
    rows["top1_q"][:5] += 1
    got = summarize(rows).same_top_p
    assert [got.se, got.lo, got.hi, got.reason] == [None, None, None, "one article carries it all"]
    assert got.value == pytest.approx(1 - 5 / 800)


def test_a_tier_better_than_base_keeps_its_sign() -> None:
    rows = make_rows()
    rows["nll_q"] = rows["nll_base"] - 0.001 * (1 + rows["article"] % 3)
    got = summarize(rows)
    assert got.ln_ppl_ratio.value is not None
    assert got.ln_ppl_ratio.value < 0
    assert got.p_diff.value is not None
    assert got.p_diff.value > 0


def test_quantiles_have_limits_where_the_tail_is_thick_enough() -> None:
    rows = make_rows(n_article=20, n_chunk=8, n_pos=50)
    got = summarize(rows)
    median, p95, p99, top = (got.kld_quantile(q) for q in (0.5, 0.95, 0.99, 1.0))
    assert median.lo is not None
    assert median.hi is not None
    assert median.lo < median.value < median.hi
    assert [p95.reason, top.reason] == [None, "an extreme has no interval"]
    assert p99.reason == "no interval beyond 5 and 95 %: one article can make such a tail"
    assert [p99.lo, p99.hi] == [None, None]
    assert p99.value == np.quantile(rows["kld"], 0.99)
    assert [got.p_diff_quantile(q).lo is None for q in (0.01, 0.05, 0.95, 0.99)] == [True, False, False, True]
    thin = summarize(make_rows(n_article=20, n_chunk=1, n_pos=15)).kld_quantile(0.95)  # 300 tokens
    assert thin.reason == "fewer than 16 tokens beyond the quantile"


def test_perplexity_has_an_error_and_no_interval() -> None:
    rows = make_rows()
    got = summarize(rows).ppl_q
    theta = np.array([w["nll_q"].mean() for w in (without(rows, a) for a in range(10))])
    se = math.sqrt(9 / 10 * ((theta - theta.mean()) ** 2).sum())
    assert got.se == pytest.approx(np.exp(rows["nll_q"].mean()) * se, rel=1e-10)
    assert [got.lo, got.hi] == [None, None]
    assert got.reason is not None
    assert got.reason.startswith("no interval: perplexity says as much of the articles")


def test_a_quantiles_limits_are_those_of_the_share_beyond_it() -> None:
    rows = make_rows(n_article=20, n_chunk=4, n_pos=40)
    rows = rows[(rows["article"] >= 5) | (rows["chunk"] % 4 == 0)]  # five articles of one chunk, fifteen of four
    articles = group_by(rows["article"])
    share = articles.means_without((rows["kld"] > np.quantile(rows["kld"], 0.9)).astype(float))
    reach = student_quantile(0.975, df_by_hand([40] * 5 + [160] * 15, share)) * jackknife_se(share)
    got = summarize(rows).kld_quantile(0.9)
    assert [got.lo, got.hi] == pytest.approx(np.quantile(rows["kld"], [0.9 - reach, 0.9 + reach]).tolist(), rel=1e-9)
    assert (got.lo, got.hi, None) == quantile_limits(rows["kld"], 0.9, articles, 0.95)


def test_parts_in_any_order_give_the_same_bits() -> None:
    rows = make_rows()
    parts = [rows[rows["chunk"] % 3 == i] for i in range(3)]
    assert summarize(np.concatenate(parts[::-1])) == summarize(rows)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_permuting_tokens_inside_chunks_leaves_the_clustered_errors(seed: int) -> None:
    rows = make_rows()
    rng = np.random.default_rng(seed)
    moved = rows.copy()
    for chunk in range(40):
        where = np.flatnonzero(rows["chunk"] == chunk)
        moved[where] = rows[rng.permutation(where)]
        moved["pos"][where] = rows["pos"][where]
    a, b = summarize(rows), summarize(moved)
    for name in MEANS:
        x, y = getattr(a, name), getattr(b, name)
        assert y.se_chunk == pytest.approx(x.se_chunk, rel=1e-9)
        assert y.se == pytest.approx(x.se, rel=1e-9)


def test_rows_that_cannot_be_summarized_are_refused() -> None:
    rows = make_rows()
    with pytest.raises(InputError, match="got none"):
        summarize(rows[:0])
    with pytest.raises(InputError, match="chunk 0 position 256 twice"):
        summarize(np.concatenate([rows, rows[:1]]))
    with pytest.raises(InputError, match="expected rows with the columns chunk, article"):
        summarize(np.zeros(3, [("kld", "f8")]))
    for name in ("nll_base", "nll_q", "kld"):
        bad = rows.copy()
        bad[name][45] = np.nan
        with pytest.raises(InputError, match="at chunk 2 position 261"):
            summarize(bad)


def test_row_columns_are_the_published_ones() -> None:
    assert list(ROW_DTYPE.names or ()) == ["chunk", "article", "pos", "token", "nll_base", "nll_q", "kld", "entropy_base",
                                           "top1_base", "top1_q", "margin_base"]
    assert ROW_DTYPE.itemsize == 64


def test_a_perplexity_that_no_float_holds_is_none_with_a_reason() -> None:
    rows = make_rows()
    rows["nll_q"] += 900
    summary = summarize(rows)
    assert summary.ppl_q.value is None
    assert "too large for a number: the mean that it comes from is 90" in str(summary.ppl_q.reason)
    assert summary.ppl_drift.value is None
    assert summary.ln_ppl_ratio.value == pytest.approx(900, rel=1e-3)
    assert TierSummary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary
