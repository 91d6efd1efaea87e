"""Rows with known structure: articles that differ, chunks inside them, heavy-tailed tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.measure.numbers import Rows
from quantkit.spec.records import ROW_DTYPE


def make_rows(*, n_article: int = 10, n_chunk: int = 4, n_pos: int = 20, seed: int = 0, level: float = 0.05,
              flip_share: float = 0.1) -> Rows:
    """Rows of n_article articles with n_chunk chunks of n_pos tokens each; kld grows with `level`."""
    rng = np.random.default_rng(seed)
    n = n_article * n_chunk * n_pos
    rows = np.zeros(n, ROW_DTYPE)
    rows["chunk"] = np.arange(n) // n_pos
    rows["article"] = rows["chunk"] // n_chunk
    rows["pos"] = 256 + np.arange(n) % n_pos
    rows["token"] = rng.integers(0, 1000, n)
    hardness = np.exp(rng.normal(0, 0.4, n_article))[rows["article"]]
    rows["nll_base"] = rng.gamma(1.5, 2, n)
    rows["nll_q"] = np.maximum(0, rows["nll_base"] + rng.normal(0.01, 0.1, n) * hardness)
    rows["kld"] = level * hardness * rng.gamma(0.5, 2, n)
    rows["entropy_base"] = rng.gamma(2, 1, n)
    rows["margin_base"] = rng.gamma(1, 1, n)
    rows["top1_base"] = rng.integers(0, 1000, n)
    rows["top1_q"] = rows["top1_base"] + (rng.random(n) < flip_share)
    return rows


def df_by_hand(sizes: npt.ArrayLike, without: npt.ArrayLike) -> float:
    """3/4 · (min(G_w, 2 / (Σ d⁴ / (Σ d²)² − 1/G)) − 1), written out with loops."""
    n, theta = [float(x) for x in np.asarray(sizes)], [float(x) for x in np.asarray(without)]
    mean = sum(theta) / len(theta)
    second, fourth = sum((x - mean) ** 2 for x in theta), sum((x - mean) ** 4 for x in theta)
    g_w = sum(x**2 for x in n) ** 2 / sum(x**4 for x in n)
    return 0.75 * (min(g_w, 2 / (fourth / second**2 - 1 / len(theta))) - 1)
