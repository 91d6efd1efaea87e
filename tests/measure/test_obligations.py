"""Not worse, better, worse, not shown: paired rows against margins."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.core.stats import group_by, jackknife_se, student_upper_tail
from quantkit.measure.numbers import Rows
from quantkit.measure.obligations import Margins, Obligation, compare_rows, compare_shares, settle
from tests.measure.synthetic import make_rows

MARGINS = Margins(kld_mean=0.02, kld_p999=0.1, same_top_p=0.002, ln_ppl_ratio=0.001)


def compare(incumbent: Rows, candidate: Rows, margins: Margins = MARGINS) -> dict[str, Obligation]:
    return {o.name: o for o in compare_rows(incumbent, candidate, margins, alpha=0.05)}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(n_article=20, n_chunk=4, n_pos=255)  # 20,400 tokens: 20 beyond the 99.9 % quantile


def test_equal_rows_are_not_worse_in_anything(rows: Rows) -> None:
    assert {name: o.verdict for name, o in compare(rows, rows).items()} == dict.fromkeys(
        ("kld_mean", "kld_p999", "same_top_p", "ln_ppl_ratio"), "not worse")


def test_a_smaller_kld_is_better_and_a_larger_one_worse(rows: Rows) -> None:
    small = rows.copy()
    small["kld"] *= 0.25
    down, up = compare(rows, small), compare(small, rows)
    assert [down["kld_mean"].verdict, down["kld_p999"].verdict] == ["better", "better"]
    assert [up["kld_mean"].verdict, up["kld_p999"].verdict] == ["worse", "worse"]
    assert down["kld_mean"].loss == pytest.approx(math.log(0.25))
    assert (down["same_top_p"].verdict, down["ln_ppl_ratio"].verdict) == ("not worse", "not worse")


def test_p_is_students_with_the_jackknife_over_articles(rows: Rows) -> None:
    other = make_rows(n_article=20, n_chunk=4, n_pos=255)
    other["kld"] *= np.random.default_rng(1).lognormal(0, 0.3, len(other))
    found = compare(rows, other)["kld_mean"]
    articles = group_by(rows["article"])
    se = jackknife_se(np.log(articles.means_without(other["kld"])) - np.log(articles.means_without(rows["kld"])))
    loss = math.log(other["kld"].mean() / rows["kld"].mean())
    df = articles.n_effective - 1
    assert found.se == pytest.approx(se)
    assert found.p_not_worse == pytest.approx(student_upper_tail((math.log(1.02) - loss) / se, df))
    assert found.p_better == pytest.approx(min(1.0, 2 * student_upper_tail(abs(loss) / se, df)))


def test_what_the_text_cannot_show_is_not_shown(rows: Rows) -> None:
    noisy = rows.copy()
    noisy["nll_q"] = rows["nll_base"] + np.random.default_rng(2).normal(0.01, 0.5, len(rows))
    found = compare(rows, noisy)["ln_ppl_ratio"]
    assert found.loss is not None
    assert abs(found.loss) < 0.02
    assert found.verdict in ("not shown", "worse")
    wide = compare(rows, noisy, dataclasses.replace(MARGINS, ln_ppl_ratio=0.1))["ln_ppl_ratio"]
    assert wide.verdict == "not worse"


def test_flips_within_the_margin_are_not_worse_and_beyond_it_are(rows: Rows) -> None:
    same = np.flatnonzero(rows["top1_q"] == rows["top1_base"])
    few, many = rows.copy(), rows.copy()
    few["top1_q"][same[::1000]] += 1
    many["top1_q"][same[::50]] += 1
    assert compare(rows, few)["same_top_p"].verdict == "not worse"
    assert compare(rows, many)["same_top_p"].verdict == "worse"
    assert compare(many, rows)["same_top_p"].verdict == "better"


def test_a_tail_of_fewer_than_16_tokens_is_not_compared() -> None:
    short = make_rows(n_article=20, n_chunk=4, n_pos=63)
    found = compare(short, short)["kld_p999"]
    assert (found.verdict, found.reason) == ("not compared", "fewer than 16 tokens beyond the quantile")


def test_a_tail_that_grows_alone_is_seen_though_the_mean_is_not_worse(rows: Rows) -> None:
    heavy = rows.copy()
    tail = rows["kld"] > np.quantile(rows["kld"], 0.998)
    heavy["kld"][tail] *= 2
    heavy["kld"][~tail] *= 0.9
    found = compare(rows, heavy)
    assert found["kld_mean"].verdict == "better"
    assert found["kld_p999"].verdict == "worse"


def test_a_kld_of_zero_has_no_logarithm_and_still_a_verdict(rows: Rows) -> None:
    zero = rows.copy()
    zero["kld"] = 0.0
    better, worse, same = compare(rows, zero)["kld_mean"], compare(zero, rows)["kld_mean"], compare(zero, zero)["kld_mean"]
    assert [better.verdict, worse.verdict, same.verdict] == ["better", "worse", "not worse"]
    assert [better.loss, worse.loss, same.loss] == [None, None, 0.0]


def test_holm_decides_over_the_family_who_is_better(rows: Rows) -> None:
    def one(p: float) -> Obligation:
        return Obligation(name="kld_mean", incumbent=1.0, candidate=0.9, loss=-0.1, margin=0.02, p_not_worse=0.0, p_better=p,
                          verdict="better" if p < 0.05 else "not worse")

    untested = Obligation(name="smoke", incumbent=1.0, candidate=1.0, margin=1.0, verdict="not worse")
    found = settle([one(0.04), untested, one(0.001), one(0.9)], alpha=0.05)
    assert [o.verdict for o in found] == ["not worse", "not worse", "better", "not worse"]
    assert [o.p_better_holm for o in found] == [0.08, None, 0.003, 0.9]


def test_shares_measured_apart_add_their_errors() -> None:
    good = compare_shares("acceptance_rate", 0.70, 0.71, (0.006, 0.008), 15, 0.03, alpha=0.05)
    assert good.se == pytest.approx(0.01)
    assert good.verdict == "not worse"
    assert compare_shares("acceptance_rate", 0.70, 0.68, (0.006, 0.008), 15, 0.03, alpha=0.05).verdict == "not shown"
    assert compare_shares("acceptance_rate", 0.70, 0.60, (0.006, 0.008), 15, 0.03, alpha=0.05).verdict == "worse"
    assert compare_shares("acceptance_rate", 0.70, 0.69, None, 1, 0.03, alpha=0.05).verdict == "not worse"
    assert compare_shares("acceptance_rate", 0.70, 0.10, None, 1, 0.03, alpha=0.05).verdict == "worse"


def test_rows_that_cannot_be_paired_are_refused(rows: Rows) -> None:
    other = rows.copy()
    other["token"][5] += 1
    with pytest.raises(InputError, match="another token in the candidate"):
        compare(rows, other)
    few = make_rows(n_article=4, n_chunk=16)
    with pytest.raises(InputError, match="six articles of equal length at least, got 4 articles"):
        compare(few, few)
