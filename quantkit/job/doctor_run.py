"""Checks of the run directory: whose it is, who works in it, and what earlier runs left there. Nothing is written or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantkit.core.errors import EnvironmentFault, GgufError, InputError, QuantkitError, RunLocked
from quantkit.core.files import find_leftovers, lock_holder, sha256_file
from quantkit.core.units import GIB, format_bytes
from quantkit.job.doctor_case import Case, Finding, Unknown, not_applicable, ok, warning
from quantkit.job.doctor_work import existing_folder
from quantkit.job.rundir import RunFolder, check_protocol, read_json, refuse_foreign_folder
from quantkit.job.session import tier_file_name
from quantkit.spec.gguf_header import read_header

_HASHED_BYTES = GIB  # a base up to this size is hashed, which takes a second or two; the run hashes any
_N_NAMED = 3


def look_at_run(case: Case) -> Iterator[Finding]:
    """Whether the run can be there: a place to write, nobody else in it, of the same protocol and base."""
    check, path = "run directory", case.run
    if path is None:
        yield not_applicable(check, "none named: -o looks at one")
        return
    _refuse(case, path)
    if not path.exists():
        yield ok(check, f"{path} will be made in {existing_folder(path)}")
    else:
        yield ok(check, f"{path}: {_state_words(RunFolder(path=path))}")


def _refuse(case: Case, path: Path) -> None:
    """Raises what would stop a run here."""
    refuse_foreign_folder(path)
    above = existing_folder(path)
    if not os.access(above, os.W_OK | os.X_OK):
        raise EnvironmentFault(f"cannot work in {path}: {above} cannot be written to; choose another run directory")
    if (holder := lock_holder(path)) is not None:
        raise RunLocked(f"another process (pid {holder}) works in {path}: wait for it to end, or choose another run directory")
    run = RunFolder(path=path)
    if run.protocol.exists():
        check_protocol(run, case.protocol)
    _check_base(case, run)


def _check_base(case: Case, run: RunFolder) -> None:
    """Refuse a run of another base, as far as its size tells; of a small base, its hash.

    Raises:
        InputError: as the run would, once it has hashed the base.
    """
    held = read_json(run.manifest)
    base = held.get("base") if isinstance(held, dict) else None
    if not isinstance(base, dict):
        return
    header = case.model.header
    found = f"one of {header.file_bytes} bytes" if base.get("size_bytes") != header.file_bytes else None
    if found is None and case.measure and header.file_bytes <= _HASHED_BYTES and len(header.parts) == 1:
        sha256 = sha256_file(header.parts[0])
        found = sha256 if sha256 != base.get("sha256") else None
    if found is not None:
        raise InputError(f"{run.path} holds a run of another base: expected sha256 {base.get('sha256')} ({base.get('size_bytes')} "
                         f"bytes), found {found} for {header.path}: choose another run directory")


def _state_words(run: RunFolder) -> str:
    held = read_json(run.manifest)
    if not isinstance(held, dict):
        return "empty, or begun and not far"
    tiers = held.get("tiers")
    measured = sorted(map(str, tiers)) if isinstance(tiers, dict) else []
    return f"a run of this protocol; measured: {_named(measured) or 'nothing yet'}"


def look_at_leftovers(case: Case) -> Iterator[Finding]:
    """What killed runs, other protocols and other builds left in the run directory."""
    check, path = "leftovers", case.run
    if path is None or not path.is_dir():
        yield not_applicable(check, "no run directory yet")
        return
    run = RunFolder(path=path)
    lines = [line for line in (_temporary(run), _lock(run), _files(case, run), _parts(case, run)) if line]
    faults = [(found, fix) for found, fix in lines if fix]
    if faults:
        yield warning(check, "; ".join(found for found, _ in lines), "; ".join(fix for _, fix in faults))
    else:
        yield ok(check, "; ".join(found for found, _ in lines) or "none")


def _temporary(run: RunFolder) -> tuple[str, str] | None:
    left = find_leftovers(run.path)
    if not left:
        return None
    size_bytes = sum(path.stat().st_size for path in left)
    return f"{len(left)} temporary file(s) of a killed run, {format_bytes(size_bytes)}", "let the run go on, it removes them first"


def _lock(run: RunFolder) -> tuple[str, str] | None:
    """The text in a lock file says nothing by itself: the kernel's lock ended with its holder."""
    try:
        holder = (run.path / ".lock").read_text(errors="replace").strip()[:20]
    except OSError:
        return None
    return (f"the lock of pid {holder}, which is gone: it holds nothing", "") if holder and lock_holder(run.path) is None else None


def _files(case: Case, run: RunFolder) -> tuple[str, str] | None:
    """Files among the tiers that are none of this ladder's, and damaged ones."""
    base = case.model.header.parts[0]
    ours = {tier_file_name(base, tier.name) for tier in case.protocol.plan.tiers}
    there = sorted(run.quants.glob("*.gguf"))
    foreign = [p.name for p in there if p.name not in ours and not p.name.startswith("mtp-")]
    damaged = [p.name for p in there if p.name in ours and _is_damaged(p)]
    words = [f"tiers of another protocol or base: {_named(foreign)}"] if foreign else []
    words += [f"damaged tiers, which are made again: {_named(damaged)}"] if damaged else []
    fixes = [f"delete them from {run.quants}"] if foreign else []
    fixes += ["let the run go on"] if damaged else []
    return ("; ".join(words), "; ".join(fixes)) if words else None


def _is_damaged(path: Path) -> bool:
    try:
        read_header(path)
    except GgufError:
        return True
    return False


def _parts(case: Case, run: RunFolder) -> tuple[str, str] | None:
    """Part files of rows: those that the audit of a tier here goes on with, and those that nothing takes up again."""
    there = {path.stem: path for path in (run.parts / "audit").glob("*.rows")}
    if not there:
        return None
    known = _audit_ids(case, run)
    if known is None:
        return f"{len(there)} part file(s) of rows, which the run takes up or leaves", ""
    resumed = sorted({tier for audit_id, tier in known.items() if audit_id in there})
    orphans = sorted(audit_id for audit_id in there if audit_id not in known)
    words = [f"rows of {_named(resumed)} are there in part, and go on"] if resumed else []
    if not orphans:
        return "; ".join(words), ""
    size_bytes = sum(there[audit_id].stat().st_size for audit_id in orphans)
    words.append(f"{len(orphans)} part file(s), {format_bytes(size_bytes)}, of no tier's audit here: of another build, device or "
                 "file, or of noise floors")
    return "; ".join(words), f"delete them from {run.parts / 'audit'}, unless noise floors are under way"


def _audit_ids(case: Case, run: RunFolder) -> dict[str, str] | None:
    """The ids under which rows of this run's tiers gather, to the tiers; None where the text is not cut into tokens."""
    held: Any = read_json(run.manifest)
    try:
        base = str(held["base"]["sha256"])
        evaluations = [case.evaluation(name) for name in case.protocol.eval.corpora]
    except (TypeError, KeyError, Unknown, QuantkitError):
        return None
    found = {}
    for tier in case.protocol.plan.tiers:
        record: Any = read_json(run.record("quantize", tier.name))
        if isinstance(record, dict) and isinstance(record.get("subject"), dict):
            q = str(record["subject"].get("sha256"))
            found.update({evaluation.audit_id(base, q): tier.name for evaluation in evaluations if evaluation is not None})
    return found


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_N_NAMED]) + (f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else "")
