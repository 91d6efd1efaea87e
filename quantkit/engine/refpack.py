"""Reference packs in a worker: base's rows encoded, a tier's rows held against them. Worker processes only.

Both walk the chunks as an audit does (`lockstep`), so that a tier's nll, and base's, are the same bits as in an audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.lockstep import Block, Rows, Seat, blocks_of, check_finite, empty_rows
from quantkit.engine.model import Logits, Model, Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.refpack import (
    EncodedRow,
    HeadRule,
    PackedChunk,
    decode_chunk,
    encode_block,
    encode_heads,
    encode_tails,
    is_full,
    score_packed,
)
from quantkit.measure.scoring import Scorer
from quantkit.spec.refpack_file import ChunkBytes, Refpack

_BASE_COLUMNS = {"nll_base": "nll", "entropy_base": "entropy", "margin_base": "margin", "top1_base": "top1"}


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
                raise EngineError(f"expected finite logits, got a row that is not: the base, chunk {chunk}, position "
                              f"{first + i}; make the file again")
        numbers = np.concatenate([row.numbers for row in rows])
        return EncodedChunk(chunk, numbers, ChunkBytes(encode_heads(rows), encode_tails(rows)))


class PackedReference:
    """A pack in base's place: what rows need of base, chunk by chunk.

    Raises:
        InputError: the pack is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.pack = Refpack(path)
        self._n_ctx = self.pack.facts.n_ctx
        self._chunk: PackedChunk | None = None

    def check(self, model: Model) -> None:
        """Refuse a model that is no tier of the pack's base.

        Raises:
            InputError: its vocabulary has another size, or another BOS rule.
        """
        facts = self.pack.facts
        if (model.n_vocab, model.add_bos) != (facts.n_vocab, facts.add_bos):
            raise InputError(f"{model.path.name} is not a tier of {self.pack.path.name}'s base: expected its vocabulary "
                             f"({facts.n_vocab} tokens), found {model.n_vocab} tokens or another BOS rule; "
                             "give a tier of that base, or the pack of its own")

    def open_chunk(self, chunk: int, rows: Sequence[Rows]) -> None:
        """Decode the pack's rows of a chunk, and fill base's columns of the tiers' rows.

        Raises:
            InputError: they are damaged.
        """
        numbers, facts = self.pack.chunk_rows(chunk), self.pack.facts
        n_scored = self._n_ctx - 1 - self._n_ctx // 2
        full = is_full(chunk, np.arange(n_scored), n_scored, facts.full_every)
        self._chunk = decode_chunk(numbers, *self.pack.chunk_bytes(chunk), full, facts.n_vocab)
        for own in rows:
            for name, column in _BASE_COLUMNS.items():
                own[name] = numbers[column]

    def fill(self, scorer: Scorer, rows: Rows, block: Block, logits: Logits) -> npt.NDArray[np.float64]:
        """A tier's columns of one block of the open chunk; returns what kld falls short by, NaN in rows not kept whole."""
        assert self._chunk is not None
        part = slice(block.first - self._n_ctx // 2, block.last - self._n_ctx // 2)
        scores = score_packed(scorer, self._chunk, part.start, logits, rows["token"][part])
        rows["nll_q"][part], rows["kld"][part], rows["top1_q"][part] = scores.nll, scores.kld, scores.top1
        return scores.tail_kld


class PackAuditSession(_Walk):
    """A tier, and the pack that it is held against.

    Raises:
        InputError: the pack is damaged, or its vocabulary is not the tier's.
    """

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, pack: Path) -> None:
        self._reference = PackedReference(pack)
        super().__init__(path, settings, offload, self._reference.pack.content.tokens)
        try:
            self._reference.check(self.seat.model)
        except InputError:
            self.close()
            raise

    def score(self, chunk: int) -> PackedRows:
        """The tier's rows of one chunk.

        Raises:
            InputError: the pack's rows of this chunk are damaged.
            EngineError: a decode failed, or a row is not finite; names the chunk and the position.
        """
        tokens = self.tokens(chunk)
        rows = empty_rows(tokens, chunk)
        self._reference.open_chunk(chunk, [rows])
        tails = []
        for block in self.blocks:
            logits = self.seat.decode(tokens, block)
            if block.last > block.first:
                tails.append(self._reference.fill(self.scorer, rows, block, logits))
        check_finite([rows], [self.seat.model.path])
        return PackedRows(chunk, rows, np.concatenate(tails))


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
