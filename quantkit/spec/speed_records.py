"""How fast tiers and their heads are on one machine: parts/speed/<tier>.json and report/speed.*, never in the bundle.

Every ratio of times is defined in `measure.speed`. A number that is not defined is None and has a reason beside it.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """The trunk alone, over every prompt, the voided ones too: what a text says does not change how long the trunk takes for it.

    prompt_tokens_per_s, decode_tokens_per_s: tokens / s over all prompts and repeats. peak_memory_bytes: of the process, pages
    mapped from the model file included. noise: its speed against itself: what a ratio of 1 looks like on this machine today.
    """

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
