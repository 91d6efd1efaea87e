"""Trials: models composed of one-tensor files, scored beside base over one set of chunks. Worker processes only.

A model is a first file (metadata and whatever no trial changes) and one file for each group of tensors that a plan decides on;
`llama_model_load_from_splits` takes any such list. A trial swaps some of the group files, so that trying a type for one tensor
reads that tensor anew and maps the rest. Logits are bit-equal to those of one file with the same tensors.

Base is decoded once: its scored logits stay in an unlinked scratch file, and every batch of trials is scored against them in
lockstep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
from quantkit.engine.model import Logits, Tokens
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


class TrialSession:
    """Base's scored logits of some chunks, and the loop that holds trials against them.

    Args:
        base: the base's file.
        chunks: numbers of the chunks, in the order of the scores.
        folder: where the scratch file is made.
    """

    def __init__(self, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens, chunks: tuple[int, ...],
                 folder: Path) -> None:
        self._settings, self._offload, self._tokens, self._chunks = settings, offload, tokens, chunks
        self._blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
        self._n_outputs_max = max(1, max(block.last - block.first for block in self._blocks))
        self._scorer = Scorer()
        self._base = self._seat((base,))
        n_scored = settings.n_ctx - 1 - settings.n_ctx // 2
        self._scratch = scratch_array(folder, (len(chunks), n_scored, self._base.model.n_vocab))
        for i, chunk in enumerate(chunks):
            for block, logits in self._decode(chunk, [self._base]):
                self._scratch[i, self._place(block)] = logits[0]

    def measure(self, trials: Sequence[Trial]) -> Iterator[TrialRows]:
        """The rows of some trials, loaded together and scored in lockstep.

        Raises:
            EngineError: the library refused a composition, or a row is not finite; names the trial, the chunk and the position.
        """
        seats: list[Seat] = []
        try:
            for trial in trials:
                seats.append(self._seat(trial.files))
                check_vocabulary(self._base.model, seats[-1].model)
            out: list[list[Rows]] = [[] for _ in trials]
            for i, chunk in enumerate(self._chunks):
                rows = [empty_rows(self._tokens_of(chunk), chunk) for _ in trials]
                for block, logits in self._decode(chunk, seats):
                    fill_rows(self._scorer, rows, block, self._scratch[i, self._place(block)], logits)
                check_finite(rows, [Path(trial.key) for trial in trials])
                for own, new in zip(out, rows, strict=True):
                    own.append(new)
        finally:
            for seat in seats:
                seat.close()
        for trial, own in zip(trials, out, strict=True):
            yield TrialRows(trial.key, np.concatenate(own))

    def close(self) -> None:
        """Free base and give the scratch space back."""
        self._base.close()
        del self._scratch

    def _seat(self, files: Sequence[Path]) -> Seat:
        return Seat(files[0], self._settings, self._offload, self._n_outputs_max, files if len(files) > 1 else ())

    def _tokens_of(self, chunk: int) -> Tokens:
        return self._tokens[chunk * self._settings.n_ctx:(chunk + 1) * self._settings.n_ctx]

    def _place(self, block: Block) -> slice:
        first = self._settings.n_ctx // 2
        return slice(block.first - first, block.last - first)

    def _decode(self, chunk: int, seats: Sequence[Seat]) -> Iterator[tuple[Block, list[Logits]]]:
        tokens = self._tokens_of(chunk)
        for block in self._blocks:
            logits = [seat.decode(tokens, block) for seat in seats]
            if block.last > block.first:
                yield block, logits


# Commands.


def open_trials(state: WorkerState, *, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens,
                chunks: tuple[int, ...], folder: Path) -> None:
    """Command: decode base over the chunks (arguments of TrialSession)."""
    state.open(lambda: TrialSession(base, settings, offload, tokens, chunks, folder))


def measure_trials(state: WorkerState, *, trials: tuple[Trial, ...]) -> Iterator[TrialRows]:
    """Command: one item for each trial."""
    assert isinstance(state.session, TrialSession)
    return state.session.measure(trials)
