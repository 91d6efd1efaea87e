"""The runs of an MTP check: the trunk alone and the trunk with a head, in processes of their own, one at a time.

An arm is a draft length; arm 0 is the trunk alone. Sampled runs are repeated, and their order turns around from prompt to prompt
and from repeat to repeat, so that a machine that warms up or slows down does both ways the same harm. Warm-up runs are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.engine.draft import Generation
from quantkit.engine.draft_session import MORE_ROWS, block_rows, generate, open_draft, open_plain, peak_memory
from quantkit.engine.lockstep import close_group
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.answers import check_generation
from quantkit.job.mtp_prompts import Prompt
from quantkit.job.progress import Progress
from quantkit.measure.acceptance import VerifyStep
from quantkit.measure.fork import first_fork, judge_fork, row_difference
from quantkit.measure.sampling import Sampler, choice_margin, choose
from quantkit.spec.mtp_records import ForkRecord, Mode, Rollback
from quantkit.spec.protocol import MtpSpec

_N_WATCHED = 32  # rows of a text from which the effect of batch shapes is known


class Turn(NamedTuple):
    """One run of the sampled schedule."""

    repeat: int
    prompt: int
    n_draft: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFiles:
    """What the two processes open. `head` is None for a trunk without one; it may be the trunk's own file."""

    name: str
    trunk: Path
    head: Path | None
    settings: ContextSettings
    offload: Offload
    n_draft_max: int


class Arms:
    """Two worker processes, the trunk's and the drafting one, opened when they are first used and warmed up each time.

    Args:
        together: whether both fit in memory at once; else one is closed before the other opens.
        warm_up: arguments of `generate` for a run that is dropped, and how often.
    """

    def __init__(self, files: ArmFiles, plain: WorkerPool, drafting: WorkerPool, *, together: bool,
                 warm_up: Mapping[str, Any], n_warmup: int) -> None:
        self._files, self._pools, self._together = files, {False: plain, True: drafting}, together
        self._warm_up, self._n_warmup = warm_up, n_warmup
        self._open: set[bool] = set()
        self.rollback: Rollback | None = None

    def run(self, prompt: Prompt, n_predict: int, n_draft: int, sampler: Sampler | None, *, watch: tuple[int, ...] = (),
            prompt_to_head: bool = True) -> Generation:
        """One run of one prompt; n_draft 0 is the trunk alone."""
        step = self._step(n_draft > 0)
        found: Generation = self._ready(n_draft > 0).call(
            step, generate, prompt=prompt.tokens, n_predict=n_predict, n_draft=n_draft, sampler=sampler, watch=watch,
            prompt_to_head=prompt_to_head)
        check_generation(step, found, n_predict, n_draft)
        return found

    def block_rows(self, prompt: Prompt, tokens: tuple[int, ...], n_block: int,
                   watch: tuple[int, ...]) -> dict[int, npt.NDArray[np.float32]]:
        """Rows of a given text, decoded in blocks by the drafting process."""
        found: dict[int, npt.NDArray[np.float32]] = self._ready(True).call(
            self._step(True), block_rows, prompt=prompt.tokens, tokens=tokens, n_block=n_block, watch=watch)
        return found

    def peak_memory_bytes(self, *, drafting: bool) -> int:
        """The most memory that one of the processes has held."""
        return int(self._pools[drafting].call(self._step(drafting), peak_memory))

    def close(self) -> None:
        """Free both sessions' models."""
        for drafting in sorted(self._open):
            self._pools[drafting].call(self._step(drafting), close_group)
        self._open.clear()

    def _step(self, drafting: bool) -> str:
        return f"mtp {self._files.name} {'draft' if drafting else 'plain'}"

    def _ready(self, drafting: bool) -> WorkerPool:
        pool, files = self._pools[drafting], self._files
        if drafting in self._open:
            return pool
        if not self._together:
            self.close()
        if drafting:
            self.rollback = pool.call(self._step(True), open_draft, trunk=files.trunk, head=files.head, settings=files.settings,
                                      offload=files.offload, n_draft=files.n_draft_max)
        else:
            pool.call(self._step(False), open_plain, trunk=files.trunk, settings=files.settings, offload=files.offload)
        self._open.add(drafting)
        for _ in range(self._n_warmup):
            pool.call(self._step(drafting), generate, n_draft=files.n_draft_max if drafting else 0, **self._warm_up)
        return pool


def open_arms(files: ArmFiles, spec: MtpSpec, first: Prompt, plain: WorkerPool, drafting: WorkerPool, *, together: bool = True,
              n_warmup: int | None = None) -> Arms:
    """The two ways of some files, warmed up by the first prompt as often as the protocol says, or `n_warmup` times."""
    warm_up = {"prompt": first.tokens, "n_predict": spec.n_predict, "sampler": first.sampler(spec)}
    return Arms(files, plain, drafting, together=together, warm_up=warm_up,
                n_warmup=spec.n_warmup if n_warmup is None else n_warmup)


