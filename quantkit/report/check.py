"""`--check`: the report made again from its records must be the report that is there, byte for byte."""

from __future__ import annotations

import difflib
from pathlib import Path

from quantkit.core.errors import CheckFailed, InputError
from quantkit.job.rundir import RunFolder
from quantkit.report.card import CardOptions, updated_card
from quantkit.report.run_data import read_run
from quantkit.report.run_report import render_report, report_names

_MAX_SHOWN = 90


def check_report(path: Path) -> int:
    """Compare the report of a run with one made now from the same records; nothing is written.

    Returns:
        How many files were compared.

    Raises:
        InputError: no run there.
        CheckFailed: names every file that differs, is missing or is left over, and the first line that differs.
    """
    run = RunFolder(path=path)
    made = render_report(run)
    faults = []
    for name in sorted(report_names(made) | set(made)):
        file = run.path / name
        if name not in made:
            if file.exists():
                faults.append(f"{name}: expected none, since its records are not there")
        elif not file.exists():
            faults.append(f"{name}: missing")
        elif (held := file.read_bytes()) != made[name]:
            faults.append(f"{name}: {_difference(name, held, made[name])}")
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise CheckFailed(f"{len(faults)} of {len(made)} files of the report in {path} are not what its records give:\n{listed}\n"
                          "make it again with `quantkit report`, or find out who changed it")
    return len(made)


def check_card(path: Path, run: Path) -> None:
    """Compare the block of a card with one made now.

    Raises:
        InputError: no card there, or none with markers.
        CheckFailed: the block is out of date; says where.
    """
    if not path.exists():
        raise InputError(f"expected a card at {path}, found none: make it with `quantkit report RUN --update {path.name}`")
    held = path.read_bytes().decode("utf-8", "surrogateescape")
    made = updated_card(path, read_run(run), CardOptions())
    if held != made:
        raise CheckFailed(f"the block in {path} is not what the records of {run} give: {first_difference(held, made)}; make it "
                          "again with `quantkit report RUN --update`")


def _difference(name: str, held: bytes, made: bytes) -> str:
    """Where two versions part, or with which matplotlib each was drawn."""
    drawn = [_matplotlib_of(content) for content in (held, made)]
    if drawn[0] != drawn[1]:
        return f"drawn with {drawn[0] or 'something else'}, here with {drawn[1]}"
    if name.endswith((".png", ".parquet")):
        return "other bytes"
    return first_difference(held.decode("utf-8", "replace"), made.decode("utf-8", "replace"))


def first_difference(held: str, made: str) -> str:
    """The first line that differs, as it is and as it should be."""
    old, new = held.splitlines(), made.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            found, expected = (_shown(lines[a:b]) for lines, a, b in ((old, i1, i2), (new, j1, j2)))
            return f"line {i1 + 1} is {found}, expected {expected}"
    return "other line ends"


def _shown(lines: list[str]) -> str:
    if not lines:
        return "nothing"
    return ascii(lines[0] if len(lines[0]) <= _MAX_SHOWN else lines[0][:_MAX_SHOWN] + "…")


def _matplotlib_of(content: bytes) -> str:
    """What a PNG or SVG says it was drawn with; the same for everything else."""
    start = content[:3000].lower().find(b"matplotlib v")
    return content[start:start + 40].split(b",")[0].decode("ascii", "replace") if start >= 0 else ""
