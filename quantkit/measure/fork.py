"""Where two decodes of one text part, and whether that is a near-tie or a defect.

Decoding with a draft head must give the trunk's own text. The trunk decodes several tokens at once, though, and its kernels round
differently by batch shape, so that two tokens that are nearly equally likely may change places. Kernels for quantized weights round
activations to 8 bits: a difference of 1e-6 turns one of them over sooner or later, and rows are then 0.01 nats apart for the rest
of the text. Which shape it happens to, and where, is chance. So rows are compared, all for one prefix: the plain way's, the
drafting way's, and, as a measure of what shapes do, the plain text decoded in blocks of several lengths, with nothing drafted,
thrown away or rolled back.

    difference(a, b) = max |ln p_a(v) − ln p_b(v)| over the tokens that are among the 20 likeliest of a or of b, in nats

A fork is a near-tie where the drafting way chose what its own row says, and that row is no further from the plain one than three
times what batch shapes alone did anywhere in the text (or than 1e-4). Anything else is a defect: a draft that was taken though the
trunk disagreed, or a state that was not rolled back, which moves rows by nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Verdict = Literal["near-tie", "defect"]

_N_TOP = 20
_SLACK = 3.0
_ROUNDING = 1e-4  # nats


class Fork(NamedTuple):
    """The first place where two texts differ: `position` counts generated tokens from 0."""

    position: int
    plain: int | None
    drafted: int | None


def first_fork(plain: Sequence[int], drafted: Sequence[int]) -> Fork | None:
    """The first difference, None where the texts are equal; a token that only one text has stands against None."""
    for i, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            return Fork(i, a, b)
    n = min(len(plain), len(drafted))
    if len(plain) == len(drafted):
        return None
    return Fork(n, plain[n] if len(plain) > n else None, drafted[n] if len(drafted) > n else None)


def row_difference(a: Row, b: Row) -> float:
    """The largest difference of ln p among each row's 20 likeliest tokens, nats; 0 for equal rows."""
    ids = np.union1d(_top(a), _top(b))
    log_p, log_q = log_softmax(a), log_softmax(b)
    return float(np.abs(log_p[ids] - log_q[ids]).max())


def log_softmax(row: Row) -> npt.NDArray[np.float64]:
    """ln p of each token, float64."""
    shifted = row.astype(np.float64) - float(row.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def judge_fork(difference: float, shape_difference: float, *, follows_own_row: bool) -> Verdict:
    """Near-tie or defect; see the module.

    Args:
        difference: between the two ways' rows at the fork, nats.
        shape_difference: the largest between plain rows and rows decoded in blocks, nats.
        follows_own_row: whether the drafting way's token is the one that its own row gives.
    """
    return "near-tie" if follows_own_row and difference <= max(_ROUNDING, _SLACK * shape_difference) else "defect"


def _top(row: Row) -> npt.NDArray[np.intp]:
    n = min(_N_TOP, len(row))
    return np.argpartition(row, len(row) - n)[len(row) - n:]
