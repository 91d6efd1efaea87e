"""The MTP head in a ladder: kept inside each tier, stripped, or written once as a file of its own; and each tier's check.

    inside     tiers hold the NextN blocks at the types of their plans
    strip      tiers are quantized whole, then written without their NextN blocks
    separate   as strip, and one `mtp-<name>-<type>.gguf` for all tiers, at `plan.mtp_type` ("" is the base's own type)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from quantkit.core.errors import QuantkitError
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject
from quantkit.job.mtp_check import Candidate, MtpOptions, check_mtp, require_passed
from quantkit.job.mtp_files import strip_head
from quantkit.job.mtp_heads import head_file_name, make_head
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances
from quantkit.job.rundir import RunFolder
from quantkit.spec.model import type_shares
from quantkit.spec.protocol import Protocol

_Made = TypeVar("_Made")


def leaves_head_out(protocol: Protocol, base: Subject) -> bool:
    """Whether the tiers' files are written without the base's NextN blocks."""
    return base.model.n_nextn > 0 and protocol.plan.mtp_mode != "inside"


def write_tier(run: RunFolder, protocol: Protocol, base: Subject, tier: str, target: Path,
               quantize: Callable[[Path], _Made]) -> _Made:
    """Write a tier's file, with its head or without, as the protocol says.

    Args:
        target: the tier's file; replaced if it exists.
        quantize: writes the whole tier to a path.

    Returns:
        What `quantize` returned; its size and hash are of the whole file.
    """
    if not leaves_head_out(protocol, base):
        return quantize(target)
    whole = run.parts / "mtp-head" / f"{tier}.whole.gguf"
    try:
        made = quantize(whole)
        strip_head(whole, target, force=True)
    finally:
        whole.unlink(missing_ok=True)
    return made


def separate_head(run: RunFolder, pool: WorkerPool, protocol: Protocol, base: Subject, stem: str, progress: Progress,
                  importances: Importances | None) -> Subject | None:
    """The ladder's own head file, made or found; None where the protocol keeps none or the base has no head.

    Args:
        stem: the base's name without its type.

    Raises:
        PlanError, EngineError, EngineCrash: see `make_head`.
    """
    if not base.model.n_nextn or protocol.plan.mtp_mode != "separate":
        return None
    kind = protocol.plan.mtp_type or type_shares(base.model.header.tensors)[0].type
    return make_head(run, pool, base, kind, run.quants / head_file_name(stem, kind), progress, importances)


def check_tiers(run: RunFolder, protocol: Protocol, base: Subject, tiers: Sequence[Subject], head: Subject | None, text: bytes,
                progress: Progress, options: MtpOptions = MtpOptions()) -> Mapping[str, QuantkitError]:  # noqa: B008 - frozen
    """Check every tier; one that fails leaves the others whole.

    Args:
        head: the ladder's own head file, for tiers without one inside.
        text: the bytes of the protocol's `mtp.corpus`.

    Returns:
        The tiers whose check failed, or could not be made, with the reason.
    """
    failed: dict[str, QuantkitError] = {}
    for tier in tiers:
        try:
            own = None if tier.model.n_nextn else head
            require_passed(check_mtp(run, protocol, Candidate.of(tier, own, base), text, progress, options))
        except QuantkitError as error:
            failed[tier.name] = error
            progress.note(f"mtp {tier.name}: {error}")
    return failed
