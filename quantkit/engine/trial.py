"""Trials: models composed of one-tensor files, scored beside base over one set of chunks. Worker processes only.

A model is a first file (metadata and whatever no trial changes) and one file for each group of tensors that a plan decides on;
`llama_model_load_from_splits` takes any such list. A trial swaps some of the group files, so that trying a type for one tensor
reads that tensor anew and maps the rest. Logits are bit-equal to those of one file with the same tensors.

Base is decoded once: its scored logits stay in an unlinked scratch file, and every batch of trials is scored against them in
lockstep. Where there is a reference pack of the text, base is not decoded at all, and KLD is the pack's lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from quantkit.engine.lockstep import (
    Block,
    Rows,
    Seat,
    blocks_of,
    check_finite,
    check_vocabulary,
    empty_rows,
    fill_rows,
    scratch_array,
)
from quantkit.engine.model import Logits, Model, Tokens
from quantkit.engine.refpack import PackedReference
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.scoring import Scorer


class Trial(NamedTuple):
    """A composed model: a key that the caller knows it by, and its files in order."""

    key: str
    files: tuple[Path, ...]


class TrialRows(NamedTuple):
    """The rows of a trial over all chunks, in the chunks' order (`article` is left at -1)."""

    key: str
    rows: Rows


class _Walk:
    """The blocks of chunks of one text, and the models that decode them."""

    def __init__(self, settings: ContextSettings, offload: Offload, tokens: Tokens) -> None:
        self._settings, self._offload, self._tokens = settings, offload, tokens
        self._blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
        self._n_outputs_max = max(1, max(block.last - block.first for block in self._blocks))
        self.n_scored = settings.n_ctx - 1 - settings.n_ctx // 2

    def seat(self, files: Sequence[Path]) -> Seat:
        """An open model, of one file or composed."""
        return Seat(files[0], self._settings, self._offload, self._n_outputs_max, files if len(files) > 1 else ())

    def tokens(self, chunk: int) -> Tokens:
        """A chunk's tokens."""
        return self._tokens[chunk * self._settings.n_ctx:(chunk + 1) * self._settings.n_ctx]

    def place(self, block: Block) -> slice:
        """The rows of a chunk that a block scores."""
        first = self._settings.n_ctx // 2
        return slice(block.first - first, block.last - first)

    def decode(self, chunk: int, seats: Sequence[Seat]) -> Iterator[tuple[Block, list[Logits]]]:
        """All models over the blocks of a chunk that have scored rows."""
        tokens = self.tokens(chunk)
        for block in self._blocks:
            logits = [seat.decode(tokens, block) for seat in seats]
            if block.last > block.first:
                yield block, logits


class _Reference(Protocol):
    """What trials are held against."""

    def check(self, model: Model) -> None:
        """Refuse a model of another vocabulary."""

    def open_chunk(self, chunk: int, rows: Sequence[Rows]) -> None:
        """Begin a chunk: the rows of all trials, with their tokens."""

    def fill(self, scorer: Scorer, rows: Sequence[Rows], block: Block, logits: Sequence[Logits]) -> None:
        """The columns of one block, of all trials."""

    def close(self) -> None:
        """Free what is held."""


class BaseReference:
    """Base's scored logits of some chunks, decoded once, in a scratch file.

    Args:
        folder: where the scratch file is made.
    """

    def __init__(self, base: Path, walk: _Walk, chunks: tuple[int, ...], folder: Path) -> None:
        self._chunks, self._walk = chunks, walk
        self._base = walk.seat((base,))
        self._at = 0
        self._scratch = scratch_array(folder, (len(chunks), walk.n_scored, self._base.model.n_vocab))
        for i, chunk in enumerate(chunks):
            for block, logits in walk.decode(chunk, [self._base]):
                self._scratch[i, walk.place(block)] = logits[0]

    def check(self, model: Model) -> None:
        """Refuse a model of another vocabulary."""
        check_vocabulary(self._base.model, model)

    def open_chunk(self, chunk: int, rows: Sequence[Rows]) -> None:
        """Begin a chunk."""
        self._at = self._chunks.index(chunk)

    def fill(self, scorer: Scorer, rows: Sequence[Rows], block: Block, logits: Sequence[Logits]) -> None:
        """The columns of one block, of all trials."""
        fill_rows(scorer, rows, block, self._scratch[self._at, self._walk.place(block)], logits)

    def close(self) -> None:
        """Free base and give the scratch space back."""
        self._base.close()
        del self._scratch


