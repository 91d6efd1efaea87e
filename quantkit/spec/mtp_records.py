"""What the MTP check found in a head, in counts and tokens: RUN/mtp/<tier>.json, the same bytes for the same inputs.

Every share is defined in `measure.acceptance`, a fork's verdict in `measure.fork`; times are apart, in `spec.speed_records`.
A number that is not defined is None and has a reason beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.spec.records import Estimate
from quantkit.spec.refpack_records import PackArithmetic

Status = Literal["measured", "not applicable"]
Lossless = Literal["identical", "near-tie", "defect", "not repeatable"]
Mode = Literal["greedy", "sampled"]


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
        arithmetic: the build and the devices on which trunk and head ran.
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
    arithmetic: PackArithmetic
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
