"""What a worker process sends is looked at before it is used: a damaged answer is told by its step, and goes no further."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.core.stats import Floats
from quantkit.engine.collect import Sums
from quantkit.engine.draft import Generation
from quantkit.engine.lockstep import Tokenized
from quantkit.measure.numbers import Rows
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.refpack_records import PACK_ROW_DTYPE

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


def check_trial(step: str, rows: Rows, chunks: Sequence[int]) -> None:
    """Raises EngineError where a trial's rows are not those of just these chunks, in their order, with finite numbers."""
    n_scored, rest = divmod(len(rows), max(1, len(chunks)))
    if rows.dtype != ROW_DTYPE or rest or not n_scored or not np.array_equal(rows["chunk"], np.repeat(chunks, n_scored)):
        raise EngineError(f"{step}: expected the rows of {len(chunks)} chunks in order, got {len(rows)} of {rows.dtype} {_ADVICE}")
    if not all(np.isfinite(rows[name]).all() for name in ("nll_base", "nll_q", "kld")):
        raise EngineError(f"{step}: expected finite numbers in every row, got others {_ADVICE}")


def check_packed(step: str, rows: Rows, tail_kld: Floats, asked: Collection[int]) -> None:
    """Raises EngineError where rows against a pack are not of one chunk that was asked for, each with its tail's KLD or NaN."""
    chunks = np.unique(rows["chunk"]).tolist() if rows.dtype == ROW_DTYPE else []
    check_trial(step, rows, chunks[:1])
    if chunks[0] not in asked or tail_kld.shape != rows.shape or tail_kld.dtype != np.float64:
        raise EngineError(f"{step}: expected rows of a chunk that was asked for and as many tails, got {len(rows)} of chunk "
                          f"{chunks[0]} and {tail_kld.shape} {_ADVICE}")


def check_encoded(step: str, chunk: int, numbers: npt.NDArray[np.void], asked: Collection[int], n_scored: int) -> None:
    """Raises EngineError where an encoded chunk is not one that was asked for, with a row for every scored token."""
    if chunk not in asked or numbers.shape != (n_scored,) or numbers.dtype != PACK_ROW_DTYPE:
        raise EngineError(f"{step}: expected {n_scored} rows of a chunk that was asked for, got {numbers.shape} of {numbers.dtype} "
                          f"for chunk {chunk} {_ADVICE}")


def check_generation(step: str, found: Generation, n_predict: int, n_draft: int) -> None:
    """Raises EngineError where a text is longer than asked, or its verify steps do not add up to it.

    A step gives its accepted tokens and one more; the last may be cut off at the end of the text.
    """
    n = len(found.tokens)
    sound = all(0 <= step_.n_accepted <= step_.n_drafted <= n_draft for step_ in found.steps)
    n_given = sum(step_.n_accepted + 1 for step_ in found.steps)
    if n > n_predict or not sound or n > n_given:
        raise EngineError(f"{step}: expected at most {n_predict} tokens that the verify steps explain, got {n} tokens and "
                          f"{len(found.steps)} steps that give {n_given} {_ADVICE}")
