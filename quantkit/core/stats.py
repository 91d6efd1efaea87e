"""Errors and limits of means, shares and quantiles over grouped observations. Plain array maths, float64.

Definitions. x_t are N observations (tokens). Each belongs to one of G groups; n_g is the size of a group.

    se_iid        as if the observations were independent
    se_clustered  CR1: groups are independent, what is inside a group is not
    jackknife     the spread of the statistic when each group in turn is left out; works for smooth functions of means
    n_effective   G_eff = N² / Σ n_g²: as many equal groups as these unequal ones are worth
    n_effective_whole   G_w, the same where whole groups move together
    degrees_of_freedom  how well a jackknife error is known, from the groups' sizes and what each does to the statistic

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


#: Of the degrees of freedom that Satterthwaite's formula gives. A third of all texts lack the one article that matters most, and
#: what is left looks tamer than it is; 3/4 is what simulated intervals needed to cover 93 to 97 % (docs/STATISTICS.md).
_TAMER = 0.75


def degrees_of_freedom(groups: Groups, theta_without: Floats) -> float:
    """Degrees of freedom of Student's t behind a jackknife error: 3/4 · (min(G_w, ν) − 1), at least 1.

    With d_g = θ_g − θ̄, se² goes with Σ d_g². ν = 2 / (Σ d_g⁴ / (Σ d_g²)² − 1/G) is twice the square of its mean over its variance,
    both estimated from the groups: small where few groups make the error. G_w is what the sizes alone say: groups of n_g
    observations that move together have d_g² ∝ n_g².

    Args:
        groups: of the observations, two at least.
        theta_without: (G,) the statistic without each group.

    Source: Satterthwaite 1946; Imbens and Kolesár 2016 for groups of unequal size; the factor is ours.
    """
    largest = float(np.abs(theta_without - np.mean(theta_without)).max())
    n = groups.n_effective_whole
    if largest > 0:
        squares = np.square((theta_without - np.mean(theta_without)) / largest)
        excess = float(np.square(squares).sum() / squares.sum() ** 2) - 1 / len(squares)
        n = min(n, 2 / excess) if excess > 0 else n
    return max(1.0, _TAMER * (n - 1))


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


def quantile_limits(x: Floats, q: float, groups: Groups, level: float) -> Limits:
    """Woodruff's limits of a quantile, by group.

    With s the jackknife error, by group, of the share of observations above the q-quantile, the limits are the quantiles whose
    upper shares are (1−q) ± t·s, t from `degrees_of_freedom`. None where fewer than 16 observations lie beyond the quantile
    (N·min(q, 1−q) < 16), and where a limit would lie beyond all observations (a share below 1/N).

    Args:
        x: (N,) observations.
        q: between 0 and 1, both excluded.
        groups: of the observations, two at least.
        level: of the interval, such as 0.95.

    Source: Woodruff 1952; the jackknife takes the place of his binomial error.
    """
    n = len(x)
    if n * min(q, 1 - q) < _MIN_TAIL - 1e-6:  # 16000 · 0.001 is a little below 16 in floating point
        return Limits(None, None, f"fewer than {_MIN_TAIL} tokens beyond the quantile")
    above = (x > np.quantile(x, q)).astype(np.float64)
    without = groups.means_without(above)
    reach = student_quantile((1 + level) / 2, degrees_of_freedom(groups, without)) * jackknife_se(without)
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
