"""Reference packs: what is kept of a row of the base, and the divergence of a tier from what is kept.

With H the head of a row (the smallest set of tokens that holds the wanted mass), p = softmax of the base, q of a tier, and
τ = 1 − Σ_H p, τ_q = 1 − Σ_H q the masses of the tail, the chain rule of relative entropy says

    KLD(p‖q) = Σ_H p·ln(p/q) + τ·ln(τ/τ_q)  +  τ·KLD(p‖q within the tail)

The first two terms, head and one bucket, are the pack's kld; the last, never negative, is what it falls short by.

**Stored weights.** Of Σ_H p·ln p − Σ_H p·ln q only the second sum depends on the tier, and there p is but a weight. So the pack
holds a weight w for each token of H, rounded to a multiple of a step, and one exact number, c = Σ_H w·ln p:

    kld = c − Σ_H w·ln q + (1 − Σ_H w)·(ln τ − ln τ_q)

The logarithms of both models are exact. For equal logits every term is the same arithmetic on the same numbers, so the kld is
exactly 0 without looking whether they are equal. Rounding leaves Σ ε·(ln p − ln q) with errors ε of either sign and standard
deviation step/√6: of a given size of the sum, the fewest bits are needed if the step is one for all tokens of a row, which is why
it is not relative to p. The step, `HEAD_PRECISION`·√(12/n_head), leaves an error of √2·HEAD_PRECISION · (root mean square of
ln p/q over H) a row: about 7e-7·√(2·kld), and over n rows √n times less.

**Whole rows.** Every full_every-th row also has its tail's weights, coarser, and Σ w·ln p over it. The last term of such rows gives
the mean shortfall, as so much for each unit of the tail's mass, with the error of such a ratio.

What this leaves out: bytes (`refpack_code`, `spec.refpack_file`) and where logits come from (engine).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.measure.refpack_code import Ids, Numbers, decode_numbers, encode_numbers, id_gaps, ids_of_gaps
from quantkit.measure.scoring import Floats, Ints, Logits, Scorer
from quantkit.spec.refpack_records import PACK_ROW_DTYPE

Rows = npt.NDArray[np.void]
Weights = npt.NDArray[np.float64]

HEAD_PRECISION = 2.0**-21
TAIL_PRECISION = 2.0**-14
_SMALL_TAIL = 1e-9  # below, 1 − Σ_H has lost half its digits, and the tail is summed itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRule:
    """What is kept of a row: the smallest set with this mass, at most so many tokens; every so many rows all of it."""

    mass: float
    max_ids: int
    full_every: int


class EncodedRow(NamedTuple):
    """A row of the base: its numbers, its head, and its tail's weights if it is kept whole."""

    numbers: Rows  # (1,)
    ids: Ids
    codes: Numbers
    tail_codes: Numbers | None


class PackScores(NamedTuple):
    """A tier against a pack, one entry a row: float64 nats; `tail_kld`, the kld's shortfall, is NaN in rows not kept whole."""

    nll: Floats
    kld: Floats
    top1: Ints
    tail_kld: Floats


class Shortfall(NamedTuple):
    """By how much a pack's mean kld is too small, nats."""

    value: float | None
    se: float | None
    n_full: int


def choose_head(logits: Logits, lse: float, rule: HeadRule) -> Ids:
    """The ids of the smallest set of tokens with the wanted mass, rising; of equal logits at its edge the first ids.

    Args:
        logits: (n_vocab,) float32, at least one finite.
        lse: ln Σ exp of them.
    """
    small = (1 - rule.mass) / len(logits)  # all tokens below this hold less than 1 − mass together
    candidates = logits[logits >= np.float32(lse + np.log(small) - 1e-3)] if small > 0 else logits
    largest = np.sort(candidates)[::-1]
    held = np.cumsum(np.exp(largest.astype(np.float64) - lse))
    n = min(int(np.searchsorted(held, rule.mass)) + 1, rule.max_ids, len(largest))
    edge = largest[n - 1]
    above = np.flatnonzero(logits > edge)
    return np.sort(np.concatenate([above, np.flatnonzero(logits == edge)[: n - len(above)]])).astype(np.int32)


def is_full(chunk: int, row: npt.NDArray[np.int64], n_scored: int, full_every: int) -> npt.NDArray[np.bool_]:
    """Which rows of a chunk are kept whole: every full_every-th of the text's scored rows, whatever chunks are in the pack."""
    return np.asarray((chunk * n_scored + row) % full_every == 0)


def head_step(n_head: int) -> float:
    """The step of a head's weights: HEAD_PRECISION·√(12/n_head)."""
    return HEAD_PRECISION * float(np.sqrt(12 / n_head))


