"""Is a candidate worse than the incumbent, or better? Paired rows, number by number, with the margins of the protocol.

For each number a loss θ is defined that is positive where the candidate is worse; rows are paired by token, errors are jackknifed
over articles, p comes from Student's t with G_eff − 1 degrees of freedom.

    kld_mean       θ = ln(KLD_c / KLD_i), margin ln(1 + m)
    kld_p999       θ = ln(Q_c / Q_i) of the 99.9 % quantiles, margin ln(1 + m); see `_compare_quantiles`
    same_top_p     θ = share_i − share_c
    ln_ppl_ratio   θ = ratio_c − ratio_i

    not worse   the one-sided test against θ >= margin rejects at α; each on its own, since every one must hold
    better      the two-sided test against θ = 0 rejects with θ < 0; Holm over the family, since one of many is enough
    worse       θ is beyond the margin; not shown: it is not, but this text cannot show it

"not shown" counts as worse: what could not be shown is not protected. A number that this text cannot support for any file (a tail
of fewer than 16 tokens) is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quantkit.core.errors import InputError
from quantkit.core.stats import Floats, Groups, group_by, holm, jackknife_se, student_quantile, student_upper_tail
from quantkit.measure.gate import Verdict
from quantkit.measure.numbers import Rows, flips, kld, nll_difference
from quantkit.measure.summary import LEVEL, sorted_rows, too_few_to_test
from quantkit.measure.verdict import check_paired

_QUANTILE = 0.999
_MIN_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How much worse is not worse: fractions for kld_mean and kld_p999, differences for the others; all above 0."""

    kld_mean: float
    kld_p999: float
    same_top_p: float
    ln_ppl_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Obligation:
    """One number of one tier, candidate beside incumbent.

    Attributes:
        name: of the obligation. incumbent, candidate: the numbers; None where there is none.
        loss: θ, positive where the candidate is worse, None where it is infinite; margin: on the same scale. se: of θ.
        p_not_worse: of θ >= margin, one-sided. p_better: of θ = 0, two-sided. p_better_holm: over the family.
        reason: why it was not compared, or what else a reader must know.
    """

    name: str
    incumbent: float | None
    candidate: float | None
    loss: float | None = None
    margin: float
    se: float | None = None
    p_not_worse: float | None = None
    p_better: float | None = None
    p_better_holm: float | None = None
    verdict: Verdict
    reason: str | None = None


class _Test(NamedTuple):
    """A loss with its error and the p of both tests."""

    loss: float
    se: float | None
    p_not_worse: float
    p_better: float


def compare_rows(incumbent: Rows, candidate: Rows, margins: Margins, *, alpha: float) -> list[Obligation]:
    """The four numbers of a tier that rows give, each "better" still by its own p; `settle` looks at the family.

    Args:
        incumbent, candidate: rows of `ROW_DTYPE` over the same tokens and the same base.
        alpha: error of each test of "not worse".

    Raises:
        InputError: rows of other tokens or another base, or too few articles for any error.
    """
    a, b = sorted_rows(incumbent), sorted_rows(candidate)
    check_paired("the incumbent", a, "the candidate", b)
    articles = group_by(a["article"])
    few = too_few_to_test(articles)
    if few is not None:
        raise InputError(f"expected text of six articles of equal length at least, got {few}: nothing can be shown on it; evaluate "
                         "more chunks, spread over the text")
    differences = {
        "same_top_p": (1 - flips(a), 1 - flips(b), flips(b) - flips(a), margins.same_top_p),
        "ln_ppl_ratio": (nll_difference(a), nll_difference(b), nll_difference(b) - nll_difference(a), margins.ln_ppl_ratio),
    }
    out = [_compare_kld(kld(a), kld(b), math.log1p(margins.kld_mean), articles, alpha),
           _compare_quantiles(kld(a), kld(b), math.log1p(margins.kld_p999), articles, alpha)]
    for name, (x, y, loss, margin) in differences.items():
        test = _test(float(np.mean(loss)), jackknife_se(articles.means_without(loss)), margin, articles.n_effective - 1)
        out.append(_judge(name, float(np.mean(x)), float(np.mean(y)), margin, test, alpha))
    return out


def compare_shares(name: str, incumbent: float, candidate: float, errors: tuple[float, float] | None, df: float, margin: float, *,
                   alpha: float) -> Obligation:
    """Two shares that were measured apart (more is better), each with its own standard error, or none of them with one."""
    loss = incumbent - candidate
    if errors is None:
        return Obligation(name=name, incumbent=incumbent, candidate=candidate, loss=loss, margin=margin,
                          verdict="worse" if loss > margin else "not worse", reason="without an error: by the numbers themselves")
    return _judge(name, incumbent, candidate, margin, _test(loss, math.hypot(*errors), margin, df), alpha)


