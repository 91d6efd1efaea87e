"""From the runs of an MTP check to its records: counts into one, times into the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.engine.draft import Generation
from quantkit.engine.library import BuildFacts
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.evaluation import Subject, arithmetic_of, n_cores
from quantkit.job.mtp_prompts import Prompt
from quantkit.job.mtp_runs import Runs
from quantkit.job.tensor_check import read_rows
from quantkit.job.timing import host_facts
from quantkit.measure.acceptance import count_acceptance
from quantkit.measure.repetition import is_degenerate, repeat_share
from quantkit.measure.speed import against_itself, break_even_acceptance, paired_ratio, rate
from quantkit.measure.teacher import dead_reason
from quantkit.spec.model import type_shares
from quantkit.spec.mtp_records import (
    Acceptance,
    ForkRecord,
    GeneratedText,
    HeadFacts,
    Lossless,
    MtpResult,
    PromptRecord,
    ReferenceHead,
    Rollback,
    TeacherForced,
    TensorLoss,
)
from quantkit.spec.protocol import MtpSpec
from quantkit.spec.speed_records import DraftSpeed, Machine, PlainSpeed, SpeedResult

SPEED_FILE = "report/speed.json"

Times = npt.NDArray[np.float64]
_Timed = Sequence[tuple[Prompt, Sequence[Generation]]]
_N_SAMPLED_ROWS = 32


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything that a check found out, before it is put into words and numbers.

    `texts` are prompt, greedy text and sampled text of each prompt; `teacher` is of the head, then of the reference.
    """

    name: str
    trunk: Subject
    head: Subject | None
    reference: Subject | None
    base: Subject | None
    build: BuildFacts
    offload: Offload
    settings: ContextSettings
    prompts: Sequence[Prompt]
    greedy: Runs
    sampled: Runs
    forks: tuple[ForkRecord, ...]
    voided: frozenset[int]
    rollback: Rollback | None
    plain_peak_bytes: int
    draft_peak_bytes: int | None
    texts: Sequence[str]
    without_prompt: Acceptance | None = None
    teacher: Sequence[TeacherForced] = ()
    reference_acceptance: Acceptance | None = None

    def kept(self) -> list[int]:
        """Prompts that count."""
        return [prompt.index for prompt in self.prompts if prompt.index not in self.voided]


def result_of(found: Measured, spec: MtpSpec, *, check_id: str, mtp_id: str) -> MtpResult:
    """The record of a check with a head."""
    assert found.head is not None
    by_n_draft = tuple(count_acceptance([found.sampled.steps(n_draft, p) for p in found.kept()], n_draft)
                       for n_draft in found.sampled.arms() if n_draft)
    longest = by_n_draft[-1]
    reference = None
    if found.reference is not None and found.reference_acceptance is not None:
        reference = ReferenceHead(head=head_facts(found.reference), teacher_forced_acceptance=found.teacher[1],
                                  acceptance=found.reference_acceptance)
    return MtpResult(
        status="measured", reason=None if found.kept() else "the text after every prompt repeats itself: no acceptance from it",
        check_id=check_id, mtp_id=mtp_id, tier=found.name, file=found.trunk.path.name, sha256=found.trunk.sha256,
        arithmetic=arithmetic_of(found.build, found.offload),
        head=head_facts(found.head), rollback=found.rollback, n_draft=longest.n_draft, n_drafted=longest.n_drafted,
        n_accepted=longest.n_accepted, acceptance_rate=longest.acceptance_rate, acceptance_rate_se=longest.acceptance_rate_se,
        mean_accepted_len=longest.mean_accepted_len, acceptance_by_position=longest.acceptance_by_position, by_n_draft=by_n_draft,
        without_prompt=found.without_prompt, teacher_forced_acceptance=found.teacher[0], reference=reference,
        head_errors=head_errors(found.base, found.head), lossless={r.mode: _lossless(r, found.forks) for r in _ways(found)},
        first_fork=found.forks[0] if found.forks else None, forks=found.forks, voided_prompts=tuple(sorted(found.voided)),
        prompts=_prompt_records(found, spec), problems=tuple(_problems(found, spec, by_n_draft, reference)), speed=SPEED_FILE)


