"""What an importance matrix says of each tensor: how strong its input is, how uneven, and where data are missing.

    importance of column j of expert e    s[e, j] / n[e]                             mean square of the input that met it
    mean_square                           Σ_ej s[e, j] / (n_column · Σ_e n[e])       over all columns and rows
    peak                                  max_ej (s[e, j] / n[e]) / mean_square      1 is even
    share_half                            the smallest share of columns that hold half of all importance, at most 0.5

s: sums of squares, n: rows. Tensors with the same input (attn_q, attn_k, attn_v) have the same importances. What is not finite, or
below zero, is counted and left out of the rest. A legacy file holds means and calls: its `n_row_*` are calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quantkit.spec.blocks import block_of
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry

FEW_ROWS = 32  # `imatrix.min_count` of the published protocols
_BLOCK = re.compile(r"blk\.[0-9]+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorImportance:
    """One entry of a matrix in numbers. None: not defined, for want of rows or of finite values."""

    name: str
    role: str
    layer: int | None
    n_column: int
    n_expert: int
    n_row_min: float
    n_row_max: float
    n_few: int
    n_missing: int
    n_zero: int
    n_not_finite: int
    mean_square: float | None
    peak: float | None
    share_half: float | None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing in it: rows enough everywhere, no zeros, all finite."""
        return not (self.n_few or self.n_missing or self.n_zero or self.n_not_finite)


def role_of(name: str) -> str:
    """A tensor's name without its block and `.weight`: attn_q, ffn_down_exps, nextn.eh_proj, output."""
    return _BLOCK.sub("", name, count=1).removesuffix(".weight")


def describe_importances(imatrix: Imatrix) -> tuple[TensorImportance, ...]:
    """Every entry in numbers, block by block, names sorted within."""
    found = [describe_entry(name, entry, legacy=imatrix.legacy) for name, entry in imatrix.entries.items()]
    return tuple(sorted(found, key=lambda t: (t.layer is None, t.layer or 0, t.name)))


def describe_entry(name: str, entry: ImatrixEntry, *, legacy: bool = False) -> TensorImportance:
    """One entry in numbers; see the module's definitions.

    Args:
        entry: in_sum2 (n_expert, n_column), counts (n_expert,). A matrix of several slabs that share one count is one long row.
    """
    counts = entry.counts.astype(np.float64)
    hit = counts > 0
    sound = np.isfinite(entry.in_sum2) & (entry.in_sum2 >= 0)
    sums = np.where(sound & hit[:, None], entry.in_sum2, 0).astype(np.float64)
    n_column, n_row = entry.in_sum2.shape[1], float(counts.sum())
    total = float(sums.sum())
    mean = total / (n_column * n_row) if n_row > 0 else None
    if not sound.all() and total == 0:
        mean = None
    values = sums[hit] / counts[hit, None]
    return TensorImportance(
        name=name, role=role_of(name), layer=block_of(name), n_column=n_column, n_expert=len(counts),
        n_row_min=float(counts.min()), n_row_max=float(counts.max()),
        n_few=0 if legacy else int((hit & (counts < FEW_ROWS)).sum()), n_missing=int((~hit).sum()),
        n_zero=int((sound[hit] & (entry.in_sum2[hit] == 0)).sum()), n_not_finite=int((~sound).sum()), mean_square=mean,
        peak=float(values.max()) / mean if mean else None, share_half=_share_half(values.ravel()) if total > 0 else None)


def mean_square_by_role(tensors: tuple[TensorImportance, ...]) -> Mapping[str, Mapping[int, float]]:
    """Role to layer to mean_square, for tensors in blocks that have one; roles in the order of their first tensor."""
    found: dict[str, dict[int, float]] = {}
    for tensor in tensors:
        if tensor.layer is not None and tensor.mean_square:
            found.setdefault(tensor.role, {})[tensor.layer] = tensor.mean_square
    return found


def _share_half(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    largest_first = np.cumsum(np.sort(values)[::-1])
    return float(np.searchsorted(largest_first, largest_first[-1] / 2) + 1) / len(values)
