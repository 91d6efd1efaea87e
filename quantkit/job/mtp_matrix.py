"""Trunk tiers times head types: which head is worth its bytes on which trunk. Each cell is a whole check of its own."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.core.errors import InputError, QuantkitError
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject
from quantkit.job.mtp_check import MATRIX, Candidate, MtpOptions, check_mtp, speed_path
from quantkit.job.mtp_heads import head_file_name, make_head
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json
from quantkit.spec.json_records import record_from_json
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.protocol import Protocol
from quantkit.spec.speed_records import MatrixCell, Ratio, SpeedResult


def run_matrix(run: RunFolder, protocol: Protocol, base: Subject, trunks: Sequence[Subject], text: bytes, progress: Progress,
               options: MtpOptions) -> list[MatrixCell]:
    """Check every trunk with every head type of the protocol; a cell that fails leaves the others whole.

    Args:
        base: whose head is split off and quantized.
        text: the bytes of the protocol's `mtp.corpus`.

    Returns:
        The cells, trunk by trunk.

    Raises:
        InputError: the base has no head.
    """
    if not base.model.n_nextn:
        raise InputError(f"expected a base with an MTP head, found no NextN block in {base.path}: there is nothing to "
                         "compare; give a base with one")
    with WorkerPool(1, run.logs) as pool:
        heads = {kind: make_head(run, pool, base, kind, run.parts / "mtp-head" / head_file_name("base", kind), progress)
                 for kind in protocol.mtp.head_types}
    cells = []
    for trunk in trunks:
        for kind, head in heads.items():
            name = f"{MATRIX}{trunk.name}+{kind}"
            try:
                result = check_mtp(run, protocol, Candidate.of(trunk, head, base, name=name), text, progress, options)
            except QuantkitError as error:
                progress.note(f"{name} failed: {error}")
                cells.append(failed_cell(trunk, kind, head, str(error)))
                continue
            speed = record_from_json(SpeedResult, read_json(speed_path(run, name)))
            cells.append(cell_of(trunk, kind, head, result, speed))
    return cells


def cell_of(trunk: Subject, kind: str, head: Subject, result: MtpResult, speed: SpeedResult) -> MatrixCell:
    """A cell from its check: acceptance with the longest draft, and the speedup at the best one (at the first where none pays)."""
    chosen = next((d for d in speed.drafts if d.n_draft == speed.best_n_draft), speed.drafts[0] if speed.drafts else None)
    teacher = result.teacher_forced_acceptance
    return MatrixCell(
        tier=trunk.name, head_type=kind, trunk_bytes=trunk.model.header.file_bytes, head_file_bytes=head.model.header.file_bytes,
        head_block_bytes=result.head.block_bytes if result.head else 0, n_draft=result.n_draft, n_drafted=result.n_drafted,
        n_accepted=result.n_accepted, acceptance_rate=result.acceptance_rate, mean_accepted_len=result.mean_accepted_len,
        teacher_forced_acceptance=teacher.value if teacher else None, teacher_forced_acceptance_se=teacher.se if teacher else None,
        teacher_forced_acceptance_lo=teacher.lo if teacher else None, teacher_forced_acceptance_hi=teacher.hi if teacher else None,
        speedup_n_draft=chosen.n_draft if chosen else None,
        speedup=chosen.speedup if chosen else Ratio(value=None, reason=result.reason),
        best_n_draft=speed.best_n_draft, problems=result.problems)


def failed_cell(trunk: Subject, kind: str, head: Subject, reason: str) -> MatrixCell:
    """A cell that could not be measured: its bytes, and why there is nothing else."""
    return MatrixCell(
        tier=trunk.name, head_type=kind, trunk_bytes=trunk.model.header.file_bytes, head_file_bytes=head.model.header.file_bytes,
        head_block_bytes=0, n_draft=None, n_drafted=None, n_accepted=None, acceptance_rate=None, mean_accepted_len=None,
        teacher_forced_acceptance=None, teacher_forced_acceptance_se=None, teacher_forced_acceptance_lo=None,
        teacher_forced_acceptance_hi=None, speedup_n_draft=None,
        speedup=Ratio(value=None, reason=reason), best_n_draft=None, problems=(reason,))
