"""Scoring: from two rows of float32 logits to one record of fidelity, in float64, at the speed of `exp`.

Definitions, with `b` the base's logits of a position, `q` a tier's, `p = softmax`, all logarithms natural:

    nll       ln Σ_v exp(x_v) − x_target                          nats, >= 0 but for rounding, never clamped
    kld       Σ_v p_b(v)·(ln p_b(v) − ln p_q(v))                   nats, >= 0 but for rounding (about −1e-14)
    entropy   −Σ_v p_b(v)·ln p_b(v)                                nats, 0 .. ln n_vocab
    margin    ln p1 − ln p2 of the base's two most likely tokens   nats, >= 0
    top1      the most likely token; of equal ones the first

How it is computed. With E = exp(b), S_b = Σ E, A_b = Σ E·b, S_q = Σ exp(q), A_q = Σ E·q:

    kld = (A_b − A_q) / S_b + ln(S_q / S_b)        entropy = ln S_b − A_b / S_b

The base's E is computed once for all tiers of a group. Equal logits give equal sums, hence a kld of exactly 0. Only rows whose
largest logit is beyond ±300 are shifted by it first; the shifts cancel in the formula. The vocabulary is walked in tiles that
stay in the cache, each row's sums run over the same tiles in the same order, and the buffers of every row start at the same
alignment, so a row's numbers do not depend on how many rows or tiers share a call. numpy releases the GIL in all of it.

A base logit of −inf is a token of probability 0 and adds 0. NaN or +inf anywhere makes nll and kld of that row NaN; a tier's
−inf where the base has weight makes the kld +inf. The caller stops at such a row and names its position.

What this leaves out: where logits come from (engine), and every average over rows (summary).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_TILE_COLUMNS = 8192  # below 10,000, where OpenBLAS begins to split one dot product over threads
_TILE_ELEMENTS = 1 << 17  # two float64 buffers of this size are 2 MiB: larger ones fall out of the cache
_PLAIN_LIMIT = 300.0  # exp(±300) and sums of it stay far from the ends of float64
_ALIGN = 64  # bytes, one cache line and one AVX512 register


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseScores:
    """What the base alone gives, one entry a row: float64 in nats, token ids int32."""

    nll: Floats
    entropy: Floats
    top1: Ints
    margin: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class TierScores:
    """What a tier gives against the base, one entry a row: float64 in nats, token ids int32."""

    nll: Floats
    kld: Floats
    top1: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """The scores of one block: the base's, and those of each tier in the order given."""

    base: BaseScores
    tiers: tuple[TierScores, ...]


