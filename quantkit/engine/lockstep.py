"""Base and tiers in lockstep: the forward passes of an audit and the rows they give. Worker processes only.

A block is at most n_batch positions of one chunk. Base decodes it, every tier of the group decodes it, and the scored rows are
compared at once, in place, in the contexts' own output buffers. Logits memory is O(block x n_vocab) at any n_ctx.
Where base and one tier do not fit in memory together, base's rows of a panel of chunks go to an unlinked scratch file and the
tiers follow one by one; the rows are the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError
from quantkit.core.files import temp_path
from quantkit.engine.library import BufferSize, BuildFacts, build_facts, load_library, tap
from quantkit.engine.model import Context, Logits, Model, Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.scoring import Scorer
from quantkit.measure.slices import Piece
from quantkit.spec.records import ROW_DTYPE

Rows = npt.NDArray[np.void]


class Block(NamedTuple):
    """At most n_batch positions of a chunk: [start, stop), and the scored ones among them, [first, last)."""

    start: int
    stop: int
    first: int
    last: int


class Tokenized(NamedTuple):
    """A text as one model sees it."""

    ids: Tokens
    ends: npt.NDArray[np.int64]
    n_vocab: int
    add_bos: bool
    pieces: dict[int, Piece] | None = None


class ChunkRows(NamedTuple):
    """The rows of one chunk, one array of ROW_DTYPE for each tier of the group (`article` is left at -1)."""

    chunk: int
    tiers: tuple[Rows, ...]


def blocks_of(n_ctx: int, n_batch: int) -> list[Block]:
    """The blocks of a chunk. Positions n_ctx//2 .. n_ctx-2 are scored against the next token, as in llama-perplexity."""
    first, last = n_ctx // 2, n_ctx - 1
    out = []
    for start in range(0, n_ctx, n_batch):
        stop = min(start + n_batch, n_ctx)
        lo, hi = max(start, first), min(stop, last)
        out.append(Block(start, stop, lo, max(lo, hi)))
    return out


class Seat:
    """One open model with its context; `splits` as in `Model`."""

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, n_outputs_max: int,
                 splits: Sequence[Path] = ()) -> None:
        self.model = Model(path, use_extra_bufts=settings.use_extra_bufts, offload=offload, splits=splits)
        try:
            self.context = Context(self.model, settings, n_outputs_max=n_outputs_max)
        except EngineError:
            self.model.close()
            raise

    def decode(self, tokens: Tokens, block: Block) -> Logits:
        """The logits of the block's scored rows; clears the memory before a chunk's first block."""
        if block.start == 0:
            self.context.clear()
        ids = tokens[block.start:block.stop]
        if block.start == 0 and self.model.add_bos:
            ids = ids.copy()
            ids[0] = self.model.bos
        return self.context.decode(ids, block.start, slice(block.first - block.start, block.last - block.start))

    def close(self) -> None:
        """Free both."""
        self.context.close()
        self.model.close()


class AuditSession:
    """A group: base and the tiers that sit beside it in one worker.

    Args:
        tier_settings: the arithmetic of each tier where it is not base's, for noise floors; n_ctx and n_batch are base's.

    Raises:
        InputError: a tier's vocabulary has another size than base's.
        EngineError: the library refused a file.
    """

    def __init__(self, base: Path, tiers: Sequence[Path], settings: ContextSettings, offload: Offload, tokens: Tokens,
                 tier_settings: Sequence[ContextSettings] = ()) -> None:
        self._settings, self._tokens = settings, tokens
        self._blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
        self._seats: list[Seat] = []
        n_outputs_max = max(1, max(block.last - block.first for block in self._blocks))
        try:
            for path, own in zip((base, *tiers), (settings, *(tier_settings or [settings] * len(tiers))), strict=True):
                self._seats.append(Seat(path, own, offload, n_outputs_max))
                check_vocabulary(self._seats[0].model, self._seats[-1].model)
        except Exception:
            self.close()
            raise
        self._scorer = Scorer()

    def score(self, chunk: int) -> ChunkRows:
        """All tiers' rows of one chunk.

        Raises:
            EngineError: a decode failed, or a row is not finite; names the tier, the chunk and the position.
        """
        n_ctx = self._settings.n_ctx
        tokens = self._tokens[chunk * n_ctx:(chunk + 1) * n_ctx]
        base, *tiers = self._seats
        out = tuple(empty_rows(tokens, chunk) for _ in tiers)
        for block in self._blocks:
            base_logits = base.decode(tokens, block)
            tier_logits = [seat.decode(tokens, block) for seat in tiers]
            if block.last > block.first:
                fill_rows(self._scorer, out, block, base_logits, tier_logits)
        check_finite(out, [seat.model.path for seat in tiers])
        return ChunkRows(chunk, out)

    def close(self) -> None:
        """Free every context and model."""
        for seat in self._seats:
            seat.close()
        self._seats = []


