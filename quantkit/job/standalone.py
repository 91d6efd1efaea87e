"""Single steps without a run directory: one matrix, one tier, each to a file of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from quantkit.core.errors import CorpusError
from quantkit.core.files import refuse_overwrite
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.calibration import Overlap, importance_notes, read_overlaps
from quantkit.job.corpus import find_corpus, read_corpus
from quantkit.job.evaluation import choose_offload, n_cores, read_subject, require_utf8
from quantkit.job.foreign import read_imatrix
from quantkit.job.imatrix import collect_imatrix
from quantkit.job.imatrix_state import state_beside
from quantkit.job.plans import resolve_tier
from quantkit.job.progress import Progress
from quantkit.job.quantize import QuantizedTier, prepare_importances, quantize_tier
from quantkit.job.quantize_cost import quantize_s
from quantkit.job.side_by_side import Bench, n_side, pools_beside, side_by_side
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix
from quantkit.spec.model import describe_model
from quantkit.spec.plan import Plan
from quantkit.spec.plan_coverage import check_coverage
from quantkit.spec.protocol import Protocol


def collect_to_file(base: Path, protocol: Protocol, target: Path, progress: Progress, *, calibration: Path | None = None,
                    corpus: Path | None = None, offload: Offload = Offload(),  # noqa: B008 - frozen
                    force: bool = False) -> Imatrix:
    """Collect an importance matrix; a hidden folder beside the target lets a killed collection go on, and goes when it is done.

    Args:
        calibration, corpus: the calibration and the evaluation text, where they are not found by themselves.
        offload: which layers go to which devices, unless the protocol fixes it.

    Raises:
        InputError, CorpusError, EngineError: see `collect_imatrix` and `read_overlaps`.
        RunLocked: another process collects into the target.
    """
    refuse_overwrite(target, [*read_header(base).parts, *(path for path in (calibration, corpus) if path)], force=force)
    text = read_corpus(protocol.corpus(protocol.imatrix.corpus), calibration)
    with state_beside(target) as parts, WorkerPool(n_cores()) as pool:  # at most; the collection says how many it uses
        pool.start(protocol.imatrix.n_chunk or None)  # while the texts are compared
        for overlap in _overlaps(protocol, corpus, calibration, progress):
            progress.note(f"imatrix: {overlap.describe()}")
        return collect_imatrix(target, pool, protocol, read_subject(base, "base"), text, progress, parts=parts,
                               offload=choose_offload(protocol, offload))


def _overlaps(protocol: Protocol, corpus: Path | None, calibration: Path | None, progress: Progress) -> tuple[Overlap, ...]:
    """The proof that the texts are apart, where the evaluation text is on this machine; collecting alone does not fetch it."""
    if corpus is None:
        for name in protocol.eval.corpora:
            try:
                find_corpus(dataclasses.replace(protocol.corpus(name), hub_dataset=""))
            except CorpusError:
                progress.note(f"imatrix: the evaluation text {name} is not at hand, so whether the calibration text has passages "
                              "of it is not known: --corpus names it")
                return ()
    return read_overlaps(protocol, corpus, calibration)


def quantize_to_file(base: Path, protocol: Protocol, tier_name: str, target: Path, progress: Progress, *,
                     imatrix: Path | None = None, force: bool = False) -> QuantizedTier:
    """Write one tier; see `quantize_to_files`."""
    return quantize_to_files(base, protocol, {tier_name: target}, progress, imatrix=imatrix, force=force)[0]


def quantize_to_files(base: Path, protocol: Protocol, targets: Mapping[str, Path], progress: Progress, *,
                      imatrix: Path | None = None, force: bool = False) -> list[QuantizedTier]:
    """Write some tiers, as many side by side as cores and memory allow.

    Args:
        targets: each tier's name and its file.

    Raises:
        PlanError, ImatrixError, InputError: before any work, what cannot be carried out.
        EngineError, EngineCrash: the library failed at a tier; its target is as it was before, and the other tiers are written.
    """
    header = read_header(base)
    model = describe_model(header)
    for target in targets.values():
        require_utf8(target)
        refuse_overwrite(target, [*header.parts, *([imatrix] if imatrix else [])], force=force)
    with WorkerPool(1) as pool, pools_beside(pool, n_side(header, len(targets), n_cores())) as pools:
        matrix = read_imatrix(imatrix) if imatrix is not None else None
        plans = [resolve_tier(pool, model, protocol, protocol.plan.tier(name), matrix.lengths() if matrix else {})
                 for name in targets]
        for plan in plans:
            for note in plan.notes():
                progress.note(f"plan {plan.tier}: {note}")
        importances = None
        if matrix is not None and imatrix is not None:
            coverages = {plan.tier: check_coverage(plan, matrix, protocol.imatrix) for plan in plans}
            names = sorted({name for plan in plans for name in plan.overrides()})
            importances = prepare_importances(imatrix, matrix, names, protocol.imatrix.zero_floor)
            for note in importance_notes(importances, coverages, None):
                progress.note(note)

        def quantize(plan: Plan, bench: Bench) -> QuantizedTier:
            return quantize_tier(bench.pool, model, plan, targets[plan.tier], importances, bench.progress, force=force,
                                 n_threads=bench.n_threads)

        progress.start("quantize " + " ".join(targets), sum(len(plan.rows) for plan in plans))
        longest_first = sorted(plans, key=quantize_s, reverse=True)
        outcomes = side_by_side([partial(quantize, plan) for plan in longest_first], pools, n_cores(), progress)
        made = {outcome.result().tier: outcome.result() for outcome in outcomes}
        progress.finish()
        return [made[plan.tier] for plan in plans]
