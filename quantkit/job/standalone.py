"""Single steps without a run directory: one matrix, one tier, each to a file of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from quantkit.core.files import refuse_overwrite
from quantkit.engine.pool import WorkerPool
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import read_subject
from quantkit.job.imatrix import collect_imatrix
from quantkit.job.plans import resolve_tier
from quantkit.job.progress import Progress
from quantkit.job.quantize import QuantizedTier, prepare_importances, quantize_tier
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, read_imatrix
from quantkit.spec.protocol import Protocol


def collect_to_file(base: Path, protocol: Protocol, target: Path, progress: Progress, *, calibration: Path | None = None,
                    force: bool = False) -> Imatrix:
    """Collect an importance matrix; a state file beside the target lets a killed collection go on.

    Raises:
        InputError, CorpusError, EngineError: see `collect_imatrix`.
    """
    refuse_overwrite(target, read_header(base).parts, force=force)
    text = read_corpus(protocol.corpus(protocol.imatrix.corpus), calibration)
    with WorkerPool(1) as pool, tempfile.TemporaryDirectory(prefix="quantkit-") as parts:
        return collect_imatrix(target, pool, protocol, read_subject(base, "base"), text, progress, parts=Path(parts))


def quantize_to_file(base: Path, protocol: Protocol, tier_name: str, target: Path, progress: Progress, *,
                     imatrix: Path | None = None, force: bool = False) -> QuantizedTier:
    """Write one tier.

    Raises:
        PlanError, ImatrixError: before any work, what cannot be carried out.
        EngineError, EngineCrash: the library failed; the target is as it was before.
    """
    tier = protocol.plan.tier(tier_name)
    header = read_header(base)
    refuse_overwrite(target, [*header.parts, *([imatrix] if imatrix else [])], force=force)
    matrix = read_imatrix(imatrix) if imatrix is not None else None
    with WorkerPool(1) as pool:
        subject = read_subject(base, "base")
        plan = resolve_tier(pool, subject.model, protocol, tier, matrix.lengths() if matrix else {})
        for note in plan.notes():
            progress.note(f"plan {plan.tier}: {note}")
        importances = None
        if matrix is not None and imatrix is not None:
            importances = prepare_importances(imatrix, matrix, sorted(plan.overrides()), protocol.imatrix.zero_floor)
        return quantize_tier(pool, subject, plan, target, importances, progress, force=force)