class PanelSession:
    """The panel way: base's scored logits of some chunks on disk, then one model at a time.

    Args:
        folder: where the scratch file is made; it is unlinked at once, so nothing can be left behind.
    """

    def __init__(self, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens, chunks: tuple[int, ...],
                 folder: Path) -> None:
        self._settings, self._offload, self._tokens, self._chunks = settings, offload, tokens, chunks
        self._blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
        self._n_outputs_max = max(1, max(block.last - block.first for block in self._blocks))
        seat = Seat(base, settings, offload, self._n_outputs_max)
        try:
            self._n_vocab, self._base_vocab_bos = seat.model.n_vocab, (seat.model.add_bos, seat.model.bos)
            self._scratch = scratch_array(folder, (len(chunks), settings.n_ctx - 1 - settings.n_ctx // 2, self._n_vocab))
            for i, chunk in enumerate(chunks):
                for block, logits in _decode_chunk(seat, self._blocks, self._chunk_tokens(chunk)):
                    self._scratch[i, self._rows_of(block)] = logits
        finally:
            seat.close()
        self._scorer = Scorer()

    def score_tier(self, path: Path, settings: ContextSettings | None = None) -> Iterator[ChunkRows]:
        """One tier's rows of every chunk of the panel; in other settings than base's, if there are any."""
        seat = Seat(path, settings or self._settings, self._offload, self._n_outputs_max)
        try:
            if (seat.model.n_vocab, seat.model.add_bos, seat.model.bos) != (self._n_vocab, *self._base_vocab_bos):
                raise InputError(_vocabulary_message(self._n_vocab, seat.model))
            for i, chunk in enumerate(self._chunks):
                tokens = self._chunk_tokens(chunk)
                out = (empty_rows(tokens, chunk),)
                for block, logits in _decode_chunk(seat, self._blocks, tokens):
                    fill_rows(self._scorer, out, block, self._scratch[i, self._rows_of(block)], [logits])
                check_finite(out, [path])
                yield ChunkRows(chunk, out)
        finally:
            seat.close()

    def _chunk_tokens(self, chunk: int) -> Tokens:
        return self._tokens[chunk * self._settings.n_ctx:(chunk + 1) * self._settings.n_ctx]

    def _rows_of(self, block: Block) -> slice:
        first = self._settings.n_ctx // 2
        return slice(block.first - first, block.last - first)

    def close(self) -> None:
        """Give the scratch space back."""
        del self._scratch


def _decode_chunk(seat: Seat, blocks: list[Block], tokens: Tokens) -> Iterator[tuple[Block, Logits]]:
    for block in blocks:
        logits = seat.decode(tokens, block)
        if block.last > block.first:
            yield block, logits


def scratch_array(folder: Path, shape: tuple[int, ...]) -> Logits:
    """Float32 rows on disk, in an unlinked file: nothing can be left behind."""
    path = temp_path(folder / "base-rows")
    with path.open("w+b") as file:
        path.unlink()
        size = int(np.prod(shape, dtype=np.int64)) * 4
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here, not as a bus error later
        return np.memmap(file, np.float32, "r+", shape=shape)


def empty_rows(tokens: Tokens, chunk: int) -> Rows:
    """The rows of a chunk with its tokens, before anything is scored."""
    first, last = len(tokens) // 2, len(tokens) - 1
    rows = np.zeros(last - first, ROW_DTYPE)
    rows["chunk"], rows["article"] = chunk, -1
    rows["pos"] = np.arange(first, last)
    rows["token"] = tokens[first + 1:]
    return rows


def fill_rows(scorer: Scorer, out: Sequence[Rows], block: Block, base: Logits, tiers: Sequence[Logits]) -> None:
    """Write the scores of a block's rows into their places; `out` holds the rows of one chunk for each tier."""
    first = int(out[0]["pos"][0])
    part = slice(block.first - first, block.last - first)
    scores = scorer.score(base, out[0]["token"][part], tiers)
    for rows, tier in zip(out, scores.tiers, strict=True):
        rows["nll_base"][part], rows["nll_q"][part], rows["kld"][part] = scores.base.nll, tier.nll, tier.kld
        rows["entropy_base"][part], rows["margin_base"][part] = scores.base.entropy, scores.base.margin
        rows["top1_base"][part], rows["top1_q"][part] = scores.base.top1, tier.top1


def check_finite(tiers: Sequence[Rows], paths: Sequence[Path]) -> None:
    """Raises EngineError at the first row that is not finite; names the file, the chunk and the position."""
    """Refuse rows that are not finite.

    Raises:
        EngineError: names the first one's file, chunk and position.
    """
    for rows, path in zip(tiers, paths, strict=True):
        bad = ~(np.isfinite(rows["nll_base"]) & np.isfinite(rows["nll_q"]) & np.isfinite(rows["kld"]))
        if bad.any():
            row = rows[np.flatnonzero(bad)[0]]
            who = path.name if np.isfinite(row["nll_base"]) else "the base"
            raise EngineError(f"expected finite logits, got a row that is not: {who}, chunk {row['chunk']}, position {row['pos']}; "
                              "make the file again")


def check_vocabulary(base: Model, tier: Model) -> None:
    """Raises InputError where a tier has another vocabulary than base."""
    if (base.n_vocab, base.add_bos, base.bos) != (tier.n_vocab, tier.add_bos, tier.bos):
        raise InputError(_vocabulary_message(base.n_vocab, tier))


def _vocabulary_message(n_vocab: int, tier: Model) -> str:
    return (f"{tier.path.name} is not a tier of this base: expected the base's vocabulary ({n_vocab} tokens), found "
            f"{tier.n_vocab} tokens or another BOS rule; audit it against its own base")


# Commands.


def read_build(state: WorkerState, *, n_gpu_layers: int) -> BuildFacts:
    """Command: facts of this build."""
    return build_facts(load_library(), n_gpu_layers)


def tokenize(state: WorkerState, *, path: Path, text: bytes, chat: bool = False) -> Tokenized:
    """Command: a whole text once, with the vocabulary alone.

    Args:
        chat: the text was written by a chat template: special tokens in it are read as such, and none are added.
    """
    model = Model(path, vocab_only=True)
    try:
        ids = model.tokenize(text, add_special=False, parse_special=True) if chat else model.tokenize(text)
        return Tokenized(ids, model.token_ends(ids, special=chat), model.n_vocab, model.add_bos, model.pieces(ids))
    finally:
        model.close()


def open_audit(state: WorkerState, **arguments: Any) -> list[BufferSize]:
    """Command: load a group (arguments of AuditSession); returns what the library says it allocated."""
    tap.forget()
    state.open(lambda: AuditSession(**arguments))
    return list(tap.buffers)


def score(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[ChunkRows]:
    """Command: the rows of some chunks, one item each."""
    assert isinstance(state.session, AuditSession)
    for chunk in chunks:
        yield state.session.score(chunk)


def open_panel(state: WorkerState, **arguments: Any) -> None:
    """Command: run base over a panel of chunks (arguments of PanelSession)."""
    state.open(lambda: PanelSession(**arguments))


def score_panel(state: WorkerState, *, path: Path, settings: ContextSettings | None = None) -> Iterator[ChunkRows]:
    """Command: the rows of one tier over the panel, one item a chunk."""
    assert isinstance(state.session, PanelSession)
    return state.session.score_tier(path, settings)


def close_group(state: WorkerState) -> None:
    """Command: free the group's models, or the panel's scratch space."""
    state.close()