def settle(obligations: Sequence[Obligation], *, alpha: float) -> list[Obligation]:
    """The family's last word: "better" stays where Holm's p over all that were tested is below alpha.

    Args:
        obligations: of all tiers that are decided together.
    """
    tested = [i for i, o in enumerate(obligations) if o.p_better is not None]
    adjusted = dict(zip(tested, holm([obligations[i].p_better or 0.0 for i in tested]), strict=True))
    out = []
    for i, obligation in enumerate(obligations):
        p = adjusted.get(i)
        if p is not None:
            verdict = "not worse" if obligation.verdict == "better" and p >= alpha else obligation.verdict
            obligation = replace(obligation, p_better_holm=p, verdict=verdict)
        out.append(obligation)
    return out


def _compare_kld(x: Floats, y: Floats, margin: float, articles: Groups, alpha: float) -> Obligation:
    mean_x, mean_y = float(np.mean(x)), float(np.mean(y))
    without_x, without_y = articles.means_without(x), articles.means_without(y)
    if np.array_equal(x, y):
        test = _Test(0.0, 0.0, 0.0, 1.0)
    elif min(mean_x, mean_y, *without_x, *without_y) > 0:
        se = jackknife_se(np.log(without_y) - np.log(without_x))
        test = _test(math.log(mean_y / mean_x), se, margin, articles.n_effective - 1)
    elif mean_y < mean_x:
        test = _Test(-math.inf, None, 0.0, 0.0)
    else:
        test = _Test(math.inf, None, 1.0, 0.0)
    return _judge("kld_mean", mean_x, mean_y, margin, test, alpha)


def _compare_quantiles(x: Floats, y: Floats, margin: float, articles: Groups, alpha: float) -> Obligation:
    """The 99.9 % quantiles, on their logarithms.

    With S = 0.001 and κ = d ln Q / d S at S, a token moves ln Q_c − ln Q_i by κ_c·1[kld_c > Q_c] − κ_i·1[kld_i > Q_i] (Bahadur);
    the mean of that is jackknifed like any other. κ is the slope between Woodruff's limits, at most half of S away.

    Source: Woodruff 1952, for a paired difference.
    """
    q_x, q_y = float(np.quantile(x, _QUANTILE)), float(np.quantile(y, _QUANTILE))
    if len(x) * (1 - _QUANTILE) < _MIN_TAIL - 1e-6:
        return Obligation(name="kld_p999", incumbent=q_x, candidate=q_y, margin=margin, verdict="not compared",
                          reason=f"fewer than {_MIN_TAIL} tokens beyond the quantile")
    if np.array_equal(x, y):
        return _judge("kld_p999", q_x, q_y, margin, _Test(0.0, 0.0, 0.0, 1.0), alpha)
    moves = [_moves_of_log_quantile(values, q, articles) for values, q in ((x, q_x), (y, q_y))]
    if moves[0] is None or moves[1] is None:
        return Obligation(name="kld_p999", incumbent=q_x, candidate=q_y, margin=margin, reason="zero: by the numbers themselves",
                          verdict="worse" if q_y > q_x else "not worse")
    se = jackknife_se(articles.means_without(moves[1] - moves[0]))
    return _judge("kld_p999", q_x, q_y, margin, _test(math.log(q_y / q_x), se, margin, articles.n_effective - 1), alpha)


def _moves_of_log_quantile(x: Floats, q: float, articles: Groups) -> Floats | None:
    """How far each token moves ln of the 99.9 % quantile q, up to a constant; None where it has no logarithm."""
    share = 1 - _QUANTILE
    above = (x > q).astype(np.float64)
    reach = student_quantile((1 + LEVEL) / 2, articles.n_effective - 1) * jackknife_se(articles.means_without(above))
    h = max(min(reach, share / 2), 2 / len(x))
    lo, hi = np.quantile(x, [_QUANTILE - h, _QUANTILE + h])
    return above * (np.log(hi / lo) / (2 * h)) if lo > 0 else None


def _test(loss: float, se: float, margin: float, df: float) -> _Test:
    return _Test(loss, se, _upper_tail(margin - loss, se, df), min(1.0, 2 * _upper_tail(abs(loss), se, df)))


def _upper_tail(distance: float, se: float, df: float) -> float:
    """P(T > distance / se); without an error, 0 for a distance above 0, else 1."""
    if se == 0:
        return 0.0 if distance > 0 else 1.0
    return student_upper_tail(distance / se, df)


def _judge(name: str, incumbent: float, candidate: float, margin: float, test: _Test, alpha: float) -> Obligation:
    verdict: Verdict
    if test.p_not_worse < alpha:
        verdict = "better" if test.loss < 0 and test.p_better < alpha else "not worse"
    else:
        verdict = "worse" if test.loss > margin else "not shown"
    return Obligation(name=name, incumbent=incumbent, candidate=candidate, margin=margin, se=test.se, verdict=verdict,
                      loss=test.loss if math.isfinite(test.loss) else None, p_not_worse=test.p_not_worse,
                      p_better=test.p_better)
