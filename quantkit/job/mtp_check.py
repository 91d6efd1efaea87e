"""The check of an MTP head: is it alive, is the text still the trunk's own, how much is accepted, what does it cost or gain.

Counts and tokens go to RUN/mtp/<tier>.json, times to parts/speed/<tier>.json, from which a report is made. A tier without a head
gets both: "not applicable", and the trunk's own speed. A check that stands for the same inputs is not made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import CheckFailed, InputError
from quantkit.core.files import sha256_json
from quantkit.engine.draft_session import MORE_ROWS, ChunkChoices, detokenize, follow_chunks, open_teacher
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import Tokenized, close_group, read_build, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import Subject, choose_offload, context_settings
from quantkit.job.memory import free_memory_bytes
from quantkit.job.mtp_prompts import Prompt, choose_prompts
from quantkit.job.mtp_result import Measured, not_applicable, result_of, speed_of
from quantkit.job.mtp_runs import ArmFiles, Arms, Runs, find_forks, open_arms, run_greedy, run_sampled
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.acceptance import count_acceptance
from quantkit.measure.articles import assign_chunks, chunk_indices, find_articles
from quantkit.measure.repetition import is_degenerate
from quantkit.measure.teacher import teacher_forced
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.model import ModelInfo, require_consistent
from quantkit.spec.mtp_records import Acceptance, MtpResult, TeacherForced
from quantkit.spec.mtp_support import cannot_draft
from quantkit.spec.protocol import MtpSpec, Protocol
from quantkit.spec.speed_records import SpeedResult

CHECK_VERSION = 1  # raised when the meaning of a number changes
MATRIX = "matrix/"
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is checked: a trunk (a tier, named), the head to draft with, and the base whose own head is the measure.

    `name` is what the records are called, the tier's name. `head` is the trunk's own file, another file, or None; `base` None
    leaves the comparison out.
    """

    name: str
    trunk: Subject
    head: Subject | None
    base: Subject | None

    @classmethod
    def of(cls, trunk: Subject, head: Subject | None = None, base: Subject | None = None, *, name: str = "") -> Candidate:
        """With the head inside the trunk's file where none is given.

        Raises:
            InputError: the head is of another model. GgufError: count key, block count and tensors disagree.
        """
        require_consistent(trunk.model)
        if head is not None:
            require_consistent(head.model)
            _check_partners(trunk.model, head.model)
            if not head.model.n_nextn:
                raise InputError(f"expected an MTP head, found no NextN block in {head.path}: give the head's file")
        return cls(name=name or trunk.name, trunk=trunk, head=head or (trunk if trunk.model.n_nextn else None), base=base)

    @property
    def reference(self) -> Subject | None:
        """The base, where its head is another than the one that is checked."""
        if self.head is None or self.base is None or not self.base.model.n_nextn or self.base.sha256 == self.head.sha256:
            return None
        return self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpOptions:
    """What may differ from run to run without moving a count."""

    offload: Offload = field(default_factory=Offload)
    memory_bytes: int | None = None


def mtp_path(run: RunFolder, tier: str) -> Path:
    """Where a tier's check stands; that of a cell of the matrix, whose name begins with MATRIX, in a folder of its own."""
    step, name = _place("mtp", tier)
    return run.path / step / run.record(step, name).name


def speed_path(run: RunFolder, tier: str) -> Path:
    """Where its times stand."""
    return run.record(*_place("speed", tier))


def _place(step: str, tier: str) -> tuple[str, str]:
    return (f"{step}/{MATRIX[:-1]}", tier[len(MATRIX):]) if tier.startswith(MATRIX) else (step, tier)


def check_mtp(run: RunFolder, protocol: Protocol, candidate: Candidate, text: bytes, progress: Progress,
              options: MtpOptions = MtpOptions()) -> MtpResult:
    """Check one tier, or find it checked.

    Args:
        text: the bytes of the protocol's `mtp.corpus`.

    Returns:
        The result; its `problems` say why the check failed, if it did.

    Raises:
        InputError: the text is too short, or a prompt does not fit.
        EngineError, EngineCrash: the library failed, or the trunk cannot be rolled back.
    """
    tier = candidate.name
    options = dataclasses.replace(options, offload=choose_offload(protocol, options.offload))
    with _pools(run) as (plain, drafting):
        build: BuildFacts = plain.call("build", read_build, n_gpu_layers=options.offload.n_gpu_layers)
        check_id = _check_id(protocol, candidate, build, options)
        if (held := read_check(run, tier, check_id)) is not None:
            progress.note(f"mtp {tier}: checked already")
            return held
        check = _Check(run, protocol, candidate, text, progress, options, build, plain, drafting)
        reason = "no MTP head" if candidate.head is None else cannot_draft(candidate.head.model)
        measured = check.measure(with_head=reason is None)
    spec, ids = protocol.mtp, {"check_id": check_id, "mtp_id": protocol.mtp_id}
    result = result_of(measured, spec, **ids) if reason is None else not_applicable(measured, spec, reason, **ids)
    speed = speed_of(measured, spec, check_id=check_id)
    write_json(speed_path(run, tier), record_to_json(speed))
    write_json(mtp_path(run, tier), record_to_json(result))
    return result


