"""Summaries: every published number of a tier, from its rows, each with its errors and its interval.

The sampling unit is the article: tokens of one article resemble each other, so errors that count tokens, or chunks, as
independent are several times too small. Every mean carries three errors (see `Estimate`); the published one leaves out one
article at a time:

    θ_g = the statistic without article g      se(θ)² = (G−1)/G · Σ_g (θ_g − θ̄)²      θ ± t(0.975, ν) · se(θ)

θ is the logarithm for kld, mean p_diff² and the share of flips (1 − same_top_p), whose sampling distributions are skewed, and
the mean itself otherwise; the ends are transformed back. ν says how well se is known (`core.stats.degrees_of_freedom`): it is small
where articles are unequal, and where a few of them make the error. Articles worth fewer than ten equal ones have no interval and
no se; ten is counted as G_w = (Σ n_g²)² / Σ n_g⁴, since the tokens of an article move together.
The interval is about text like this one, not about this file's own value, which is exact. docs/STATISTICS.md has what these
intervals cover in simulation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quantkit.core.errors import InputError
from quantkit.core.stats import (
    Floats,
    Groups,
    degrees_of_freedom,
    group_by,
    jackknife_se,
    quantile_limits,
    se_clustered,
    se_iid,
    student_quantile,
)
from quantkit.measure.numbers import STATISTICS, Rows, kld, nll_correlation, p_diff
from quantkit.measure.numbers import Statistic as Statistic
from quantkit.spec.records import KLD_QUANTILES, P_DIFF_QUANTILES, ROW_DTYPE, Estimate, Quantile, TierSummary

MIN_ARTICLES = 10  # G_w; intervals from fewer, the first 200 chunks of WikiText-2, did not cover 93 % in simulation
LEVEL = 0.95
_MIN_TESTED = 6  # G_eff
_NO_TAIL = "no interval beyond 5 and 95 %: one article can make such a tail"
_LEAST_TAIL = 0.05  # share of tokens beyond a quantile that has an interval


def summarize(rows: Rows) -> TierSummary:
    """Every number that the retention table and the card need.

    Args:
        rows: of `ROW_DTYPE`, in any order; sorted by chunk and position first, so that parts in another order give equal bits.

    Raises:
        InputError: no rows, other columns, a position twice, or a number that is not finite (names chunk and position).
    """
    rows = sorted_rows(rows)
    chunks, articles = group_by(rows["chunk"]), group_by(rows["article"])
    estimates = {name: estimate(rows, statistic, chunks, articles) for name, statistic in STATISTICS.items()}
    return TierSummary(
        n_chunk=chunks.n_group,
        n_scored=len(rows),
        n_article=articles.n_group,
        g_eff=articles.n_effective,
        nll_correlation=correlation(rows),
        kld_quantiles=quantiles(kld(rows), KLD_QUANTILES, articles),
        p_diff_quantiles=quantiles(p_diff(rows), P_DIFF_QUANTILES, articles),
        **estimates,
    )


def sorted_rows(rows: Rows) -> Rows:
    """The rows in order of chunk and position, checked.

    Raises:
        InputError: see `summarize`.
    """
    if rows.dtype != ROW_DTYPE:
        raise InputError(f"expected rows with the columns {', '.join(ROW_DTYPE.names or ())}, got {rows.dtype}: measure them "
                         "again")
    if not len(rows):
        raise InputError("expected scored rows, got none: the audit of this tier has not run or its part files are empty; run "
                         "it again")
    rows = rows[np.lexsort((rows["pos"], rows["chunk"]))]
    twice = (rows["chunk"][1:] == rows["chunk"][:-1]) & (rows["pos"][1:] == rows["pos"][:-1])
    if twice.any():
        row = rows[int(np.argmax(twice))]
        raise InputError(f"expected each position once, got chunk {row['chunk']} position {row['pos']} twice: "
                         "the same part was merged twice; audit this tier again")
    finite = np.isfinite(rows["nll_base"]) & np.isfinite(rows["nll_q"]) & np.isfinite(rows["kld"])
    if not finite.all():
        row = rows[int(np.argmin(finite))]
        raise InputError(f"expected finite numbers, got nll_base {row['nll_base']}, nll_q {row['nll_q']}, kld {row['kld']} "
                         f"at chunk {row['chunk']} position {row['pos']}: the model's output is broken there; make the file again")
    return rows


def base_rows(rows: Rows) -> Rows:
    """The rows that the base would have against itself, from the rows of any tier: kld 0, equal nll, equal top tokens."""
    own = rows.copy()
    own["nll_q"], own["kld"], own["top1_q"] = rows["nll_base"], 0.0, rows["top1_base"]
    return own


def estimate(rows: Rows, statistic: Statistic, chunks: Groups, articles: Groups) -> Estimate:
    """One number with its three errors and its 95 % interval."""
    return estimate_mean(statistic.observe(rows), statistic, chunks, articles)


def estimate_mean(x: Floats, statistic: Statistic, chunks: Groups, articles: Groups, level: float = LEVEL) -> Estimate:
    """One number from its observations; see the module for the formulas.

    Args:
        x: (n,) one observation a token; the means of equally long chunks give the same published error as their tokens.
        chunks, articles: of the observations. Unequal groups are weighed by their observations: the mean is a ratio, and so is
            the mean without one article, so a part of a text (a slice) has its right error too.
        level: of the interval.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _without_overflow(_estimate_mean(x, statistic, chunks, articles, level), float(np.mean(x)))


