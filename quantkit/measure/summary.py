"""Summaries: every published number of a tier, from its rows. One table of statistics, one function of errors.

The sampling unit is the article: tokens of one article resemble each other, so errors that count tokens, or chunks, as
independent are several times too small. Every mean carries three errors (see `Estimate`); the published one leaves out one
article at a time:

    θ_g = the statistic without article g      se(θ)² = (G−1)/G · Σ_g (θ_g − θ̄)²      θ ± t(0.975, G_eff − 1) · se(θ)

θ is the logarithm for kld, mean p_diff² and the share of flips (1 − same_top_p), whose sampling distributions are skewed, and
the mean itself otherwise; the ends are transformed back. Below six effective articles there is no interval and no se.
The interval is about text like this one, not about this file's own value, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.stats import Floats, Groups, group_by, jackknife_se, quantile_limits, se_clustered, se_iid, student_quantile
from quantkit.spec.records import KLD_QUANTILES, P_DIFF_QUANTILES, ROW_DTYPE, Estimate, Quantile, TierSummary

Rows = npt.NDArray[Any]  # of ROW_DTYPE

MIN_ARTICLES = 6  # effective; intervals from fewer did not cover 95 % in simulation
LEVEL = 0.95


class Statistic(NamedTuple):
    """How a published number comes from the mean of one observation a token.

    `value` maps the mean to the number, `slope` is |d number / d mean|; `log` puts the error on θ = ln mean.
    """

    observe: Callable[[Rows], Floats]
    value: Callable[[float], float]
    slope: Callable[[float], float]
    log: bool


def nll_difference(rows: Rows) -> Floats:
    """nll_q − nll_base of each row, nats."""
    return np.asarray(rows["nll_q"] - rows["nll_base"])


def p_diff(rows: Rows) -> Floats:
    """p_q(token) − p_base(token) of each row, a fraction from −1 to 1."""
    return np.asarray(np.exp(-rows["nll_q"]) - np.exp(-rows["nll_base"]))


def flips(rows: Rows) -> Floats:
    """1 where the tier's most likely token is another one than the base's, else 0."""
    return np.asarray(rows["top1_q"] != rows["top1_base"], dtype=np.float64)


STATISTICS: dict[str, Statistic] = {
    "ppl_base": Statistic(lambda rows: np.asarray(rows["nll_base"]), np.exp, np.exp, log=False),
    "ppl_q": Statistic(lambda rows: np.asarray(rows["nll_q"]), np.exp, np.exp, log=False),
    "ln_ppl_ratio": Statistic(nll_difference, lambda m: m, lambda m: 1.0, log=False),
    "ppl_drift": Statistic(nll_difference, np.expm1, np.exp, log=False),
    "kld": Statistic(lambda rows: np.asarray(rows["kld"]), lambda m: m, lambda m: 1.0, log=True),
    "p_diff": Statistic(p_diff, lambda m: m, lambda m: 1.0, log=False),
    "p_diff_rms": Statistic(lambda rows: np.square(p_diff(rows)), np.sqrt, lambda m: 0.5 / np.sqrt(m), log=True),
    "same_top_p": Statistic(flips, lambda m: 1.0 - min(m, 1.0), lambda m: 1.0, log=True),
}


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
        kld_quantiles=quantiles(rows["kld"], KLD_QUANTILES, articles),
        p_diff_quantiles=quantiles(p_diff(rows), P_DIFF_QUANTILES, articles),
        **estimates,
    )


def sorted_rows(rows: Rows) -> Rows:
    """The rows in order of chunk and position, checked.

    Raises:
        InputError: see `summarize`.
    """
    if rows.dtype != ROW_DTYPE:
        raise InputError(f"expected rows with the columns {', '.join(ROW_DTYPE.names or ())}, got {rows.dtype}")
    if not len(rows):
        raise InputError("expected scored rows, got none: the audit of this tier has not run or its part files are empty")
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
                         f"at chunk {row['chunk']} position {row['pos']}: the model's output is broken there")
    return rows


def base_rows(rows: Rows) -> Rows:
    """The rows that the base would have against itself, from the rows of any tier: kld 0, equal nll, equal top tokens."""
    own = rows.copy()
    own["nll_q"], own["kld"], own["top1_q"] = rows["nll_base"], 0.0, rows["top1_base"]
    return own


def estimate(rows: Rows, statistic: Statistic, chunks: Groups, articles: Groups) -> Estimate:
    """One number with its three errors and its 95 % interval."""
    x = statistic.observe(rows)
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
    reach = student_quantile((1 + LEVEL) / 2, articles.n_effective - 1) * se
    ends = [float(statistic.value(float(np.exp(end)) if statistic.log else end)) for end in (theta - reach, theta + reach)]
    return replace(known, se=slope * se, lo=min(ends), hi=max(ends))


def too_few(articles: Groups) -> str | None:
    """Why there is no interval: "5 articles", or "7 articles, worth 5.2 of equal length"; None from six effective ones on."""
    if articles.n_effective >= MIN_ARTICLES:
        return None
    count = f"{articles.n_group} article{'s' if articles.n_group != 1 else ''}"
    return count if articles.n_group < MIN_ARTICLES else f"{count}, worth {articles.n_effective:.1f} of equal length"


def _estimate_of_zeros(statistic: Statistic, value: float, articles: Groups, n: int) -> Estimate:
    """θ = ln 0 has no jackknife: equal logits have an error of exactly 0, unseen flips the upper limit 3/N."""
    few = too_few(articles)
    if few is not None:
        return Estimate(value=value, se_iid=0.0, se_chunk=0.0, reason=few)
    if statistic is STATISTICS["same_top_p"]:
        return Estimate(value=value, se_iid=0.0, se_chunk=0.0, lo=1 - 3 / n, hi=1.0, reason="no flips: lower limit 1 − 3/N")
    return Estimate(value=value, se_iid=0.0, se_chunk=0.0, se=0.0, lo=0.0, hi=0.0, reason="exactly zero in every row")


def correlation(rows: Rows) -> Estimate:
    """Pearson's correlation of nll_q with nll_base over tokens; equals llama-perplexity's Cor(ln(PPL(Q)), ln(PPL(base)))."""
    base, q = rows["nll_base"], rows["nll_q"]
    spread = float(np.std(base) * np.std(q))
    if spread == 0:
        return Estimate(value=None, reason="one of the two does not vary")
    covariance = float(np.mean((base - np.mean(base)) * (q - np.mean(q))))
    return Estimate(value=min(1.0, covariance / spread), reason="no interval is computed for a correlation")


def quantiles(x: Floats, levels: tuple[float, ...], articles: Groups) -> tuple[Quantile, ...]:
    """Quantiles with Woodruff's limits by article; the extremes have none."""
    few = too_few(articles)
    t = None if few is not None else student_quantile((1 + LEVEL) / 2, articles.n_effective - 1)
    found = []
    for q, value in zip(levels, np.quantile(x, levels), strict=True):
        if q in (0.0, 1.0):
            found.append(Quantile(q=q, value=float(value), reason="an extreme has no interval"))
        elif t is None:
            found.append(Quantile(q=q, value=float(value), reason=few))
        else:
            lo, hi, reason = quantile_limits(x, q, articles, t)
            found.append(Quantile(q=q, value=float(value), lo=lo, hi=hi, reason=reason))
    return tuple(found)