def read_check(run: RunFolder, tier: str, check_id: str) -> MtpResult | None:
    """A tier's check where it stands, with its times, for these inputs; None where it must be made."""
    try:
        result = record_from_json(MtpResult, read_json(mtp_path(run, tier)))
        speed = record_from_json(SpeedResult, read_json(speed_path(run, tier)))
    except (KeyError, TypeError):
        return None
    return result if result.check_id == speed.check_id == check_id else None


def require_passed(result: MtpResult) -> None:
    """Turn a failed check into an error.

    Raises:
        CheckFailed: names every problem.
    """
    if result.problems:
        raise CheckFailed(f"the MTP check of {result.tier} failed: {'; '.join(result.problems)}: make the head again, or "
                          "publish without it")


@contextlib.contextmanager
def _pools(run: RunFolder) -> Iterator[tuple[WorkerPool, WorkerPool]]:
    """A process for each way of decoding: the peak memory of one is not the other's."""
    with WorkerPool(1, run.logs) as plain, WorkerPool(1, run.logs) as drafting:
        yield plain, drafting


def _check_id(protocol: Protocol, candidate: Candidate, build: BuildFacts, options: MtpOptions) -> str:
    """Of everything that a count depends on."""
    files = {name: subject.sha256 if subject else None for name, subject in (
        ("trunk", candidate.trunk), ("head", candidate.head), ("reference", candidate.reference))}
    return sha256_json({"check": CHECK_VERSION, "mtp_id": protocol.mtp_id, "tier": candidate.name, **files,
                        "build": dataclasses.asdict(build), "offload": dataclasses.asdict(options.offload)})


class _Followed(NamedTuple):
    """Chunks of the text and the article of each."""

    chunks: npt.NDArray[np.int64]
    articles: npt.NDArray[np.int32]