def tail_step(tail_mass: float, n_tail: int) -> float:
    """The step of a tail's weights: TAIL_PRECISION·√(12/n_tail), as a share of the tail."""
    return tail_mass * TAIL_PRECISION * float(np.sqrt(12 / n_tail))


def round_weights(p: Floats, step: float) -> Numbers:
    """Weights as multiples of a step, rounded so that the sum of the first k is the nearest, for every k.

    Each is within one step of its p, and their sum within half a step. Rounded one by one, small weights would be off in one
    direction together: all of those below half a step would be lost, and with them their share of the divergence.
    """
    return np.diff(np.rint(np.cumsum(p) / step), prepend=0.0).astype(np.uint32)


def encode_block(scorer: Scorer, logits: Logits, targets: Ints, full: npt.NDArray[np.bool_], rule: HeadRule) -> list[EncodedRow]:
    """Rows of the base as a pack keeps them.

    Args:
        logits: (n_row, n_vocab) float32.
        targets: (n_row,) int32, the token that follows each.
        full: (n_row,) which rows are kept whole.

    Returns:
        One entry a row; a row that is not finite has a non-finite nll or entropy and an empty head.
    """
    scores = scorer.score(logits, targets, ()).base
    out = []
    for i, row in enumerate(logits):
        numbers = np.zeros(1, PACK_ROW_DTYPE)
        lse = scores.nll[i] + float(row[targets[i]])
        for name, value in (("nll", scores.nll[i]), ("lse", lse), ("entropy", scores.entropy[i]), ("margin", scores.margin[i]),
                            ("top1", scores.top1[i])):
            numbers[name] = value
        if not (np.isfinite(lse) and np.isfinite(scores.entropy[i])):
            out.append(EncodedRow(numbers, np.zeros(0, np.int32), np.zeros(0, np.uint32), None))
            continue
        ids = choose_head(row, lse, rule)
        step = head_step(len(ids))
        codes = round_weights(np.exp(row[ids].astype(np.float64) - lse), step)
        numbers["n_head"] = len(ids)
        numbers["head_cross"], numbers["tail_mass"] = _head_sums(row, lse, ids, _weights(codes, step))
        tail_codes = None
        if full[i]:
            tail = _without(row, ids).astype(np.float64)
            step = tail_step(float(numbers["tail_mass"][0]), len(tail)) if len(tail) else 0.0
            tail_codes = round_weights(np.exp(tail - lse), step) if step > 0 else np.zeros(len(tail), np.uint32)
            numbers["tail_cross"] = _cross(tail - lse, _weights(tail_codes, step))
        out.append(EncodedRow(numbers, ids, codes, tail_codes))
    return out


def encode_heads(rows: list[EncodedRow]) -> bytes:
    """The heads of a chunk's rows: a stream of id gaps and one of weights."""
    gaps, codes = [id_gaps(row.ids) for row in rows], [row.codes for row in rows]
    return encode_numbers(np.concatenate(gaps)) + encode_numbers(np.concatenate(codes))


def encode_tails(rows: list[EncodedRow]) -> bytes:
    """The tails of those rows of a chunk that are kept whole: a stream of weights."""
    tails = [row.tail_codes for row in rows if row.tail_codes is not None]
    return encode_numbers(np.concatenate(tails)) if tails else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunk:
    """A chunk of a pack, decoded: the rows' numbers, and heads and tails one row behind the other."""

    numbers: Rows
    ids: Ids
    codes: Numbers
    head_starts: npt.NDArray[np.int64]
    full: npt.NDArray[np.bool_]
    tail_codes: Numbers
    tail_starts: npt.NDArray[np.int64]


def decode_chunk(numbers: Rows, heads: bytes, tails: bytes, full: npt.NDArray[np.bool_], n_vocab: int) -> PackedChunk:
    """The inverse of `encode_heads` and `encode_tails`.

    Args:
        numbers: (n_row,) of PACK_ROW_DTYPE.
        full: (n_row,) which rows are kept whole.

    Raises:
        InputError: the bytes do not fit the rows' numbers.
    """
    n_head = numbers["n_head"].astype(np.int64)
    gaps = decode_numbers(heads, 0, int(n_head.sum()))
    codes = decode_numbers(heads, gaps.stop, int(n_head.sum()))
    n_tail = np.where(full, n_vocab - n_head, 0)
    tail_codes = decode_numbers(tails, 0, int(n_tail.sum())).numbers if full.any() else np.zeros(0, np.uint32)
    return PackedChunk(numbers=numbers, ids=ids_of_gaps(gaps.numbers, n_head, n_vocab), codes=codes.numbers,
                       head_starts=np.concatenate([[0], np.cumsum(n_head)]), full=full, tail_codes=tail_codes,
                       tail_starts=np.concatenate([[0], np.cumsum(n_tail)]))


