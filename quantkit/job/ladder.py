"""The main job: one base, one protocol, one run directory; plan, imatrix, quantize, audit, each step resumable."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from quantkit.core.errors import CorpusError, EngineKilled
from quantkit.core.files import atomic_path, sha256_file
from quantkit.engine.fit import require_loadable
from quantkit.job.calibration import (
    Overlap,
    imatrix_facts,
    importance_notes,
    may_calibrate,
    overlaps_json,
    read_overlaps,
    uses_importances,
)
from quantkit.job.corpus import read_corpus
from quantkit.job.doctor import require_healthy
from quantkit.job.doctor_case import Case
from quantkit.job.evaluation import Subject, n_cores, read_subject
from quantkit.job.foreign import read_imatrix
from quantkit.job.imatrix import collect_imatrix
from quantkit.job.mtp_check import MtpOptions, mtp_path
from quantkit.job.mtp_ladder import check_tiers, separate_head
from quantkit.job.mtp_speed import time_tiers
from quantkit.job.plans import choose_tiers, resolve_tier
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances, prepare_importances
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.job.sequential import screening_protocol
from quantkit.job.session import RunOptions as RunOptions
from quantkit.job.session import RunResult as RunResult
from quantkit.job.session import Session as Session
from quantkit.job.session import base_stem
from quantkit.job.session import open_session as open_session
from quantkit.job.smoke import smoke_path, smoke_tier
from quantkit.job.source import keep_source
from quantkit.job.tier_files import standing_record, subject_record, tier_files
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix
from quantkit.spec.json_records import record_to_json
from quantkit.spec.model import describe_model
from quantkit.spec.plan import Plan
from quantkit.spec.plan_coverage import check_coverage
from quantkit.spec.protocol import Protocol


def run_ladder(base_path: Path, protocol: Protocol, run_path: Path, tiers: Sequence[str] | None, progress: Progress,
               options: RunOptions = RunOptions()) -> RunResult:  # noqa: B008 - frozen
    """Plan, collect importances, quantize and audit; a tier that fails leaves the others whole.

    Returns:
        The run's folder, its result id, and the tiers that failed with their errors.
    """
    chosen = choose_tiers(protocol, tiers)
    with Case(base_path, protocol, tiers=tiers, run=run_path, options=options, measure=False, progress=progress) as case:
        first = require_healthy(case)  # refusals come before any work
    overlaps = None
    if options.imatrix is None and may_calibrate(protocol, chosen):  # before the base is hashed, which takes minutes
        held = read_json(RunFolder(path=run_path).record("imatrix", "overlap"))
        overlaps = read_overlaps(protocol, options.corpus, options.calibration, held)
    with open_session(base_path, protocol, run_path, progress, options) as session:
        model, pool = session.base.model, session.pool
        pool.call("load the base", require_loadable, path=model.header.parts[0])
        matrix, path = importance_matrix(session, first, overlaps)
        lengths = matrix.lengths() if matrix is not None else {}
        plans = [resolve_tier(pool, model, protocol, tier, lengths) for tier in chosen]
        importances = None
        if matrix is not None and path is not None:
            coverages = {plan.tier: check_coverage(plan, matrix, protocol.imatrix) for plan in plans}
            names = sorted({name for plan in plans for name in plan.overrides()})
            importances = prepare_importances(path, matrix, names, protocol.imatrix.zero_floor)
            session.imatrix = imatrix_facts(protocol, importances, coverages, overlaps, session.imatrix)
            for note in importance_notes(importances, coverages, overlaps):
                session.progress.note(note)
        for plan in plans:
            write_json(session.run.plan(plan.tier), plan.to_json())
            for note in plan.notes():
                session.progress.note(f"plan {plan.tier}: {note}")
        session.head = separate_head(session.run, pool, protocol, session.base, base_stem(session.base.path), session.progress,
                                     importances)
        batches = [[plan] for plan in plans] if options.drop_files else [plans]
        for batch in batches:
            _make_and_measure(session, batch, importances)
        return session.finish()


def audit_files(base_path: Path, protocol: Protocol, run_path: Path, files: Sequence[Path], progress: Progress,
                options: RunOptions = RunOptions()) -> RunResult:  # noqa: B008 - frozen
    """Audit files of the same model, whoever made them, into a run directory; of a screening, under a protocol of its own."""
    if options.until is not None:
        protocol = screening_protocol(protocol, options.until)
    for file in files:
        describe_model(read_header(file))
    with open_session(base_path, protocol, run_path, progress, options) as session:
        subjects = []
        for file in files:
            subject = read_subject(file, file.stem)
            subjects.append(dataclasses.replace(subject, name=_free_name(session, subject)))
            session.tiers[subjects[-1].name] = subject_record(subjects[-1])
            keep_source(session.run, subjects[-1])
        session.measure(subjects)
        return session.finish()


def _free_name(session: Session, subject: Subject) -> str:
    """The file's stem; with a piece of its hash where another file of that name is in the run already."""
    held = session.tiers.get(subject.name)
    return subject.name if held is None or held["sha256"] == subject.sha256 else f"{subject.name}-{subject.sha256[:8]}"