class _Check:
    """One check under way."""

    def __init__(self, run: RunFolder, protocol: Protocol, candidate: Candidate, text: bytes, progress: Progress,
                 options: MtpOptions, build: BuildFacts, plain: WorkerPool, drafting: WorkerPool) -> None:
        self._spec: MtpSpec = protocol.mtp
        self._corpus = protocol.corpus(protocol.mtp.corpus)
        self._candidate, self._text, self._progress, self._options, self._build = candidate, text, progress, options, build
        self._plain, self._drafting = plain, drafting
        self._settings = context_settings(protocol.mtp)
        self._step = f"mtp {candidate.name}"

    def measure(self, *, with_head: bool) -> Measured:
        """All runs; without a head only those of the trunk alone."""
        spec, candidate = self._spec, self._candidate
        if (longest := max(spec.n_draft) + 1 + MORE_ROWS) > spec.n_ubatch:
            raise InputError(f"expected mtp.n_ubatch of at least {longest}, for drafts of {max(spec.n_draft)}, got "
                             f"{spec.n_ubatch}: a draft is verified in one micro-batch; raise it, or draft fewer")
        trunk, head = candidate.trunk, candidate.head if with_head else None
        seen: Tokenized = self._plain.call(self._step, tokenize, path=trunk.path, text=self._text)
        prompts = choose_prompts(self._plain, spec, trunk, seen.ids, add_bos=seen.add_bos)
        drafts = spec.n_draft if head else ()
        followed = self._followed(seen) if head else _Followed(np.zeros(0, np.int64), np.zeros(0, np.int32))
        self._progress.start(self._step, self._n_runs(len(prompts), len(drafts)) + len(followed.chunks))
        together = self._fit_together(trunk.model, head.model if head else None)
        arms = self._arms(head, prompts, together=together)
        greedy = run_greedy(arms, prompts, spec, head is not None, self._progress)
        sampled = run_sampled(arms, prompts, spec, drafts, self._progress, together=together)
        forks = tuple(fork for runs in (greedy, sampled) for fork in find_forks(arms, runs, prompts, spec))
        voided = self._voided(sampled)
        measured = Measured(
            name=candidate.name, trunk=trunk, head=head, reference=candidate.reference, base=candidate.base, build=self._build,
            offload=self._options.offload, settings=self._settings, prompts=prompts, greedy=greedy, sampled=sampled, forks=forks,
            voided=voided, rollback=arms.rollback, plain_peak_bytes=arms.peak_memory_bytes(drafting=False),
            draft_peak_bytes=arms.peak_memory_bytes(drafting=True) if head else None,
            texts=self._texts(greedy, sampled, prompts))
        if head is not None:
            kept = [prompt for prompt in prompts if prompt.index not in voided]
            measured.without_prompt = self._accept(arms, kept, prompt_to_head=False)
            arms.close()
            measured.teacher = self._teacher(seen, followed, [head, *filter(None, [candidate.reference])])
            if candidate.reference is not None:
                reference = self._arms(candidate.reference, prompts, together=together, n_warmup=0)
                measured.reference_acceptance = self._accept(reference, kept)
                reference.close()
        arms.close()
        self._progress.finish()
        return measured

    def _arms(self, head: Subject | None, prompts: Sequence[Prompt], *, together: bool, n_warmup: int | None = None) -> Arms:
        files = ArmFiles(name=self._candidate.name, trunk=self._candidate.trunk.path, head=head.path if head else None,
                         settings=self._settings, offload=self._options.offload, n_draft_max=max(self._spec.n_draft))
        return open_arms(files, self._spec, prompts[0], self._plain, self._drafting, together=together, n_warmup=n_warmup)

    def _accept(self, arms: Arms, prompts: Sequence[Prompt], *, prompt_to_head: bool = True) -> Acceptance:
        """Sampled runs with the longest draft, once, for their counts alone."""
        spec, n_draft, texts = self._spec, max(self._spec.n_draft), []
        for prompt in prompts:
            texts.append(arms.run(prompt, spec.n_predict, n_draft, prompt.sampler(spec), prompt_to_head=prompt_to_head).steps)
            self._progress.advance()
        return count_acceptance(texts, n_draft)

    def _followed(self, seen: Tokenized) -> _Followed:
        """The chunks that heads are led through, and their articles."""
        spec = self._spec
        chunks = chunk_indices(spec.teacher_chunks, spec.teacher_n_chunk, len(seen.ids) // spec.n_ctx)
        starts = find_articles(self._text, self._corpus.documents)
        return _Followed(chunks, assign_chunks(starts, seen.ends, spec.n_ctx, chunks))

    def _teacher(self, seen: Tokenized, followed: _Followed, heads: Sequence[Subject]) -> list[TeacherForced]:
        """Teacher-forced acceptance of some heads over the same positions."""
        self._drafting.call(self._step, open_teacher, trunk=self._candidate.trunk.path, heads=[head.path for head in heads],
                            settings=self._settings, offload=self._options.offload, tokens=seen.ids)
        items: list[ChunkChoices] = []

        def take(item: ChunkChoices) -> None:
            items.append(item)
            self._progress.advance()

        self._drafting.call(self._step, follow_chunks, on_item=take, chunks=tuple(followed.chunks.tolist()))
        self._drafting.call(self._step, close_group)
        width = self._spec.n_ctx - 1
        trunk = np.concatenate([item.trunk for item in items])
        return [teacher_forced(trunk, np.concatenate([item.heads[i] for item in items]), np.repeat(followed.chunks, width),
                               np.repeat(followed.articles, width)) for i in range(len(heads))]

    def _n_runs(self, n_prompt: int, n_drafts: int) -> int:
        """Runs ahead: greedy twice each way, sampled by repeats, and once each without the prompt and with the reference."""
        once = (1 + (self._candidate.reference is not None)) if n_drafts else 0
        return n_prompt * ((4 if n_drafts else 2) + (1 + n_drafts) * self._spec.repeats + once)

    def _voided(self, sampled: Runs) -> frozenset[int]:
        """Prompts after which any arm's sampled text repeats itself."""
        spec = self._spec
        return frozenset(prompt for n_draft, prompt in sampled.found
                         if is_degenerate(sampled.tokens(n_draft, prompt), spec.repeat_ngram, spec.max_repeat_share))

    def _texts(self, greedy: Runs, sampled: Runs, prompts: Sequence[Prompt]) -> list[str]:
        """Prompt, greedy text and sampled text of each prompt, in that order."""
        ids = tuple(tokens for p in prompts for tokens in (
            tuple(p.tokens.tolist()), greedy.tokens(0, p.index), sampled.tokens(0, p.index)))
        found: list[str] = self._plain.call(self._step, detokenize, path=self._candidate.trunk.path, texts=ids)
        return found

    def _fit_together(self, trunk: ModelInfo, head: ModelInfo | None) -> bool:
        """Whether both processes fit: the files are mapped once, weights repacked for the CPU are copied in each."""
        mapped = trunk.header.file_bytes + (head.header.file_bytes if head is not None and head is not trunk else 0)
        copied = sum(t.size_bytes for t in trunk.header.tensors if t.type.is_quantized) if self._settings.use_extra_bufts else 0
        free = self._options.memory_bytes or int(_SHARE_OF_FREE * free_memory_bytes())
        if mapped + 2 * copied <= free:
            return True
        self._progress.note(f"{self._step}: the two ways do not fit in memory together; the model is loaded anew for each")
        return False


def _check_partners(trunk: ModelInfo, head: ModelInfo) -> None:
    for what, expected, found in (("architecture", trunk.architecture, head.architecture), ("n_embd", trunk.n_embd, head.n_embd),
                                  ("vocabulary size", trunk.n_vocab, head.n_vocab)):
        if expected != found:
            raise InputError(f"{head.header.path} is no head for {trunk.header.path}: expected {what} {expected}, "
                             f"found {found}; give the head of this trunk")
