"""Records of the MTP check: what a head accepts (counts and tokens, in the bundle), and how fast it is (times, apart).

    MtpResult     RUN/mtp/<tier>.json      the same bytes for the same inputs
    SpeedResult   parts/speed/<tier>.json  and report/speed.*: this machine, today

Every share is defined in `measure.acceptance`, every ratio of times in `measure.speed`, a fork's verdict in `measure.fork`.
A number that is not defined is None and has a reason beside it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from quantkit.spec.records import Estimate

Status = Literal["measured", "not applicable"]
Lossless = Literal["identical", "near-tie", "defect", "not repeatable"]
Mode = Literal["greedy", "sampled"]

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAcceptance:
    """One position of the draft, counted from 1."""

    position: int
    n_offered: int
    n_reached: int
    n_accepted: int
    conditional: float | None
    per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What the verify steps of some texts came to, with drafts of n_draft tokens; the error is a jackknife over texts."""

    n_draft: int
    n_text: int
    n_step: int
    n_drafted: int
    n_accepted: int
    acceptance_rate: float | None
    acceptance_rate_se: float | None
    mean_accepted_len: float | None
    acceptance_by_position: tuple[PositionAcceptance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherForced:
    """How often a head's first choice equals the trunk's, given the true text before.

    Attributes:
        value, se, lo, hi: the share with its error and 95 % interval by article; se_iid, se_chunk are diagnostics.
        n, n_chunk, n_article: positions, chunks and articles.
        chance: the share that always guessing the trunk's most frequent choice would reach.
        reason: why there is no interval.
    """

    value: float
    se: float | None
    lo: float | None
    hi: float | None
    se_iid: float | None
    se_chunk: float | None
    n: int
    n_chunk: int
    n_article: int
    chance: float
    reason: str | None

    @classmethod
    def of(cls, estimate: Estimate, *, n: int, n_chunk: int, n_article: int, chance: float) -> TeacherForced:
        """From an estimate."""
        assert estimate.value is not None
        return cls(value=estimate.value, se=estimate.se, lo=estimate.lo, hi=estimate.hi, se_iid=estimate.se_iid,
                   se_chunk=estimate.se_chunk, n=n, n_chunk=n_chunk, n_article=n_article, chance=chance, reason=estimate.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """A head: the file that holds it, the bytes of its NextN blocks, the type of most of their parameters."""

    file: str
    sha256: str
    type: str
    block_bytes: int
    n_nextn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoss:
    """Relative error of one tensor of the head against the base's."""

    name: str
    type: str
    relative_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """How the trunk forgets rejected drafts; n_rs_seq recurrent states are kept for it."""

    mode: Literal["recurrent snapshots", "plain KV", "checkpoint"]
    n_rs_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRecord:
    """Where a text with drafts leaves the plain one, and why.

    `position` counts generated tokens from 0. margin: how far the trunk's second choice was behind its first there, noise included
    (`measure.sampling.choice_margin`). difference: between the two ways' rows; shape_difference: what batch shapes alone do to
    rows. All in nats, None where there is no row to compare.
    """

    mode: Mode
    n_draft: int
    prompt: int
    position: int
    plain: int | None
    drafted: int | None
    margin: float | None
    difference: float | None
    shape_difference: float | None
    verdict: Literal["near-tie", "defect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """What the trunk alone wrote after a prompt, one way. `voided` says that it repeats itself and is not counted."""

    tokens: tuple[int, ...]
    text: str
    repeat_share: float | None
    voided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A prompt, where it comes from, and what followed."""

    prompt: int
    source: str
    tokens: tuple[int, ...]
    text: str
    greedy: GeneratedText
    sampled: GeneratedText


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceHead:
    """The base's own head on the same trunk, over the same positions and prompts."""

    head: HeadFacts
    teacher_forced_acceptance: TeacherForced
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpResult:
    """What a tier's head is worth, in counts and tokens.

    Attributes:
        status, reason: "not applicable" where there is no head, or none that llama.cpp can draft with; then most is None.
        n_drafted … acceptance_by_position: of the longest draft, n_draft; `by_n_draft` has them all. From sampled text.
        without_prompt: the same with a head that never saw the prompt, as runtimes have shipped.
        lossless: per way of choosing tokens, the worst that was found.
        first_fork: of `forks` the first; None where every token is the same.
        voided_prompts: whose sampled text repeats itself; they count for identity, not for acceptance or speed.
        speed: where the times are.
        problems: why the check failed; empty where it passed.
    """

    status: Status
    reason: str | None
    check_id: str
    mtp_id: str
    tier: str
    file: str
    sha256: str
    head: HeadFacts | None
    rollback: Rollback | None
    n_draft: int | None
    n_drafted: int | None
    n_accepted: int | None
    acceptance_rate: float | None
    acceptance_rate_se: float | None
    mean_accepted_len: float | None
    acceptance_by_position: tuple[PositionAcceptance, ...]
    by_n_draft: tuple[Acceptance, ...]
    without_prompt: Acceptance | None
    teacher_forced_acceptance: TeacherForced | None
    reference: ReferenceHead | None
    head_errors: tuple[TensorLoss, ...]
    lossless: Mapping[str, Lossless]
    first_fork: ForkRecord | None
    forks: tuple[ForkRecord, ...]
    voided_prompts: tuple[int, ...]
    prompts: tuple[PromptRecord, ...]
    problems: tuple[str, ...]
    speed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of times with its 95 % interval over prompts; `reason` says why there is none."""

    value: float | None
    lo: float | None = None
    hi: float | None = None
    n_prompt: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpeed:
    """The trunk alone. `noise` is its speed against itself: what a ratio of 1 looks like on this machine today."""

    prompt_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    peak_memory_bytes: int
    noise: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpeed:
    """Drafts of n_draft tokens against the trunk alone: `speedup` of decoding, `wall_speedup` with the prompt.

    step_cost: plain tokens that a verify step, drafting included, takes as long as. mean_accepted_len: tokens that it yields.
    """

    n_draft: int
    prompt_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    speedup: Ratio
    wall_speedup: Ratio
    step_cost: float | None
    mean_accepted_len: float | None
    acceptance_rate: float | None
    break_even_acceptance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the times were taken on."""

    processor: str
    n_cores: int
    n_threads: int
    backend: str
    llama_cpp_commit: str
    system_info: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedResult:
    """Times of one tier, with and without its head.

    `best_n_draft` is the draft length of the largest speedup above 1, 0 where leaving the head off is fastest, None without one.
    """

    check_id: str
    tier: str
    file: str
    machine: Machine
    n_prompt: int
    n_voided: int
    repeats: int
    n_warmup: int
    sampling: str
    plain: PlainSpeed
    drafts: tuple[DraftSpeed, ...]
    draft_peak_memory_bytes: int | None
    best_n_draft: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """One trunk with one head: what it accepts, how fast that is, what it weighs.

    head_block_bytes: the NextN blocks alone, what the head adds to a model's own file; head_file_bytes: the head's own file, which
    holds embedding and output too. Shares are of the longest draft, n_draft; speedup of drafts of speedup_n_draft.
    """

    tier: str
    head_type: str
    trunk_bytes: int
    head_block_bytes: int
    head_file_bytes: int
    n_draft: int | None
    n_drafted: int | None
    n_accepted: int | None
    acceptance_rate: float | None
    mean_accepted_len: float | None
    teacher_forced_acceptance: float | None
    teacher_forced_acceptance_se: float | None
    teacher_forced_acceptance_lo: float | None
    teacher_forced_acceptance_hi: float | None
    speedup_n_draft: int | None
    speedup: Ratio
    best_n_draft: int | None
    problems: tuple[str, ...]


def record_to_json(record: Any) -> Any:
    """A record as plain dicts, lists, numbers, strings and None; keys in the order of the fields."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: record_to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, tuple | list):
        return [record_to_json(item) for item in record]
    if isinstance(record, Mapping):
        return {key: record_to_json(value) for key, value in record.items()}
    return record


def record_from_json(cls: type[_Record], data: Any) -> _Record:
    """The record that `record_to_json` wrote.

    Raises:
        KeyError, TypeError: a key is missing, unknown, or of another kind.
    """
    return typing.cast(_Record, _read(cls, data))


def _read(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        names = [field.name for field in dataclasses.fields(kind)]
        if not isinstance(data, dict) or set(data) != set(names):
            raise KeyError(f"expected the keys {', '.join(names)} for a {kind.__name__}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], data[name]) for name in names})
    if origin is types.UnionType:
        return None if data is None else _read(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"expected a list, got {type(data).__name__}")
        return tuple(_read(arguments[0], item) for item in data)
    return data
