"""The numbers of a tier, one function each: from rows to one observation a token, whose mean gives the published number.

All are paired: a row holds what base and tier say of the same token. `llama.cpp` below means kl_divergence() in
tools/perplexity/perplexity.cpp, which prints the same numbers from its 16-bit base file. That file clips at 16 nats, so its
ln ratio is off by what base against its own clipped self would show; its kld, Δp and same top p agree with these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.stats import Floats

Rows = npt.NDArray[Any]  # of ROW_DTYPE


class Statistic(NamedTuple):
    """How a published number comes from the mean of one observation a token.

    `value` maps the mean to the number, `slope` is |d number / d mean|; `log` puts the error on θ = ln mean. `no_interval` says
    why there is none, where simulated ones did not hold their level.
    """

    observe: Callable[[Rows], Floats]
    value: Callable[[float], float]
    slope: Callable[[float], float]
    log: bool
    no_interval: str | None = None


def nll_base(rows: Rows) -> Floats:
    """−ln p_base(token), nats, at least 0.

    exp of the mean over all scored tokens is `ppl_base`: the total nll over the number of tokens, never a mean of perplexities.
    Better is lower. Equals llama.cpp's "Mean PPL(base)" up to its clip, and llama-perplexity's "Final estimate" exactly.
    """
    return np.asarray(rows["nll_base"])


def nll_q(rows: Rows) -> Floats:
    """−ln p_q(token), nats, at least 0; exp of its mean is `ppl_q`. Equals llama.cpp's "Mean PPL(Q)"."""
    return np.asarray(rows["nll_q"])


def nll_difference(rows: Rows) -> Floats:
    """nll_q − nll_base, nats, of either sign; 0 is the base's own, better is lower.

    Its mean is `ln_ppl_ratio` = ln(ppl_q / ppl_base); exp(mean) − 1 is `ppl_drift`, a fraction. A tier may come out better than
    base: the sign stays. Equals llama.cpp's "Mean ln(PPL(Q)/PPL(base))" up to its clip.
    """
    return np.asarray(rows["nll_q"] - rows["nll_base"])


def kld(rows: Rows) -> Floats:
    """Σ_v p_base(v)·(ln p_base(v) − ln p_q(v)), nats, at least 0 but for rounding; see `scoring`. Better is lower.

    Its mean and its quantiles equal llama.cpp's "Mean KLD", "Median KLD", "99.9% KLD" and so on.
    Source: Kullback and Leibler 1951, eq. 2.4.
    """
    return np.asarray(rows["kld"])


def p_diff(rows: Rows) -> Floats:
    """p_q(token) − p_base(token), a fraction from −1 to 1. Below 0 the tier gives the right token less than base does.

    Its mean and its quantiles equal llama.cpp's "Mean Δp", "Median Δp" and so on, which are in percent there.
    """
    return np.asarray(np.exp(-rows["nll_q"]) - np.exp(-rows["nll_base"]))


def p_diff_squared(rows: Rows) -> Floats:
    """Square of `p_diff`, 0 to 1; the root of its mean is `p_diff_rms`. Better is lower. Equals llama.cpp's "RMS Δp"."""
    return np.square(p_diff(rows))


def flips(rows: Rows) -> Floats:
    """1 where the tier's most likely token is another one than base's, else 0; of equal tokens the first counts.

    1 − mean is `same_top_p`, a fraction, better is higher. Equals llama.cpp's "Same top p", which is in percent there.
    """
    return np.asarray(rows["top1_q"] != rows["top1_base"], dtype=np.float64)


def nll_correlation(rows: Rows) -> float | None:
    """Pearson's correlation of nll_q with nll_base over tokens, −1 to 1; None where one of the two does not vary.

    Equals llama.cpp's "Cor(ln(PPL(Q)), ln(PPL(base)))", which is in percent there.
    """
    base, q = rows["nll_base"], rows["nll_q"]
    spread = float(np.std(base) * np.std(q))
    if spread == 0:
        return None
    covariance = float(np.mean((base - np.mean(base)) * (q - np.mean(q))))
    return min(1.0, covariance / spread)


def _identity(mean: float) -> float:
    return mean


def _one(mean: float) -> float:
    return 1.0


_PPL = "no interval: perplexity says as much of the articles as of the model; its ratio to base's has one"

#: Every mean that a summary publishes.
STATISTICS: dict[str, Statistic] = {
    "ppl_base": Statistic(nll_base, np.exp, np.exp, log=False, no_interval=_PPL),
    "ppl_q": Statistic(nll_q, np.exp, np.exp, log=False, no_interval=_PPL),
    "ln_ppl_ratio": Statistic(nll_difference, _identity, _one, log=False),
    "ppl_drift": Statistic(nll_difference, np.expm1, np.exp, log=False),
    "kld": Statistic(kld, _identity, _one, log=True),
    "p_diff": Statistic(p_diff, _identity, _one, log=False),
    "p_diff_rms": Statistic(p_diff_squared, np.sqrt, lambda mean: 0.5 / np.sqrt(mean), log=True),
    "same_top_p": Statistic(flips, lambda mean: 1.0 - min(mean, 1.0), _one, log=True),
}