class PackReference:
    """A reference pack in base's place.

    Raises:
        InputError: the pack is damaged.
    """

    def __init__(self, pack: Path) -> None:
        self._packed = PackedReference(pack)

    def check(self, model: Model) -> None:
        """Refuse a model of another vocabulary."""
        self._packed.check(model)

    def open_chunk(self, chunk: int, rows: Sequence[Rows]) -> None:
        """Begin a chunk."""
        self._packed.open_chunk(chunk, rows)

    def fill(self, scorer: Scorer, rows: Sequence[Rows], block: Block, logits: Sequence[Logits]) -> None:
        """The columns of one block, of all trials."""
        for own, values in zip(rows, logits, strict=True):
            self._packed.fill(scorer, own, block, values)

    def close(self) -> None:
        """Nothing is held open."""


class TrialSession:
    """The loop that holds trials against base, or against a reference pack, over some chunks.

    Args:
        base: the base's file; with a pack it is not opened.
        chunks: numbers of the chunks, in the order of the scores.
        folder: where the scratch file is made.
        pack: a reference pack that holds these chunks.
    """

    def __init__(self, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens, chunks: tuple[int, ...],
                 folder: Path, pack: Path | None = None) -> None:
        self._walk, self._chunks = _Walk(settings, offload, tokens), chunks
        self._scorer = Scorer()
        self._reference: _Reference
        self._reference = BaseReference(base, self._walk, chunks, folder) if pack is None else PackReference(pack)

    def measure(self, trials: Sequence[Trial]) -> Iterator[TrialRows]:
        """The rows of some trials, loaded together and scored in lockstep.

        Raises:
            InputError: the pack's rows of a chunk are damaged.
            EngineError: the library refused a composition, or a row is not finite; names the trial, the chunk and the position.
        """
        seats: list[Seat] = []
        try:
            for trial in trials:
                seats.append(self._walk.seat(trial.files))
                self._reference.check(seats[-1].model)
            out: list[list[Rows]] = [[] for _ in trials]
            for chunk in self._chunks:
                rows = [empty_rows(self._walk.tokens(chunk), chunk) for _ in trials]
                self._reference.open_chunk(chunk, rows)
                for block, logits in self._walk.decode(chunk, seats):
                    self._reference.fill(self._scorer, rows, block, logits)
                check_finite(rows, [Path(trial.key) for trial in trials])
                for own, new in zip(out, rows, strict=True):
                    own.append(new)
        finally:
            for seat in seats:
                seat.close()
        for trial, own in zip(trials, out, strict=True):
            yield TrialRows(trial.key, np.concatenate(own))

    def close(self) -> None:
        """Free what base or the pack holds."""
        self._reference.close()


# Commands.


def open_trials(state: WorkerState, *, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens,
                chunks: tuple[int, ...], folder: Path, pack: Path | None = None) -> None:
    """Command: decode base over the chunks, or open its reference pack (arguments of TrialSession)."""
    state.open(lambda: TrialSession(base, settings, offload, tokens, chunks, folder, pack))


def measure_trials(state: WorkerState, *, trials: tuple[Trial, ...]) -> Iterator[TrialRows]:
    """Command: one item for each trial."""
    assert isinstance(state.session, TrialSession)
    return state.session.measure(trials)