def not_applicable(found: Measured, spec: MtpSpec, reason: str, *, check_id: str, mtp_id: str) -> MtpResult:
    """The record of a tier that nothing can be drafted for: no shares, not even 0."""
    unstable = [f"{r.mode} decoding does not repeat itself" for r in _ways(found) if r.not_repeated()]
    return MtpResult(
        status="not applicable", reason=reason, check_id=check_id, mtp_id=mtp_id, tier=found.name,
        file=found.trunk.path.name, sha256=found.trunk.sha256, arithmetic=arithmetic_of(found.build, found.offload),
        head=head_facts(found.trunk) if found.trunk.model.n_nextn else None, rollback=None, n_draft=None, n_drafted=None,
        n_accepted=None, acceptance_rate=None, acceptance_rate_se=None, mean_accepted_len=None, acceptance_by_position=(),
        by_n_draft=(), without_prompt=None, teacher_forced_acceptance=None, reference=None, head_errors=(), lossless={},
        first_fork=None, forks=(), voided_prompts=tuple(sorted(found.voided)), prompts=_prompt_records(found, spec),
        problems=tuple(unstable), speed=SPEED_FILE)


def speed_of(found: Measured, spec: MtpSpec, *, check_id: str) -> SpeedResult:
    """The record of the times, prompts that were voided left out."""
    drafts = tuple(_draft_speed(found, n_draft) for n_draft in found.sampled.arms() if n_draft)
    paying = [d for d in drafts if d.speedup.value is not None and d.speedup.value > 1]
    best = max(paying, key=lambda d: d.speedup.value or 0.0).n_draft if paying else 0
    timed = [d for d in drafts if d.speedup.value is not None]
    return SpeedResult(
        check_id=check_id, tier=found.name, file=found.trunk.path.name, machine=machine_of(found.build, found.settings),
        n_prompt=len(found.kept()), n_voided=len(found.voided), repeats=spec.repeats, n_warmup=spec.n_warmup,
        sampling=sampling_words(spec), plain=plain_speed(found.prompts, found.sampled, found.plain_peak_bytes), drafts=drafts,
        draft_peak_memory_bytes=found.draft_peak_bytes, best_n_draft=best if timed else None)


def plain_speed(prompts: Sequence[Prompt], sampled: Runs, peak_bytes: int) -> PlainSpeed:
    """The trunk alone, over every prompt: what a text says does not change how long the trunk takes for it."""
    runs = [(prompt, sampled.found[0, prompt.index]) for prompt in prompts]
    return PlainSpeed(prompt_tokens_per_s=_prompt_rate(runs), decode_tokens_per_s=_decode_rate(runs), peak_memory_bytes=peak_bytes,
                      noise=against_itself(_seconds_a_token(runs)))


def sampling_words(spec: MtpSpec) -> str:
    """How tokens were chosen."""
    return f"temperature {spec.temperature:g}, top_k {spec.top_k}, top_p {spec.top_p:g}, min_p {spec.min_p:g}"


def machine_of(build: BuildFacts, settings: ContextSettings) -> Machine:
    """This machine, as the times name it."""
    return Machine(processor=host_facts()["cpu"], n_cores=n_cores(), n_threads=settings.n_threads, backend=build.backend,
                   llama_cpp_commit=build.llama_cpp_commit, system_info=build.system_info)


def head_facts(subject: Subject) -> HeadFacts:
    """What is known of a head without running it."""
    blocks = [t for t in subject.model.header.tensors if subject.model.roles[t.name] == "mtp"]
    return HeadFacts(file=subject.path.name, sha256=subject.sha256, type=type_shares(blocks)[0].type,
                     block_bytes=sum(t.size_bytes for t in blocks), n_nextn=subject.model.n_nextn)


def head_errors(base: Subject | None, head: Subject) -> tuple[TensorLoss, ...]:
    """Relative error, over sampled rows, of the head's tensors whose type is not the base's; see `job.tensor_check`."""
    if base is None:
        return ()
    source = {t.name: t for t in base.model.header.tensors}
    out = []
    for tensor in head.model.header.tensors:
        if head.model.roles[tensor.name] != "mtp" or tensor.name not in source or source[tensor.name].shape != tensor.shape:
            continue
        rows = np.unique(np.linspace(0, tensor.n_rows - 1, _N_SAMPLED_ROWS).astype(np.int64))
        w = read_rows(base.model.header, source[tensor.name], rows)
        difference = read_rows(head.model.header, tensor, rows) - w
        norm = float(np.sqrt(np.sum(w * w)))
        error = float(np.sqrt(np.sum(difference * difference))) / norm if norm > 0 else 0.0
        out.append(TensorLoss(name=tensor.name, type=tensor.type.name, relative_error=error))
    return tuple(out)


def _ways(found: Measured) -> tuple[Runs, Runs]:
    return found.greedy, found.sampled


def _lossless(runs: Runs, forks: Sequence[ForkRecord]) -> Lossless:
    if runs.not_repeated():
        return "not repeatable"
    verdicts = {fork.verdict for fork in forks if fork.mode == runs.mode}
    return "defect" if "defect" in verdicts else "near-tie" if verdicts else "identical"


