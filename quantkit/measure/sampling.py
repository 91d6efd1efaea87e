"""Choosing a token from logits, with noise that depends on nothing but seed, stream, position and token.

Two ways of decoding one text can be compared token by token only if chance is the same in both. Here the sampled token is
argmax(logit / T + g), with g standard Gumbel noise from a hash (the Gumbel-max trick: the same distribution as drawing from
softmax(logit / T)). The order in which tokens are drawn, or drafts thrown away, cannot move it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_GAMMA, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How a token is chosen; the filters come in llama.cpp's order, on the untempered distribution.

    Attributes:
        temperature: above 0.
        top_k: keep so many; 0 keeps all.
        top_p: keep the smallest set of the likeliest with at least this share of the probability; 1 keeps all.
        min_p: keep those at least this share as likely as the likeliest; 0 keeps all.
        seed, stream: of the noise. One stream a prompt.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stream: int

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"expected a temperature above 0 for sampling, got {self.temperature}: leave the sampler away for "
                             "greedy")


def choose(logits: Row, position: int, sampler: Sampler | None) -> int:
    """The token at a position of the text.

    Args:
        logits: (n_vocab,) float32, finite.
        position: of the token to be chosen, counted from the start of the prompt.
        sampler: None is greedy: the first maximum.
    """
    if sampler is None:
        return int(np.argmax(logits))
    ids = candidates(logits, sampler)
    return int(ids[np.argmax(_scores(logits, ids, position, sampler))])


def choice_margin(logits: Row, position: int, sampler: Sampler | None) -> float | None:
    """How far the second choice was behind the first, nats, >= 0; None where the filters left one token.

    Greedy: ln p1 − ln p2. Sampled: the same difference of logit + T·g between the two best that the filters left.
    """
    if sampler is None:
        best = np.partition(logits.astype(np.float64), -2)[-2:]
    else:
        ids = candidates(logits, sampler)
        if len(ids) < 2:
            return None
        best = np.partition(_scores(logits, ids, position, sampler), -2)[-2:] * sampler.temperature
    return float(best[1] - best[0])


def _scores(logits: Row, ids: Ids, position: int, sampler: Sampler) -> Floats:
    noise = gumbel(sampler.seed, sampler.stream, position, ids)
    return np.asarray(logits[ids].astype(np.float64) / sampler.temperature + noise)


def candidates(logits: Row, sampler: Sampler) -> Ids:
    """The tokens that the filters leave, the likeliest first; of equal ones the smaller id. Shape (n,), n >= 1.

    Source: llama_sampler_top_k, _top_p and _min_p in src/llama-sampler.cpp, min_keep 1.
    """
    n_vocab = len(logits)
    ids = np.arange(n_vocab)
    if 0 < sampler.top_k < n_vocab:
        ids = np.argpartition(logits, n_vocab - sampler.top_k)[n_vocab - sampler.top_k:]
    ids = ids[np.lexsort((ids, -logits[ids]))]
    weights = np.exp(logits[ids].astype(np.float64) - float(logits[ids[0]]))
    if sampler.top_p < 1:
        n_kept = int(np.searchsorted(np.cumsum(weights), sampler.top_p * weights.sum())) + 1
        ids, weights = ids[:n_kept], weights[:n_kept]
    return ids[: max(1, int(np.count_nonzero(weights >= sampler.min_p)))]


def gumbel(seed: int, stream: int, position: int, tokens: Ids) -> Floats:
    """Standard Gumbel noise of some tokens at one position, shape (n,): −ln(−ln u), u in (0, 1) from a hash.

    The hash is splitmix64's finalizer, once for each of seed, stream, position and token: the same on every machine.
    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; Vigna's splitmix64.c.
    """
    with np.errstate(over="ignore"):
        state = _mix(_mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(stream)) ^ np.uint64(position))
        bits = _mix(state ^ tokens.astype(np.uint64)) >> np.uint64(11)
    u = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(u)))


def uniform(seed: int, stream: int, n: int) -> Floats:
    """Numbers in (0, 1) from the same hash, shape (n,)."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(stream))
        bits = _mix(state ^ np.arange(n, dtype=np.uint64)) >> np.uint64(11)
    return np.asarray((bits.astype(np.float64) + 0.5) * 2.0**-53)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return np.asarray(x ^ (x >> np.uint64(31)))
