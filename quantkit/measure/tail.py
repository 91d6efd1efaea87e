"""The tail of per-token KLD: how large it is for the worst share of the tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: A share that fewer tokens than these carry has no quantile: it would be the story of a few words.
MIN_TOKENS = 16


def tail_shares(n_scored: int, n: int = 160) -> npt.NDArray[np.float64]:
    """Shares of the tokens from all down to `MIN_TOKENS` of them, evenly spaced on a logarithmic scale; shape (n,), falling."""
    return np.geomspace(1.0, min(1.0, MIN_TOKENS / n_scored), n)


def upper_quantiles(values: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The value that a share of the tokens exceeds: the quantile at 1 − share, numpy's linear interpolation.

    Args:
        values: (n_tok,) float64, such as kld in nats.
        shares: (n,) in [0, 1].

    Returns:
        (n,) float64 in the unit of the values, rising as the shares fall.
    """
    return np.quantile(values, 1.0 - shares)
