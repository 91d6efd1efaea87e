"""Errors and limits of means, shares and quantiles over grouped observations. Plain array maths, float64.

Definitions. x_t are N observations (tokens). Each belongs to one of G groups; n_g is the size of a group.

    se_iid        as if the observations were independent
    se_clustered  CR1: groups are independent, what is inside a group is not
    jackknife     the spread of the statistic when each group in turn is left out; works for smooth functions of means
    n_effective   G_eff = N² / Σ n_g²: as many equal groups as these unequal ones are worth

Undefined is None, never 0. What this leaves out: which observations, which groups (chunks, articles) and on which scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which group each observation belongs to: `index` (N,) counts groups from 0 in order of their labels; `sizes` (G,)."""

    index: npt.NDArray[np.intp]
    sizes: npt.NDArray[np.int64]

    @property
    def n_group(self) -> int:
        """G, the number of groups that hold an observation."""
        return len(self.sizes)

    @property
    def n_effective(self) -> float:
        """G_eff = N² / Σ n_g², from 1 to G; 0 without observations."""
        n = int(self.sizes.sum())
        return n * n / float(np.square(self.sizes).sum()) if n else 0.0

    @property
    def n_effective_whole(self) -> float:
        """(Σ n_g²)² / Σ n_g⁴: the effective number where whole groups move together, so that a sum's variance goes with n_g².

        At most `n_effective`, which holds where observations move by themselves; 0 without observations.
        """
        squares = np.square(self.sizes.astype(np.float64))
        return float(squares.sum() ** 2 / np.square(squares).sum()) if len(squares) else 0.0

    def sums(self, x: Floats) -> Floats:
        """Σ of the observations of each group, (G,)."""
        return np.bincount(self.index, weights=x, minlength=self.n_group).astype(np.float64, copy=False)

    def means_without(self, x: Floats) -> Floats:
        """The mean of all observations outside each group, (G,). Needs two groups."""
        sums = self.sums(x)
        return np.asarray((sums.sum() - sums) / (self.sizes.sum() - self.sizes))


def group_by(labels: npt.NDArray[np.integer]) -> Groups:
    """Groups from one label an observation."""
    _, index, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return Groups(index=index.reshape(-1), sizes=sizes.astype(np.int64))


def se_iid(x: Floats) -> float | None:
    """Standard error of a mean of independent observations: √((E[x²] − E[x]²) / (N − 1)). None below two.

    Equals what llama-perplexity prints behind ±.
    Source: llama.cpp tools/perplexity/perplexity.cpp, mean_and_uncertainty.
    """
    return float(np.sqrt(np.var(x) / (len(x) - 1))) if len(x) > 1 else None


def se_clustered(x: Floats, groups: Groups) -> float | None:
    """Standard error of a mean whose groups are independent: √(G/(G−1) · Σ_g(Σ_{t∈g} r_t)²) / N, r_t = x_t − mean (CR1).

    None below two groups. Source: Cameron and Miller 2015, section II; shared by most regression packages.
    """
    if groups.n_group < 2:
        return None
    residuals = groups.sums(x - np.mean(x))
    scale = groups.n_group / (groups.n_group - 1)
    return float(np.sqrt(scale * np.square(residuals).sum()) / len(x))


def jackknife_se(theta_without: Floats) -> float:
    """Standard error of a statistic from its values without each group: √((G−1)/G · Σ_g(θ_g − θ̄)²). Needs two groups.

    Source: Efron and Tibshirani 1993, eq. 11.5, with groups in place of observations.
    """
    n = len(theta_without)
    return float(np.sqrt((n - 1) / n * np.square(theta_without - np.mean(theta_without)).sum()))


def student_quantile(p: float, df: float) -> float:
    """The p-quantile of Student's t with df degrees of freedom, not necessarily whole; df > 0."""
    from scipy.special import stdtrit  # not scipy.stats: that takes half a second to import

    return float(stdtrit(df, p))


def student_upper_tail(t: float, df: float) -> float:
    """P(T > t) for Student's t with df degrees of freedom; df > 0."""
    from scipy.special import stdtr

    return float(stdtr(df, -t))


class Limits(NamedTuple):
    """Two ends of an interval; both are None when there is none, and `reason` says why."""

    lo: float | None
    hi: float | None
    reason: str | None


_MIN_TAIL = 16  # observations beyond a quantile, below which its limits do not hold their level


def quantile_limits(x: Floats, q: float, groups: Groups, t: float) -> Limits:
    """Woodruff's limits of a quantile, by group.

    With s the jackknife error, by group, of the share of observations above the q-quantile, the limits are the quantiles whose
    upper shares are (1−q) ± t·s. None where fewer than 16 observations lie beyond the quantile (N·min(q, 1−q) < 16), and where
    a limit would lie beyond all observations (a share below 1/N).

    Args:
        x: (N,) observations.
        q: between 0 and 1, both excluded.
        groups: of the observations, two at least.
        t: the factor of s, such as the 0.975-quantile of Student's t.

    Source: Woodruff 1952; the jackknife takes the place of his binomial error.
    """
    n = len(x)
    if n * min(q, 1 - q) < _MIN_TAIL - 1e-6:  # 16000 · 0.001 is a little below 16 in floating point
        return Limits(None, None, f"fewer than {_MIN_TAIL} tokens beyond the quantile")
    above = (x > np.quantile(x, q)).astype(np.float64)
    reach = t * jackknife_se(groups.means_without(above))
    if min(q - reach, 1 - q - reach) < 1 / n:
        return Limits(None, None, "too uncertain: a limit would lie beyond all tokens")
    lo, hi = np.quantile(x, [q - reach, q + reach])
    return Limits(float(lo), float(hi), None)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p of each test of a family: reject where it is below α, and the family's error stays below α.

    p_(i) adjusted = max over j <= i of min(1, (m − j + 1)·p_(j)), in order of size. Source: Holm 1979.
    """
    m = len(p_values)
    adjusted = [0.0] * m
    largest = 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
