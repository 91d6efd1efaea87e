"""`verify`: what a stranger can check of a bundle with nothing but the bundle.

    manifest, result id   the manifest by its own seal; the id by what it is made of, and by one that was published
    files                 every file by name, size and hash; none missing, none added
    protocol, plans, importance matrix, tier files, references     the records by each other
    rows, base's columns  the rows by what they say of themselves, the protocol's chunks, and each other
    summaries, floors, kld_weights, slices, verdicts    computed again from the rows
    report                made again from the records

What needs the base is in `job.regenerate`: the tiers' bytes from the plan, and rows from the files.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from quantkit import __version__
from quantkit.job.rundir import RunFolder
from quantkit.job.verify_computed import check_computed, check_own_rows, check_summaries
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
from quantkit.job.verify_rows import check_rows

#: Makes a run's report from its records: the content of each file by its path in the run directory.
ReportMaker = Callable[[RunFolder], Mapping[str, bytes]]

_SAME_EVERYWHERE = (".md", ".csv", ".json")  # the rest are bytes of a version of the libraries that draw and pack
_LIBRARIES = ("matplotlib", "numpy", "pyarrow")


def verify_bundle(folder: Path, make_report: ReportMaker, expected_id: str | None = None) -> Verification:
    """Check everything that needs no base.

    Args:
        folder: a run directory, or a bundle that was downloaded.
        make_report: the floor above makes reports; it is given here.
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
    check_tier_files(bundle, check_plans(bundle, protocol))
    check_imatrix(bundle)
    check_references(bundle)
    if protocol is None:
        findings.note("rows", "not checked: the protocol cannot be read")
    else:
        for text in bundle.texts:
            read = check_rows(bundle, text, protocol)
            check_summaries(bundle, text, read)
            check_own_rows(bundle, text)
            check_computed(bundle, text, protocol, read)
        _check_report(bundle, make_report)
    return findings.result(manifest.facts["result_id"])


def _check_report(bundle: Bundle, make_report: ReportMaker) -> None:
    """Tables, page and pictures are those of the records, byte for byte.

    Another version may word a report differently; what is drawn or packed is compared only where the same libraries did it.
    """
    findings = bundle.findings
    if findings.failures:
        findings.note("report", "not made again: other checks failed")
        return
    if bundle.facts["quantkit"] != __version__:
        findings.note("report", f"not made again: written by quantkit {bundle.facts['quantkit']}, this is {__version__}")
        return
    libraries = bundle.facts["libraries"]
    other = [f"{name} {importlib.metadata.version(name)} here, {libraries.get(name)} there" for name in _LIBRARIES
             if importlib.metadata.version(name) != libraries.get(name)]
    with findings.reading("report", "report", "a report that the records come to"):
        for name, content in make_report(bundle.run).items():
            if name not in bundle.manifest.entries:
                findings.note("report", f"{name} is not in the bundle")
            elif other and not name.endswith(_SAME_EVERYWHERE):
                findings.note("report", f"{name} was not made again: {'; '.join(other)}")
            elif bundle.is_sound(name):
                found = (bundle.run.path / name).read_bytes()
                findings.count("report")
                if found != content:
                    findings.fail("report", name, "the bytes that the records come to", _first_difference(content, found))


def _first_difference(content: bytes, found: bytes) -> str:
    expected, lines = (data.decode(errors="replace").splitlines() for data in (content, found))
    for i, line in enumerate(expected):
        if i >= len(lines) or lines[i] != line:
            return f"line {i + 1}: {lines[i] if i < len(lines) else 'missing'}"
    return "more lines"