def _without_overflow(found: Estimate, mean: float) -> Estimate:
    """A model that is broken without ever giving a number that is not finite can have a perplexity that no float64 holds."""
    over = [name for name in ("value", "se_iid", "se_chunk", "se", "lo", "hi")
            if (number := getattr(found, name)) is not None and not np.isfinite(number)]
    if not over:
        return found
    reason = f"too large for a number: the mean that it comes from is {mean:.6g}"
    return replace(found, **dict.fromkeys(over), reason=reason if found.reason is None else f"{found.reason}; {reason}")


def _estimate_mean(x: Floats, statistic: Statistic, chunks: Groups, articles: Groups, level: float) -> Estimate:
    mean = float(np.mean(x))
    value = float(statistic.value(mean))
    if statistic.log and not x.any():
        return _estimate_of_zeros(statistic, value, articles, len(x))
    slope = float(statistic.slope(mean))
    iid, clustered = se_iid(x), se_clustered(x, chunks)
    known = Estimate(
        value=value,
        se_iid=None if iid is None else slope * iid,
        se_chunk=None if clustered is None else slope * clustered,
    )
    few = too_few(articles)
    if few is not None:
        return replace(known, reason=few)
    theta_without = articles.means_without(x)
    if statistic.log:
        if mean <= 0 or theta_without.min() <= 0:
            return replace(known, reason="one article carries it all")
        theta, theta_without, slope = float(np.log(mean)), np.log(theta_without), slope * mean
    else:
        theta = mean
    se = jackknife_se(theta_without)
    if statistic.no_interval is not None:
        return replace(known, se=slope * se, reason=statistic.no_interval)
    reach = student_quantile((1 + level) / 2, degrees_of_freedom(articles, theta_without)) * se
    ends = [float(statistic.value(float(np.exp(end)) if statistic.log else end)) for end in (theta - reach, theta + reach)]
    return replace(known, se=slope * se, lo=min(ends), hi=max(ends))


def too_few(articles: Groups) -> str | None:
    """Why there is no interval: "5 articles", or "16 articles, worth 5.2 of equal length"; None from ten equal ones (G_w) on."""
    n_worth = articles.n_effective_whole
    return None if n_worth >= MIN_ARTICLES - 1e-9 else _count(articles.n_group, n_worth, MIN_ARTICLES)


def too_few_to_test(articles: Groups) -> str | None:
    """Why two plans cannot be told apart at all; None from six effective articles (G_eff) on.

    Less than an interval asks for: a plan search deals the articles of one text to three purposes, and its tests err on the side
    of "not shown".
    """
    return None if articles.n_effective >= _MIN_TESTED else _count(articles.n_group, articles.n_effective, _MIN_TESTED)


def _count(n_group: int, n_worth: float, least: int) -> str:
    count = f"{n_group} article{'s' if n_group != 1 else ''}"
    return count if n_group < least else f"{count}, worth {n_worth:.1f} of equal length"


def _estimate_of_zeros(statistic: Statistic, value: float, articles: Groups, n: int) -> Estimate:
    """θ = ln 0 has no jackknife: equal logits have an error of exactly 0, unseen flips the upper limit 3/N."""
    few = too_few(articles)
    if few is not None:
        return Estimate(value=value, se_iid=0.0, se_chunk=0.0, reason=few)
    if statistic is STATISTICS["same_top_p"]:
        return Estimate(value=value, se_iid=0.0, se_chunk=0.0, lo=1 - 3 / n, hi=1.0, reason="no flips: lower limit 1 − 3/N")
    return Estimate(value=value, se_iid=0.0, se_chunk=0.0, se=0.0, lo=0.0, hi=0.0, reason="exactly zero in every row")


def correlation(rows: Rows) -> Estimate:
    """The correlation of nll_q with nll_base, without an error."""
    value = nll_correlation(rows)
    return Estimate(value=value, reason="one of the two does not vary" if value is None
                    else "no interval is computed for a correlation")


def quantiles(x: Floats, levels: tuple[float, ...], articles: Groups) -> tuple[Quantile, ...]:
    """Quantiles with Woodruff's limits by article; the extremes have none, and neither have those beyond 5 and 95 %.

    One article in sixty can hold half of the tokens beyond 99.9 %, and an eighth of those beyond 99 %. Whether it is in the text
    decides the quantile: limits covered 61 to 95 % and 88 to 96 % in simulation.
    """
    few = too_few(articles)
    found = []
    for q, value in zip(levels, np.quantile(x, levels), strict=True):
        if q in (0.0, 1.0):
            found.append(Quantile(q=q, value=float(value), reason="an extreme has no interval"))
        elif few is not None:
            found.append(Quantile(q=q, value=float(value), reason=few))
        elif min(q, 1 - q) < _LEAST_TAIL - 1e-9:
            found.append(Quantile(q=q, value=float(value), reason=_NO_TAIL))
        else:
            lo, hi, reason = quantile_limits(x, q, articles, LEVEL)
            found.append(Quantile(q=q, value=float(value), lo=lo, hi=hi, reason=reason))
    return tuple(found)
