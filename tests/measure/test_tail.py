"""Upper quantiles of per-token KLD."""

from __future__ import annotations

import numpy as np

from quantkit.measure.tail import tail_shares, upper_quantiles


def test_shares_end_where_few_tokens_are_left() -> None:
    shares = tail_shares(1600, 5)
    assert shares[0] == 1.0
    assert abs(shares[-1] - 0.01) < 1e-15
    assert (np.diff(shares) < 0).all()
    assert (tail_shares(10, 5) == 1.0).all()


def test_quantiles_count_from_above() -> None:
    values = np.arange(101, dtype=np.float64)[::-1]
    assert upper_quantiles(values, np.array([1.0, 0.5, 0.01])).tolist() == [0.0, 50.0, 99.0]