def score_packed(scorer: Scorer, pack: PackedChunk, first: int, logits: Logits, targets: Ints) -> PackScores:
    """A tier's rows against a pack's; see the module for the formulas.

    Args:
        first: the row of the chunk that the first row of logits is.
        logits: (n_row, n_vocab) float32 of the tier.
        targets: (n_row,) int32.

    Returns:
        nll and top1 as `Scorer` gives them; kld >= 0 but for the rounding of weights, and exactly 0 for the base's own logits.
    """
    scores = scorer.score(logits, targets, ()).base
    kld, tail_kld = np.empty(len(logits)), np.full(len(logits), np.nan)
    for i, row in enumerate(logits):
        at = first + i
        numbers = pack.numbers[at]
        lse = scores.nll[i] + float(row[targets[i]])
        head = slice(int(pack.head_starts[at]), int(pack.head_starts[at + 1]))
        ids = pack.ids[head]
        weights = _weights(pack.codes[head], head_step(len(ids)))
        cross, tail_mass = _head_sums(row, lse, ids, weights)
        lost = _log_ratio(float(numbers["tail_mass"]), tail_mass)
        kld[i] = float(numbers["head_cross"]) - cross + (1 - float(weights.sum())) * lost
        if pack.full[at]:
            tail = _without(row, ids).astype(np.float64) - lse
            codes = pack.tail_codes[int(pack.tail_starts[at]):int(pack.tail_starts[at + 1])]
            weights = _weights(codes, tail_step(float(numbers["tail_mass"]), len(tail)) if len(tail) else 0.0)
            tail_kld[i] = float(numbers["tail_cross"]) - _cross(tail, weights) - float(weights.sum()) * lost
    return PackScores(scores.nll, kld, scores.top1, tail_kld)


def estimate_shortfall(mean_tail_mass: float, tail_mass: Floats, tail_kld: Floats) -> Shortfall:
    """The mean of what a pack's kld falls short by, from the rows kept whole.

    r = Σ tail_kld / Σ τ over whole rows, value = r · mean(τ over all rows); se = mean(τ) / mean(τ of whole rows) ·
    √(Σ(tail_kld − r·τ)² / (n(n−1))). The tail's mass is known of every row and says more of the shortfall than kld does. The whole
    rows are a systematic sample of this text's rows, so the error is about these rows and no other text.

    Args:
        mean_tail_mass: mean of τ over all rows.
        tail_mass: (n,) τ of the rows kept whole.
        tail_kld: (n,) nats, of the same rows.

    Source: Cochran, Sampling Techniques, 3rd ed., eq. 6.13 (without its correction for a finite population).
    """
    n = len(tail_kld)
    if mean_tail_mass <= 0 and n:
        return Shortfall(0.0, 0.0, n)
    if not n or tail_mass.sum() <= 0:
        return Shortfall(None, None, n)
    ratio, scale = float(tail_kld.sum() / tail_mass.sum()), mean_tail_mass / float(tail_mass.mean())
    se = scale * float(np.sqrt(np.square(tail_kld - ratio * tail_mass).sum() / (n * (n - 1)))) if n > 1 else None
    return Shortfall(max(0.0, ratio * mean_tail_mass), se, n)


def _head_sums(row: Logits, lse: float, ids: Ids, weights: Weights) -> tuple[float, float]:
    """Σ w·ln p over the head, and the probability outside of it."""
    x = row[ids].astype(np.float64) - lse
    tail = 1 - float(np.exp(x).sum())
    if tail < _SMALL_TAIL:
        tail = float(np.exp(_without(row, ids).astype(np.float64) - lse).sum())
    return _cross(x, weights), tail


def _weights(codes: Numbers, step: float) -> Weights:
    return codes.astype(np.float64) * step


def _cross(log_p: Floats, weights: Weights) -> float:
    """Σ w·ln p; a weight of 0 adds 0 even to ln 0."""
    seen = weights > 0
    return float((weights[seen] * log_p[seen]).sum())


def _without(row: Logits, ids: Ids) -> Logits:
    outside = np.ones(len(row), np.bool_)
    outside[ids] = False
    return row[outside]


def _log_ratio(base: float, tier: float) -> float:
    """ln τ − ln τ_q; 0 where the base has no tail, infinite where the tier has none."""
    if base <= 0:
        return 0.0
    return float(np.log(base) - np.log(tier)) if tier > 0 else np.inf
