"""Result records: the row that every audited token leaves, and the summary of a tier. Tables, plots and cards read these.

Units: nats for nll, kld, entropy, margin and logarithms; fractions (not percent) for p_diff, same_top_p and shares.
A number that is not defined is None and has a reason beside it, never 0 and never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quantkit.spec.json_records import record_from_json

#: One scored position. `pos` is the position whose logits are scored, `token` the one that follows it.
ROW_DTYPE = np.dtype([
    ("chunk", "<i4"),  # number of the chunk in the whole text
    ("article", "<i4"),  # the article that the chunk counts to
    ("pos", "<i4"),  # position in the chunk
    ("token", "<i4"),  # id of the token that was to be predicted
    ("nll_base", "<f8"),
    ("nll_q", "<f8"),
    ("kld", "<f8"),
    ("entropy_base", "<f8"),
    ("top1_base", "<i4"),
    ("top1_q", "<i4"),
    ("margin_base", "<f8"),  # ln p1 − ln p2 of the base
])

#: Quantiles of kld and of p_diff that a summary holds; 0 is the minimum, 1 the maximum.
KLD_QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
P_DIFF_QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its errors; every error is on the scale of the value.

    Attributes:
        value: the number over all scored tokens; None if it is not defined.
        se_iid: standard error as if tokens were independent; what llama-perplexity prints behind ±. Far too small.
        se_chunk: CR1 over chunks; a diagnostic, still too small over a whole text.
        se: the published standard error, a jackknife over articles. Where that is computed on a logarithmic scale (θ = ln of
            kld, of mean p_diff² or of 1 − same_top_p), this is |d value / d θ| · se(θ).
        lo, hi: the ends of the 95 % interval, transformed back from θ: not symmetric about the value on a logarithmic scale.
        reason: why something of this is None, or what is special about it.
    """

    value: float | None
    se_iid: float | None = None
    se_chunk: float | None = None
    se: float | None = None
    lo: float | None = None
    hi: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A quantile (numpy's linear interpolation) with the ends of its 95 % interval (Woodruff, by article)."""

    q: float
    value: float
    lo: float | None = None
    hi: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSummary:
    """What a tier keeps of the base over one text.

    Attributes:
        n_chunk, n_scored, n_article: chunks, scored tokens, and articles that they come from.
        g_eff: as many articles of equal length as these are worth, N² / Σ n_g².
        ppl_base, ppl_q: perplexity, exp(mean nll). Better is lower.
        ln_ppl_ratio: mean(nll_q − nll_base), nats; errors are paired. 0 keeps everything, better is lower.
        ppl_drift: ppl_q / ppl_base − 1, a fraction, from the same paired differences.
        nll_correlation: Pearson's, of nll_q with nll_base over tokens.
        kld: mean Kullback-Leibler divergence of the tier from the base, nats. Better is lower.
        kld_quantiles: at `KLD_QUANTILES`.
        p_diff: mean of p_q(token) − p_base(token), a fraction. p_diff_rms: root of its mean square. Better is near 0.
        p_diff_quantiles: at `P_DIFF_QUANTILES`.
        same_top_p: share of tokens where both find the same token the most likely. Better is higher.
    """

    n_chunk: int
    n_scored: int
    n_article: int
    g_eff: float
    ppl_base: Estimate
    ppl_q: Estimate
    ln_ppl_ratio: Estimate
    ppl_drift: Estimate
    nll_correlation: Estimate
    kld: Estimate
    kld_quantiles: tuple[Quantile, ...]
    p_diff: Estimate
    p_diff_rms: Estimate
    p_diff_quantiles: tuple[Quantile, ...]
    same_top_p: Estimate

    def kld_quantile(self, q: float) -> Quantile:
        """The quantile of kld at one of `KLD_QUANTILES`.

        Raises:
            KeyError: another one.
        """
        return _find_quantile(self.kld_quantiles, q)

    def p_diff_quantile(self, q: float) -> Quantile:
        """The quantile of p_diff at one of `P_DIFF_QUANTILES`.

        Raises:
            KeyError: another one.
        """
        return _find_quantile(self.p_diff_quantiles, q)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers, strings and None; keys in the order of the fields."""
        return {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TierSummary:
        """The record that `to_json` wrote.

        Raises:
            KeyError, TypeError: a key is missing, unknown or of another type.
        """
        summary = record_from_json(cls, data)
        for quantiles, expected in ((summary.kld_quantiles, KLD_QUANTILES), (summary.p_diff_quantiles, P_DIFF_QUANTILES)):
            if tuple(quantile.q for quantile in quantiles) != tuple(expected):
                raise KeyError(f"expected the quantiles {expected}, got {tuple(quantile.q for quantile in quantiles)}")
        return summary


def _find_quantile(quantiles: tuple[Quantile, ...], q: float) -> Quantile:
    for quantile in quantiles:
        if quantile.q == q:
            return quantile
    raise KeyError(f"no quantile at {q}: there are {', '.join(str(x.q) for x in quantiles)}")


def _to_json(value: Any) -> Any:
    if isinstance(value, Estimate | Quantile):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value