def _make_and_measure(session: Session, plans: Sequence[Plan], importances: Importances | None) -> None:
    missing = []
    for plan in plans:
        if session.options.drop_files and _is_measured(session, plan, importances):
            session.progress.note(f"tier {plan.tier}: measured already")
        else:
            missing.append(plan)
    subjects = tier_files(session, missing, importances)
    session.measure(subjects)
    whole = [subject for subject in subjects if subject.name not in session.failed]
    _check(session, whole)
    if session.options.drop_files:
        for subject in whole:
            subject.path.unlink()


def _check(session: Session, tiers: Sequence[Subject]) -> None:
    """Ask each tier a question, for the gate to judge, and see how fast it is and what its MTP head is worth.

    A failed check of the head leaves the measured numbers standing.
    """
    run, protocol, options = session.run, session.protocol, session.options
    for tier in tiers:
        try:
            record = smoke_tier(run, session.pool, protocol, tier.name, tier.path, tier.sha256, n_cores())
        except EngineKilled as error:
            session.failed_checks[tier.name] = error
            continue
        if not record.passed:
            session.progress.note(f"smoke test of {tier.name} did not pass: {'; '.join(record.failures)}")
    if not tiers:
        return
    how = MtpOptions(offload=session.evaluation.offload, memory_bytes=options.audit.memory_bytes)
    if session.base.model.n_nextn:
        session.failed_checks.update(check_tiers(run, protocol, session.base, tiers, session.head, _mtp_text(session),
                                                 session.progress, how))
        return
    try:
        time_tiers(run, protocol, tiers, session.evaluation.build, _mtp_text(session), session.progress, how)
    except CorpusError as error:  # of a text that nothing else of a model without a head needs
        session.progress.note(f"speed was not measured: {error}")


def _mtp_text(session: Session) -> bytes:
    """The text that prompts are cut out of; the one that was given for the evaluation where it is the same."""
    corpus = session.protocol.corpus(session.protocol.mtp.corpus)
    return read_corpus(corpus, session.options.corpus if corpus == session.evaluation.corpus else None)


def _is_measured(session: Session, plan: Plan, importances: Importances | None) -> bool:
    """Whether the tier's file was made from this plan and measured, though it may be gone since."""
    record, run = standing_record(session, plan, importances), session.run
    if record is None:
        return False
    last = mtp_path(run, plan.tier) if session.base.model.n_nextn else run.record("speed", plan.tier)
    checked = smoke_path(run, plan.tier).exists() and last.exists()
    if not session.is_measured(plan.tier, record["sha256"]) or not checked:
        return False
    session.tiers[plan.tier] = record
    return True


def importance_matrix(session: Session, plans: Sequence[Plan],
                       overlaps: Sequence[Overlap] | None) -> tuple[Imatrix | None, Path | None]:
    """The matrix that the tiers use: given, collected before, or collected now; none where no tier uses one."""
    run, options, protocol = session.run, session.options, session.protocol
    if not uses_importances({row.type for plan in plans for row in plan.rows if row.quantizable}):
        return None, None
    record = run.record("imatrix", "imatrix")
    if options.imatrix is not None:
        matrix = read_imatrix(options.imatrix)
        target = run.path / ("imatrix.dat" if matrix.legacy else "imatrix.gguf")
        with atomic_path(target) as temp:
            shutil.copyfile(options.imatrix, temp)
        write_json(record, {"imatrix_id": f"given {sha256_file(target)}", "sha256": sha256_file(target)})
        return matrix, target
    write_json(run.record("imatrix", "overlap"), overlaps_json(overlaps or ()))
    held = read_json(record)
    devices = record_to_json(session.evaluation.offload)
    if (isinstance(held, dict) and held.get("imatrix_id") == protocol.imatrix_id and held.get("offload") == devices
            and run.imatrix.exists() and sha256_file(run.imatrix) == held["sha256"]):
        session.progress.note("imatrix: collected already")
        return read_imatrix(run.imatrix), run.imatrix
    text = read_corpus(protocol.corpus(protocol.imatrix.corpus), options.calibration)
    matrix = collect_imatrix(run.imatrix, session.pool, protocol, session.base, text, session.progress, parts=run.parts,
                             offload=session.evaluation.offload)
    write_json(record, {"imatrix_id": protocol.imatrix_id, "sha256": sha256_file(run.imatrix), "offload": devices})
    return matrix, run.imatrix
