"""What a worker process sends is looked at before it is used: a damaged answer is told by its step, and goes no further."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from quantkit.core.errors import EngineError
from quantkit.engine.collect import Sums
from quantkit.engine.lockstep import Tokenized

_ADVICE = "from the worker process: run again, and if it comes back, report it"


def check_tokens(step: str, seen: Tokenized) -> None:
    """Raises EngineError where a text's tokens are not int32 ids of the vocabulary, each with its end, in order."""
    ids, ends = seen.ids, seen.ends
    if ids.dtype != np.int32 or ids.ndim != 1 or ends.shape != ids.shape:
        raise EngineError(f"{step}: expected int32 tokens and as many ends, got {ids.dtype} of shape {ids.shape} and ends of shape "
                          f"{ends.shape} {_ADVICE}")
    if len(ids) and not (ids.min() >= 0 and ids.max() < seen.n_vocab):
        raise EngineError(f"{step}: expected tokens below {seen.n_vocab}, got {ids.min()} to {ids.max()} {_ADVICE}")


def check_sums(step: str, sums: Mapping[str, Sums], row_lengths: Mapping[str, int], wanted: Collection[str]) -> None:
    """Raises EngineError where the sums of a matrix are not (n_matrix, ne0) float64, finite and not below 0, with their counts.

    Args:
        row_lengths: ne0 of every tensor.
        wanted: the matrices that were asked for.
    """
    for name, (in_sum2, counts) in sums.items():
        if name not in wanted:
            raise EngineError(f"{step}: expected sums of the matrices that were asked for, got some of {name} {_ADVICE}")
        whole = in_sum2.dtype == np.float64 and counts.dtype == np.int64 and in_sum2.ndim == 2 and counts.ndim == 1
        if not whole or in_sum2.shape[1] != row_lengths[name] or len(counts) not in (1, len(in_sum2)):
            raise EngineError(f"{step}: expected float64 sums of {row_lengths[name]} columns and int64 counts for {name}, got "
                              f"{in_sum2.dtype} of shape {in_sum2.shape} and {counts.dtype} of shape {counts.shape} {_ADVICE}")
        if not (np.isfinite(in_sum2).all() and (in_sum2 >= 0).all() and (counts >= 0).all()):
            raise EngineError(f"{step}: expected sums of squares and counts for {name}, got some that are not finite or below 0 "
                              f"{_ADVICE}")