def _problems(found: Measured, spec: MtpSpec, by_n_draft: Sequence[Acceptance], reference: ReferenceHead | None) -> list[str]:
    out = []
    for runs in _ways(found):
        if unstable := runs.not_repeated():
            n_draft, prompt = unstable[0]
            how = f"with drafts of {n_draft}" if n_draft else "without drafts"
            out.append(f"{runs.mode} decoding {how} does not repeat itself after prompt {prompt}: nothing can be compared")
    for fork in found.forks:
        if fork.verdict == "defect":
            out.append(f"not lossless: {fork.mode} text with drafts of {fork.n_draft} leaves the trunk's own at token "
                       f"{fork.position} after prompt {fork.prompt} ({fork.plain} became {fork.drafted}), and batch shapes alone "
                       "do not explain it")
    dead = dead_reason(found.teacher[0], reference.teacher_forced_acceptance if reference else None, spec.dead_ratio)
    if dead is None:
        dead = next((f"dead head: none of {a.n_drafted} drafted tokens was accepted" for a in by_n_draft
                     if a.n_drafted and not a.n_accepted), None)
    return [*out, *([dead] if dead else [])]


def _prompt_records(found: Measured, spec: MtpSpec) -> tuple[PromptRecord, ...]:
    def generated(tokens: tuple[int, ...], text: str, *, voided: bool) -> GeneratedText:
        return GeneratedText(tokens=tokens, text=text, repeat_share=repeat_share(tokens, spec.repeat_ngram), voided=voided)

    out = []
    for i, prompt in enumerate(found.prompts):
        text, greedy_text, sampled_text = found.texts[3 * i:3 * i + 3]
        greedy = found.greedy.tokens(0, prompt.index)
        out.append(PromptRecord(
            prompt=prompt.index, source=prompt.source, tokens=tuple(prompt.tokens.tolist()), text=text,
            greedy=generated(greedy, greedy_text, voided=is_degenerate(greedy, spec.repeat_ngram, spec.max_repeat_share)),
            sampled=generated(found.sampled.tokens(0, prompt.index), sampled_text, voided=prompt.index in found.voided)))
    return tuple(out)


def _draft_speed(found: Measured, n_draft: int) -> DraftSpeed:
    kept = found.kept()
    counts = count_acceptance([found.sampled.steps(n_draft, p) for p in kept], n_draft)
    plain, drafted = _kept_runs(found, 0), _kept_runs(found, n_draft)
    cost = paired_ratio(_seconds_a_step(drafted), _seconds_a_token(plain)).value
    return DraftSpeed(
        n_draft=n_draft, prompt_tokens_per_s=_prompt_rate(drafted), decode_tokens_per_s=_decode_rate(drafted),
        speedup=paired_ratio(_seconds_a_token(plain), _seconds_a_token(drafted)),
        wall_speedup=paired_ratio(_seconds_a_token(plain, wall=True), _seconds_a_token(drafted, wall=True)),
        step_cost=cost, mean_accepted_len=counts.mean_accepted_len, acceptance_rate=counts.acceptance_rate,
        break_even_acceptance=None if cost is None else break_even_acceptance(cost, n_draft))


def _kept_runs(found: Measured, n_draft: int) -> _Timed:
    """Prompts that count, each with the runs of one way."""
    return [(p, found.sampled.found[n_draft, p.index]) for p in found.prompts if p.index not in found.voided]


def _seconds_a_token(timed: _Timed, *, wall: bool = False) -> Times:
    """(n_prompt, n_repeat), decoding alone or with the prompt."""
    return _times([[(run.t_decode_s + (run.t_prompt_s if wall else 0.0)) / len(run.tokens) for run in runs] for _, runs in timed])


def _seconds_a_step(timed: _Timed) -> Times:
    return _times([[run.t_decode_s / len(run.steps) for run in runs] for _, runs in timed])


def _decode_rate(timed: _Timed) -> float | None:
    return rate(np.array([len(runs[0].tokens) for _, runs in timed], np.int64),
                _times([[run.t_decode_s for run in runs] for _, runs in timed]))


def _prompt_rate(timed: _Timed) -> float | None:
    """Of the prompts without their last token, which belongs to the decoding."""
    return rate(np.array([len(prompt.tokens) - 1 for prompt, _ in timed], np.int64),
                _times([[run.t_prompt_s for run in runs] for _, runs in timed]))


def _times(rows: list[list[float]]) -> Times:
    """(n_prompt, n_repeat) float64; without prompts one empty column."""
    return np.array(rows, np.float64) if rows else np.zeros((0, 1))
