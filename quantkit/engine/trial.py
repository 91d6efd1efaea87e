"""Trials: models composed of one-tensor files, scored beside base over one set of chunks. Worker processes only.

A model is a first file (metadata and whatever no trial changes) and one file for each group of tensors that a plan decides on;
`llama_model_load_from_splits` takes any such list. A trial swaps some of the group files, so that trying a type for one tensor
reads that tensor anew and maps the rest. Logits are bit-equal to those of one file with the same tensors.

Base is decoded once: its scored logits stay in an unlinked scratch file, and every batch of trials is scored against them in
lockstep. What leaves the worker is one mean a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.engine.lockstep import Seat, blocks_of, check_vocabulary, scratch_array
from quantkit.engine.model import Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.scoring import Scorer


class Trial(NamedTuple):
    """A composed model: a key that the caller knows it by, and its files in order."""

    key: str
    files: tuple[Path, ...]


class TrialScore(NamedTuple):
    """Means over the scored tokens of each chunk, all chunks equally long: (n_chunk,) float64.

    kld in nats; flips the share of tokens with another top token; nll_difference is nll_q − nll_base in nats.
    """

    key: str
    kld: npt.NDArray[np.float64]
    flips: npt.NDArray[np.float64]
    nll_difference: npt.NDArray[np.float64]


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
        self._first, self._n_scored = settings.n_ctx // 2, settings.n_ctx - 1 - settings.n_ctx // 2
        self._scorer = Scorer()
        self._base = self._seat((base,))
        self._scratch = scratch_array(folder, (len(chunks), self._n_scored, self._base.model.n_vocab))
        for i in range(len(chunks)):
            for rows, logits in self._decode(i, [self._base]):
                self._scratch[i, rows] = logits[0]

    def measure(self, trials: Sequence[Trial]) -> Iterator[TrialScore]:
        """The scores of some trials, loaded together and scored in lockstep.

        Raises:
            EngineError: the library refused a composition, or a row is not finite; names the trial and the chunk.
        """
        seats: list[Seat] = []
        try:
            for trial in trials:
                seats.append(self._seat(trial.files))
                check_vocabulary(self._base.model, seats[-1].model)
            sums = np.zeros((len(trials), 3, len(self._chunks)))
            for i, chunk in enumerate(self._chunks):
                targets = self._targets(chunk)
                for rows, logits in self._decode(i, seats):
                    scores = self._scorer.score(self._scratch[i, rows], targets[rows], logits)
                    for sum_, tier in zip(sums, scores.tiers, strict=True):
                        sum_[:, i] += (tier.kld.sum(), np.count_nonzero(tier.top1 != scores.base.top1),
                                       (tier.nll - scores.base.nll).sum())
                for trial, sum_ in zip(trials, sums, strict=True):
                    if not np.isfinite(sum_[:, i]).all():
                        raise EngineError(f"expected finite logits, got others: trial {trial.key}, chunk {chunk}")
        finally:
            for seat in seats:
                seat.close()
        for trial, sum_ in zip(trials, sums / self._n_scored, strict=True):
            yield TrialScore(trial.key, *sum_)

    def close(self) -> None:
        """Free base and give the scratch space back."""
        self._base.close()
        del self._scratch

    def _seat(self, files: Sequence[Path]) -> Seat:
        return Seat(files[0], self._settings, self._offload, self._n_outputs_max, files if len(files) > 1 else ())

    def _targets(self, chunk: int) -> Tokens:
        start = chunk * self._settings.n_ctx
        return self._tokens[start + self._first + 1:start + self._settings.n_ctx]

    def _decode(self, i: int, seats: Sequence[Seat]) -> Iterator[tuple[slice, list[npt.NDArray[np.float32]]]]:
        start = self._chunks[i] * self._settings.n_ctx
        tokens = self._tokens[start:start + self._settings.n_ctx]
        for block in self._blocks:
            logits = [seat.decode(tokens, block) for seat in seats]
            if block.last > block.first:
                yield slice(block.first - self._first, block.last - self._first), logits


# Commands.


def open_trials(state: WorkerState, *, base: Path, settings: ContextSettings, offload: Offload, tokens: Tokens,
                chunks: tuple[int, ...], folder: Path) -> None:
    """Command: decode base over the chunks (arguments of TrialSession)."""
    state.open(lambda: TrialSession(base, settings, offload, tokens, chunks, folder))


def measure_trials(state: WorkerState, *, trials: tuple[Trial, ...]) -> Iterator[TrialScore]:
    """Command: one item for each trial."""
    assert isinstance(state.session, TrialSession)
    return state.session.measure(trials)
