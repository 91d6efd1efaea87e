"""`verify`: what a stranger can check of a bundle with nothing but the bundle.

    manifest, result id   the manifest by its own seal; the id by what it is made of, and by one that was published
    files                 every file by name, size and hash; none missing, none added
    protocol, plans, importance matrix, tier files, references     the records by each other
    rows, base's columns  the rows by what they say of themselves, the protocol's chunks, and each other
    summaries, tables     computed again from the rows, and made again from the summaries

What needs the base is in `job.regenerate`: the tiers' bytes from the plan, and rows from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from quantkit.job.rundir import RunFolder
from quantkit.job.verify_files import check_files, check_manifest
from quantkit.job.verify_findings import Findings, Verification
from quantkit.job.verify_records import (
    Bundle,
    check_imatrix,
    check_plans,
    check_protocol,
    check_references,
    check_tier_files,
    open_bundle,
)
from quantkit.job.verify_rows import check_rows, check_summaries

#: Makes a run's tables from its records: text by path in the run directory.
TableMaker = Callable[[RunFolder], Mapping[str, str]]


def verify_bundle(folder: Path, make_tables: TableMaker, expected_id: str | None = None) -> Verification:
    """Check everything that needs no base.

    Args:
        folder: a run directory, or a bundle that was downloaded.
        make_tables: the floor above makes tables; it is given here.
        expected_id: the result id that was published; catches a bundle that was rebuilt around other numbers.

    Returns:
        Checks with their counts, and every failure.

    Raises:
        InputError: no bundle there.
    """
    findings = Findings()
    manifest = check_manifest(folder, findings, expected_id)
    if manifest is None:
        return findings.result(None)
    check_files(folder, manifest, findings)
    bundle = open_bundle(folder, manifest, findings)
    protocol = check_protocol(bundle)
    check_tier_files(bundle, check_plans(bundle))
    check_imatrix(bundle)
    check_references(bundle)
    if protocol is None:
        findings.note("rows", "not checked: the protocol cannot be read")
    else:
        check_summaries(bundle, check_rows(bundle, protocol))
        _check_tables(bundle, make_tables)
    return findings.result(manifest.facts["result_id"])


def _check_tables(bundle: Bundle, make_tables: TableMaker) -> None:
    """The tables are those of the summaries, byte for byte."""
    findings = bundle.findings
    inputs = ["protocol.toml", *(f"audit/{tier}/summary.json" for tier in bundle.tiers)]
    if not all(bundle.is_sound(name) for name in inputs):
        findings.note("tables", "not checked: the records that they are made of failed")
        return
    with findings.reading("tables", "report", "tables that the records come to"):
        for name, text in make_tables(bundle.run).items():
            if name not in bundle.manifest.entries:
                findings.note("tables", f"{name} is not in the bundle")
            elif bundle.is_sound(name):
                found = (bundle.run.path / name).read_bytes()
                findings.count("tables")
                if found != text.encode():
                    findings.fail("tables", name, "the table that the summaries come to", _first_difference(text, found))


def _first_difference(text: str, found: bytes) -> str:
    lines = found.decode(errors="replace").splitlines()
    for i, line in enumerate(text.splitlines()):
        if i >= len(lines) or lines[i] != line:
            return f"line {i + 1}: {lines[i] if i < len(lines) else 'missing'}"
    return "other bytes"
