"""Slices: where a tier differs from base. The scored tokens are cut in four ways, each token once in each way.

    entropy    of base's distribution, nats: how sure base is
    margin     ln p1 − ln p2 of base, nats: how easily its first choice flips
    position   of the scored position in the chunk, four equal parts: how much context it has
    token      class of the token that was to be predicted, from its text

A slice has another number of tokens in each chunk and article, so its mean is a ratio, and so is the mean without one article:
the same jackknife as everywhere, with its own effective number of articles. Shares of KLD and of flips say what a slice
contributes, its mean says how much it hurts there. Intervals are of each slice alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.stats import group_by
from quantkit.measure.numbers import STATISTICS, Rows, flips, kld
from quantkit.measure.summary import estimate, sorted_rows
from quantkit.spec.verdict_records import Slice

ENTROPY_EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0)  # nats, lower ends; a floating entropy just below 0 is in the first
MARGIN_EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
N_POSITION = 4
TOKEN_CLASSES = ("word start", "word inside", "digits", "punctuation", "whitespace", "special")

Mask = npt.NDArray[np.bool_]


class Piece(NamedTuple):
    """A token's text as the vocabulary writes it, and whether it is a control token."""

    text: bytes
    special: bool


def token_class(piece: Piece) -> str:
    """One of `TOKEN_CLASSES`.

    special: control tokens, and what has no text. whitespace: nothing but blanks and line ends. digits: nothing but digits.
    punctuation: neither a letter nor a digit. Of the rest, word start begins with a blank and word inside does not; a script
    without blanks is all word inside, and so is a part of a character.
    """
    text = piece.text.decode(errors="replace")
    body = text.strip()
    if piece.special or not text:
        return "special"
    if not body:
        return "whitespace"
    if body.isdigit():
        return "digits"
    if not any(c.isalnum() or c == "\N{REPLACEMENT CHARACTER}" for c in body):
        return "punctuation"
    return "word start" if text[0].isspace() else "word inside"


def slice_rows(rows: Rows, classes: Mapping[int, str] | None) -> tuple[Slice, ...]:
    """Every slice of a tier, in the order of the module's table.

    Args:
        rows: of `ROW_DTYPE`, one tier's.
        classes: token id to one of `TOKEN_CLASSES`, for every token of the rows; None where they are not known, which leaves
            the slices by token away.

    Raises:
        InputError: see `summary.summarize`; or a token without a class.
    """
    rows = sorted_rows(rows)
    return tuple(_slice(rows, mask, kind, name, lo, hi) for kind, name, lo, hi, mask in _cuts(rows, classes))


class _Cut(NamedTuple):
    kind: str
    name: str
    lo: float | None
    hi: float | None
    mask: Mask


def _cuts(rows: Rows, classes: Mapping[int, str] | None) -> Iterator[_Cut]:
    yield from _edge_cuts("entropy", rows["entropy_base"], ENTROPY_EDGES)
    yield from _edge_cuts("margin", rows["margin_base"], MARGIN_EDGES)
    first, last = int(rows["pos"].min()), int(rows["pos"].max()) + 1
    edges = [first + (last - first) * i // N_POSITION for i in range(N_POSITION + 1)]
    for lo, hi in pairwise(edges):
        yield _Cut("position", f"{lo} to {hi - 1}", lo, hi, (rows["pos"] >= lo) & (rows["pos"] < hi))
    if classes is not None:
        yield from _token_cuts(rows, classes)


def _token_cuts(rows: Rows, classes: Mapping[int, str]) -> Iterator[_Cut]:
    ids, index = np.unique(rows["token"], return_inverse=True)
    missing = [int(i) for i in ids if int(i) not in classes]
    if missing:
        raise InputError(f"expected a class for every token of the rows, found none for token {missing[0]} and {len(missing) - 1} "
                         "others: the classes are of another text or another vocabulary; audit again")
    of_row = np.array([TOKEN_CLASSES.index(classes[int(i)]) for i in ids])[index.reshape(-1)]
    for i, name in enumerate(TOKEN_CLASSES):
        yield _Cut("token", name, None, None, of_row == i)


def _edge_cuts(kind: str, x: npt.NDArray[np.float64], edges: tuple[float, ...]) -> Iterator[_Cut]:
    index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, None)
    for i, lo in enumerate(edges):
        hi = edges[i + 1] if i + 1 < len(edges) else None
        name = f"{lo:g} nats and more" if hi is None else f"below {hi:g} nats" if lo == 0 else f"{lo:g} to {hi:g} nats"
        yield _Cut(kind, name, lo, hi, index == i)


def _slice(rows: Rows, mask: Mask, kind: str, name: str, lo: float | None, hi: float | None) -> Slice:
    own = rows[mask]
    total_kld, total_flips = float(kld(rows).sum()), float(flips(rows).sum())
    chunks, articles = group_by(own["chunk"]), group_by(own["article"])
    return Slice(
        kind=kind, name=name, lo=lo, hi=hi, n_scored=len(own), n_article=articles.n_group, share=len(own) / len(rows),
        kld_share=float(kld(own).sum()) / total_kld if total_kld else None,
        flip_share=float(flips(own).sum()) / total_flips if total_flips else None,
        kld=estimate(own, STATISTICS["kld"], chunks, articles) if len(own) else None,
        same_top_p=estimate(own, STATISTICS["same_top_p"], chunks, articles) if len(own) else None,
    )  # fmt: skip