class Scorer:
    """Scores blocks of logits; keeps its two tile buffers (2 MiB) between calls. Not for two threads at once."""

    def __init__(self) -> None:
        self._values = _aligned(_TILE_ELEMENTS)
        self._base_exponentials = _aligned(_TILE_ELEMENTS)

    def score(self, base: Logits, targets: Ints, tiers: Sequence[Logits]) -> GroupScores:
        """Score every row of a block for the base and each tier.

        Args:
            base: (n_row, n_vocab) float32 logits of the base. Read only, never copied as a whole.
            targets: (n_row,) int, the token that follows each position.
            tiers: for each tier, (n_row, n_vocab) float32 logits of the same positions.

        Returns:
            The block's scores; see the module for the formulas. Rows do not depend on the other rows or tiers of the call.

        Raises:
            InputError: shapes that differ (a tier with another vocabulary), fewer than two tokens, a target outside of it.
        """
        _check_shapes(base, targets, tiers)
        group = [base, *tiers]
        n_row = len(base)
        top1 = np.empty((len(group), n_row), dtype=np.int64)
        for logits, top in zip(group, top1, strict=True):
            np.argmax(logits, axis=1, out=top)  # NaN counts as the maximum, so it shows in `maximum`
        rows = np.arange(n_row)
        maximum = np.stack([logits[rows, top] for logits, top in zip(group, top1, strict=True)]).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            shift = np.where(np.abs(maximum) > _PLAIN_LIMIT, maximum, 0.0)
            sums, products = self._accumulate(group, shift)
            log_sum = np.log(sums)
            target = np.stack([logits[rows, targets] for logits in group]).astype(np.float64)
            nll = log_sum - (target - shift)
            kld = (products[0] - products) / sums[0] + np.log(sums / sums[0])
            entropy = log_sum[0] - products[0] / sums[0]
        odd = ~(np.isfinite(sums) & np.isfinite(products))
        for i, row in zip(*np.nonzero(odd | odd[0]), strict=True):
            nll[i, row], kld[i, row] = _score_odd_row(base[row], group[i][row], int(targets[row]))
        for row in np.flatnonzero(odd[0]):
            entropy[row] = _entropy_of_odd_row(base[row])
        top_ids = top1.astype(np.int32)
        return GroupScores(
            base=BaseScores(nll=nll[0], entropy=entropy, top1=top_ids[0], margin=_margins(base, top1[0])),
            tiers=tuple(TierScores(nll=nll[i], kld=kld[i], top1=top_ids[i]) for i in range(1, len(group))),
        )

    def _accumulate(self, group: Sequence[Logits], shift: Floats) -> tuple[Floats, Floats]:
        """Σ exp(x) and Σ exp(b)·x of each row, for the base and the tiers: two arrays (n_group, n_row)."""
        n_row, n_vocab = group[0].shape
        width = min(_TILE_COLUMNS, -(-n_vocab // 8) * 8)  # whole cache lines, so that each row's buffer starts on one
        height = _TILE_ELEMENTS // width
        values = self._values[: height * width].reshape(height, width)
        shared = self._base_exponentials[: height * width].reshape(height, width)
        n_tile = -(-n_vocab // width)
        sums = np.empty((len(group), n_row, n_tile))
        products = np.empty((len(group), n_row, n_tile))
        for row in range(0, n_row, height):
            rows = slice(row, min(row + height, n_row))
            n = rows.stop - row
            shifted = [bool(own[rows].any()) for own in shift]
            for tile in range(n_tile):
                columns = slice(tile * width, min((tile + 1) * width, n_vocab))
                m = columns.stop - columns.start
                x, base_exp = values[:n, :m], shared[:n, :m]
                for i, logits in enumerate(group):
                    np.copyto(x, logits[rows, columns])
                    if shifted[i]:
                        np.subtract(x, shift[i, rows, None], out=x)
                    if i == 0:
                        np.exp(x, out=base_exp)
                    np.matmul(base_exp[:, None, :], x[:, :, None], out=products[i, rows, tile, None, None])  # a dot a row
                    exponentials = np.exp(x, out=x) if i else base_exp
                    np.add.reduce(exponentials, axis=1, out=sums[i, rows, tile])
        return sums.sum(axis=2), products.sum(axis=2)


def _aligned(n: int) -> Floats:
    """An uninitialised float64 buffer that starts on a cache line."""
    raw = np.empty(n + _ALIGN // 8)
    skip = -raw.ctypes.data % _ALIGN // 8
    return raw[skip : skip + n]


def _check_shapes(base: Logits, targets: Ints, tiers: Sequence[Logits]) -> None:
    n_row, n_vocab = base.shape
    if n_vocab < 2:
        raise InputError(f"expected logits over at least 2 tokens, got {n_vocab}: this is not a language model's output; give "
                         "another file")
    for i, tier in enumerate(tiers):
        if tier.shape != base.shape:
            raise InputError(
                f"expected logits of {n_row} rows x {n_vocab} tokens as the base has them, got the shape {tier.shape} for tier "
                f"{i} of the group: only files of one model with one vocabulary can be compared; leave it out"
            )
    if targets.shape != (n_row,):
        raise InputError(f"expected one target for each of {n_row} rows, got an array of shape {targets.shape}: give one a row")
    if n_row and not (int(targets.min()) >= 0 and int(targets.max()) < n_vocab):
        raise InputError(
            f"expected targets from 0 to {n_vocab - 1}, got {int(targets.min())} to {int(targets.max())}: "
            "the text was tokenized with another vocabulary; audit the file again"
        )


def _margins(base: Logits, top: npt.NDArray[np.int64]) -> Floats:
    """ln p1 − ln p2 of each row, which is the difference of its two largest logits."""
    margins = np.empty(len(base))
    for row, (logits, i) in enumerate(zip(base, top, strict=True)):
        second = max(logits[:i].max(initial=-np.inf), logits[i + 1 :].max(initial=-np.inf))
        margins[row] = float(logits[i]) - float(second)
    return margins


def _log_softmax(logits: Logits) -> Floats:
    """ln p over one row (n_vocab,) in float64; NaN everywhere if a logit is NaN or +inf, or if all are −inf."""
    x = logits.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def _score_odd_row(base: Logits, tier: Logits, target: int) -> tuple[float, float]:
    """The tier's nll and kld of one row where a logit, or a sum of the fast path, is not finite."""
    log_base, log_tier = _log_softmax(base), _log_softmax(tier)
    p_base = np.exp(log_base)
    seen = ~(p_base == 0)  # 0·ln 0 is 0 by continuity, where floating point gives NaN; a NaN stays seen
    kld = np.sum(p_base[seen] * (log_base[seen] - log_tier[seen]))
    return float(-log_tier[target]), float(kld)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def _entropy_of_odd_row(base: Logits) -> float:
    log_base = _log_softmax(base)
    p_base = np.exp(log_base)
    seen = ~(p_base == 0)
    return float(-np.sum(p_base[seen] * log_base[seen]))
