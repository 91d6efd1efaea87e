"""Reference packs in a worker: base's rows encoded, a tier's rows held against them. Worker processes only.

Both walk the chunks as an audit does (`lockstep`), so that a tier's nll, and base's, are the same bits as in an audit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.lockstep import Rows, Seat, blocks_of, check_finite, empty_rows
from quantkit.engine.model import Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.refpack import (
    EncodedRow,
    HeadRule,
    decode_chunk,
    encode_block,
    encode_heads,
    encode_tails,
    is_full,
    score_packed,
)
from quantkit.measure.scoring import Scorer
from quantkit.spec.refpack_file import ChunkBytes, Refpack


class EncodedChunk(NamedTuple):
    """A chunk of base as a pack holds it: (n_scored,) numbers of PACK_ROW_DTYPE, and the encoded rows."""

    chunk: int
    numbers: npt.NDArray[np.void]
    data: ChunkBytes


class PackedRows(NamedTuple):
    """A tier's rows of one chunk (`article` is left at -1), and what kld falls short by, NaN in rows not kept whole."""

    chunk: int
    rows: Rows
    tail_kld: npt.NDArray[np.float64]


class _Walk:
    """One model over the chunks of a text."""

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, tokens: Tokens) -> None:
        self.n_ctx, self._tokens = settings.n_ctx, tokens
        self.blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
        self.seat = Seat(path, settings, offload, max(1, max(block.last - block.first for block in self.blocks)))
        self.scorer = Scorer()

    @property
    def n_scored(self) -> int:
        """Rows of a chunk."""
        return self.n_ctx - 1 - self.n_ctx // 2

    def full_rows(self, chunk: int, full_every: int) -> npt.NDArray[np.bool_]:
        """Which of a chunk's rows are kept whole."""
        return is_full(chunk, np.arange(self.n_scored), self.n_scored, full_every)

    def tokens(self, chunk: int) -> Tokens:
        """A chunk's tokens."""
        return self._tokens[chunk * self.n_ctx:(chunk + 1) * self.n_ctx]

    def close(self) -> None:
        """Free the model."""
        self.seat.close()


class PackSession(_Walk):
    """Base, and the rule of what is kept of its rows."""

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, tokens: Tokens, rule: HeadRule) -> None:
        super().__init__(path, settings, offload, tokens)
        self._rule = rule

    def encode(self, chunk: int) -> EncodedChunk:
        """The rows of one chunk.

        Raises:
            EngineError: a decode failed, or a row is not finite; names the chunk and the position.
        """
        tokens, first = self.tokens(chunk), self.n_ctx // 2
        full = self.full_rows(chunk, self._rule.full_every)
        rows: list[EncodedRow] = []
        for block in self.blocks:
            logits = self.seat.decode(tokens, block)
            if block.last > block.first:
                targets = tokens[block.first + 1:block.last + 1]
                rows += encode_block(self.scorer, logits, targets, full[block.first - first:block.last - first], self._rule)
        for i, row in enumerate(rows):
            if not len(row.ids):
                raise EngineError(f"expected finite logits, got a row that is not: the base, chunk {chunk}, position {first + i}")
        numbers = np.concatenate([row.numbers for row in rows])
        return EncodedChunk(chunk, numbers, ChunkBytes(encode_heads(rows), encode_tails(rows)))


class PackAuditSession(_Walk):
    """A tier, and the pack that it is held against.

    Raises:
        InputError: the pack is damaged, or its vocabulary is not the tier's.
    """

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, pack: Path) -> None:
        self._pack = Refpack(pack)
        facts = self._pack.facts
        super().__init__(path, settings, offload, self._pack.content.tokens)
        model = self.seat.model
        if (model.n_vocab, model.add_bos) != (facts.n_vocab, facts.add_bos):
            self.close()
            raise InputError(f"{path.name} is not a tier of {pack.name}'s base: expected its vocabulary ({facts.n_vocab} tokens), "
                             f"found {model.n_vocab} tokens or another BOS rule")

    def score(self, chunk: int) -> PackedRows:
        """The tier's rows of one chunk.

        Raises:
            InputError: the pack's rows of this chunk are damaged.
            EngineError: a decode failed, or a row is not finite; names the chunk and the position.
        """
        facts, numbers = self._pack.facts, self._pack.chunk_rows(chunk)
        full = self.full_rows(chunk, facts.full_every)
        packed = decode_chunk(numbers, *self._pack.chunk_bytes(chunk), full, facts.n_vocab)
        tokens, first = self.tokens(chunk), self.n_ctx // 2
        rows, tail_kld = empty_rows(tokens, chunk), np.full(self.n_scored, np.nan)
        for name, column in (("nll_base", "nll"), ("entropy_base", "entropy"), ("margin_base", "margin"), ("top1_base", "top1")):
            rows[name] = numbers[column]
        for block in self.blocks:
            logits = self.seat.decode(tokens, block)
            if block.last > block.first:
                part = slice(block.first - first, block.last - first)
                scores = score_packed(self.scorer, packed, part.start, logits, rows["token"][part])
                rows["nll_q"][part], rows["kld"][part], rows["top1_q"][part] = scores.nll, scores.kld, scores.top1
                tail_kld[part] = scores.tail_kld
        check_finite([rows], [self.seat.model.path])
        return PackedRows(chunk, rows, tail_kld)


def open_pack(state: WorkerState, **arguments: Any) -> int:
    """Command: load base for a pack (arguments of PackSession); returns its vocabulary's size."""
    session = state.open(lambda: PackSession(**arguments))
    return int(session.seat.model.n_vocab)


def encode(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[EncodedChunk]:
    """Command: some chunks of base, encoded, one item each."""
    assert isinstance(state.session, PackSession)
    for chunk in chunks:
        yield state.session.encode(chunk)


def open_pack_audit(state: WorkerState, **arguments: Any) -> None:
    """Command: load a tier and open a pack (arguments of PackAuditSession)."""
    state.open(lambda: PackAuditSession(**arguments))


def score_pack(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[PackedRows]:
    """Command: a tier's rows of some chunks against the pack, one item each."""
    assert isinstance(state.session, PackAuditSession)
    for chunk in chunks:
        yield state.session.score(chunk)