def schedule(n_prompt: int, arms: Sequence[int], repeats: int, *, together: bool) -> Iterator[Turn]:
    """Every arm of every prompt in every repeat, the order of the arms turned around every other time.

    Args:
        together: False keeps each process's runs of a repeat together, so that its model is loaded once a repeat.
    """
    for repeat in range(repeats):
        groups = [list(arms)] if together else [[arm for arm in arms if (arm > 0) == drafting] for drafting in (False, True)]
        for group in groups if repeat % 2 == 0 else reversed(groups):
            for prompt in range(n_prompt):
                for arm in group if (repeat + prompt) % 2 == 0 else reversed(group):
                    yield Turn(repeat, prompt, arm)


@dataclass(frozen=True, slots=True)
class Runs:
    """Generations of one way of choosing tokens: arm and prompt to the runs of its repeats."""

    mode: Mode
    found: dict[tuple[int, int], list[Generation]] = field(default_factory=dict)

    def add(self, n_draft: int, prompt: int, generation: Generation) -> None:
        self.found.setdefault((n_draft, prompt), []).append(generation)

    def tokens(self, n_draft: int, prompt: int) -> tuple[int, ...]:
        return self.found[n_draft, prompt][0].tokens

    def steps(self, n_draft: int, prompt: int) -> tuple[VerifyStep, ...]:
        return self.found[n_draft, prompt][0].steps

    def arms(self) -> list[int]:
        return sorted({n_draft for n_draft, _ in self.found})

    def not_repeated(self) -> list[tuple[int, int]]:
        """Arms and prompts whose runs did not all give the same tokens."""
        return [key for key, runs in sorted(self.found.items()) if len({run.tokens for run in runs}) > 1]


def run_greedy(arms: Arms, prompts: Sequence[Prompt], spec: MtpSpec, with_head: bool, progress: Progress) -> Runs:
    """Every prompt greedily, with the longest draft and without, each twice: identity, and nothing else is read from it."""
    runs = Runs("greedy")
    for n_draft in (0, max(spec.n_draft)) if with_head else (0,):
        for prompt in prompts:
            for _ in range(2):
                runs.add(n_draft, prompt.index, arms.run(prompt, spec.n_predict, n_draft, None))
                progress.advance()
    return runs


def run_sampled(arms: Arms, prompts: Sequence[Prompt], spec: MtpSpec, drafts: Sequence[int], progress: Progress, *,
                together: bool) -> Runs:
    """Every prompt with the protocol's sampling, in every arm, repeated and interleaved."""
    runs = Runs("sampled")
    for turn in schedule(len(prompts), [0, *drafts], spec.repeats, together=together):
        prompt = prompts[turn.prompt]
        runs.add(turn.n_draft, prompt.index, arms.run(prompt, spec.n_predict, turn.n_draft, prompt.sampler(spec)))
        progress.advance()
    return runs


def find_forks(arms: Arms, runs: Runs, prompts: Sequence[Prompt], spec: MtpSpec) -> list[ForkRecord]:
    """Each place where a drafted text leaves the plain one, judged; a defect is proof, so nothing is looked at after one."""
    forks = []
    for n_draft in runs.arms():
        for prompt in prompts if n_draft else ():
            fork = first_fork(runs.tokens(0, prompt.index), runs.tokens(n_draft, prompt.index))
            if fork is not None:
                forks.append(_diagnose(arms, runs, prompt, n_draft, spec, fork.position))
                if forks[-1].verdict == "defect":
                    return forks
    return forks


def _diagnose(arms: Arms, runs: Runs, prompt: Prompt, n_draft: int, spec: MtpSpec, at: int) -> ForkRecord:
    """Run both ways again, and the plain text in blocks of several lengths, and compare the rows that chose the tokens."""
    plain, drafted = runs.tokens(0, prompt.index), runs.tokens(n_draft, prompt.index)
    sampler = None if runs.mode == "greedy" else prompt.sampler(spec)
    watch = tuple(sorted({at, *np.linspace(0, len(plain) - 1, _N_WATCHED).astype(int).tolist()}))
    one = arms.run(prompt, spec.n_predict, 0, sampler, watch=watch).rows
    other = arms.run(prompt, spec.n_predict, n_draft, sampler, watch=(at,)).rows
    place = len(prompt.tokens) + at
    record = ForkRecord(
        mode=runs.mode, n_draft=n_draft, prompt=prompt.index, position=at, plain=plain[at] if at < len(plain) else None,
        drafted=drafted[at] if at < len(drafted) else None, margin=choice_margin(one[at], place, sampler) if at in one else None,
        difference=None, shape_difference=None, verdict="defect")
    if at not in one or at not in other:
        return record
    difference = row_difference(one[at], other[at])
    shape_difference = 0.0
    for n_block in range(2, n_draft + 1 + MORE_ROWS + 1):
        blocks = arms.block_rows(prompt, plain, n_block, watch)
        shape_difference = max(shape_difference, *(row_difference(one[i], blocks[i]) for i in watch))
    follows = choose(other[at], place, sampler) == record.drafted
    return dataclasses.replace(record, difference=difference, shape_difference=shape_difference,
                               verdict=judge_fork(difference, shape_difference, follows_own_row=follows))
