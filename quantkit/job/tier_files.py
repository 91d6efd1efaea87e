"""Each tier's file in a run: the one that stands if it is its plan's, or a new one; several are made side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from quantkit.core.files import sha256_file, sha256_json
from quantkit.job.evaluation import Subject, n_cores, read_subject
from quantkit.job.mtp_ladder import write_tier
from quantkit.job.quantize import Importances, quantize_tier
from quantkit.job.quantize_cost import quantize_s
from quantkit.job.rundir import read_json, write_json
from quantkit.job.session import Session, tier_file_name
from quantkit.job.side_by_side import Bench, n_side, pools_beside, side_by_side
from quantkit.spec.plan import Plan


def tier_files(session: Session, plans: Sequence[Plan], importances: Importances | None) -> list[Subject]:
    """The files of some tiers, found or made; those that fail are noted in the session and left out.

    Returns:
        The tiers that are whole, in the plans' order.
    """
    found = {plan.tier: subject for plan in plans if (subject := _standing(session, plan, importances)) is not None}
    for tier in found:
        session.progress.note(f"quantize {tier}: done already")
    missing = sorted((plan for plan in plans if plan.tier not in found), key=quantize_s, reverse=True)
    if missing:
        n = n_side(session.base.model.header, len(missing), min(n_cores(), len(session.pool.workers)),
                   session.options.audit.memory_bytes)
        session.progress.start("quantize " + " ".join(plan.tier for plan in plans if plan.tier not in found),
                               sum(len(plan.rows) for plan in missing))
        with pools_beside(session.pool, n, session.run.logs) as pools:
            outcomes = side_by_side([partial(_make, session, plan, importances) for plan in missing], pools, n_cores(),
                                    session.progress)
        session.progress.finish()
        for plan, outcome in zip(missing, outcomes, strict=True):
            if outcome.error is not None:
                session.failed[plan.tier] = outcome.error
                session.progress.note(f"tier {plan.tier} failed: {outcome.error}")
            else:
                found[plan.tier] = outcome.result()
    whole = [found[plan.tier] for plan in plans if plan.tier in found]
    session.tiers.update({subject.name: subject_record(subject, importances) for subject in whole})
    return whole


def standing_record(session: Session, plan: Plan, importances: Importances | None) -> dict[str, Any] | None:
    """What is on record of a tier that was made from just this plan; the file itself may be gone."""
    held = read_json(session.run.record("quantize", plan.tier))
    if not isinstance(held, dict) or held.get("key") != _key(session, plan, importances):
        return None
    record: dict[str, Any] = held["subject"]
    return record


def subject_record(subject: Subject, importances: Importances | None = None) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"file": subject.path.name, "size_bytes": subject.model.header.file_bytes, "sha256": subject.sha256,
            "bpw": subject.model.bpw, "bpw_core": subject.model.bpw_core,
            "imatrix_sha256": importances.sha256 if importances else None}


def _key(session: Session, plan: Plan, importances: Importances | None) -> str:
    """Of everything that the bytes of a tier depend on."""
    return sha256_json({"base": session.base.sha256, "plan": plan.to_json(), "imatrix": importances.sha256 if importances else None,
                        "mtp_mode": session.protocol.plan.mtp_mode, "build": dataclasses.asdict(session.evaluation.build)})


def _standing(session: Session, plan: Plan, importances: Importances | None) -> Subject | None:
    target = session.run.quants / tier_file_name(session.base.path, plan.tier)
    record = standing_record(session, plan, importances)
    if record is None or not target.exists() or sha256_file(target) != record["sha256"]:
        return None
    return read_subject(target, plan.tier)


def _make(session: Session, plan: Plan, importances: Importances | None, bench: Bench) -> Subject:
    run, base = session.run, session.base
    target = run.quants / tier_file_name(base.path, plan.tier)
    made = write_tier(run, session.protocol, base, plan.tier, target, lambda path: quantize_tier(
        bench.pool, base.model, plan, path, importances, bench.progress, force=True, n_threads=bench.n_threads))
    subject = read_subject(target, plan.tier)
    write_json(run.record("quantize", plan.tier), {"key": _key(session, plan, importances),
                                                   "subject": subject_record(subject, importances),
                                                   "errors": [dataclasses.asdict(error) for error in made.errors]})
    return subject
