"""How fast tiers without an MTP head are: the plain way of the check alone, timed as the check times it.

The same prompts, sampling, repeats and warm-up as with a head, in a process of the tier's own; nothing is drafted, so nothing is
compared and no text is voided. Times go to parts/speed/<tier>.json, where the check of a tier with a head leaves its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quantkit.core.errors import QuantkitError
from quantkit.core.files import sha256_json
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import Tokenized, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject, context_settings
from quantkit.job.mtp_check import MtpOptions
from quantkit.job.mtp_prompts import choose_prompts
from quantkit.job.mtp_result import machine_of, plain_speed, sampling_words
from quantkit.job.mtp_runs import ArmFiles, open_arms, run_sampled
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.protocol import Protocol
from quantkit.spec.speed_records import SpeedResult

SPEED_VERSION = 1  # raised when the meaning of a time changes


def time_tiers(run: RunFolder, protocol: Protocol, tiers: Sequence[Subject], build: BuildFacts, text: bytes, progress: Progress,
               options: MtpOptions = MtpOptions()) -> None:  # noqa: B008 - frozen
    """Time every tier. One that cannot be timed is told and left without a speed: what was measured of it stands.

    Args:
        build: the library's, with the device of the options.
        text: the bytes of the protocol's `mtp.corpus`.
    """
    for tier in tiers:
        try:
            time_tier(run, protocol, tier, build, text, progress, options)
        except QuantkitError as error:
            progress.note(f"speed of {tier.name} was not measured: {error}")


def time_tier(run: RunFolder, protocol: Protocol, tier: Subject, build: BuildFacts, text: bytes, progress: Progress,
              options: MtpOptions = MtpOptions()) -> SpeedResult:  # noqa: B008 - frozen
    """Time one tier, or find it timed with this file, protocol, build and device.

    Raises:
        InputError: the text is too short, or a prompt does not fit.
        EngineError, EngineCrash: the library failed.
    """
    spec, settings, step = protocol.mtp, context_settings(protocol.mtp), f"speed {tier.name}"
    check_id = sha256_json({"speed": SPEED_VERSION, "mtp_id": protocol.mtp_id, "tier": tier.name, "trunk": tier.sha256,
                            "build": dataclasses.asdict(build), "offload": dataclasses.asdict(options.offload)})
    if (held := read_speed(run, tier.name)) is not None and held.check_id == check_id:
        progress.note(f"{step}: timed already")
        return held
    with _pool(run) as pool:
        seen: Tokenized = pool.call(step, tokenize, path=tier.path, text=text)
        prompts = choose_prompts(pool, spec, tier, seen.ids, add_bos=seen.add_bos)
        files = ArmFiles(name=tier.name, trunk=tier.path, head=None, settings=settings, offload=options.offload, n_draft_max=0)
        arms = open_arms(files, spec, prompts[0], pool, pool)
        progress.start(step, len(prompts) * spec.repeats)
        sampled = run_sampled(arms, prompts, spec, (), progress, together=True)
        progress.finish()
        peak_bytes = arms.peak_memory_bytes(drafting=False)
        arms.close()
    speed = SpeedResult(
        check_id=check_id, tier=tier.name, file=tier.path.name, machine=machine_of(build, settings), n_prompt=len(prompts),
        n_voided=0, repeats=spec.repeats, n_warmup=spec.n_warmup, sampling=sampling_words(spec),
        plain=plain_speed(prompts, sampled, peak_bytes), drafts=(), draft_peak_memory_bytes=None, best_n_draft=None)
    write_json(run.record("speed", tier.name), record_to_json(speed))
    return speed


def read_speed(run: RunFolder, tier: str) -> SpeedResult | None:
    """A tier's times where they stand; None where there are none, or of another version."""
    try:
        return record_from_json(SpeedResult, read_json(run.record("speed", tier)))
    except (KeyError, TypeError):
        return None


@contextmanager
def _pool(run: RunFolder) -> Iterator[WorkerPool]:
    """A process of the tier's own: its peak memory is no other's."""
    with WorkerPool(1, run.logs) as pool:
        yield pool
