"""`quantkit doctor`: what would go wrong later, found before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, engine_options, measure_options, protocol_options, run_options
from quantkit.cli.output import Cell, format_option, md_table, md_text, render_table

if TYPE_CHECKING:
    from quantkit.job.doctor_case import Finding

_COLUMNS = ("check", "state", "found", "fix")
_WIDTH = 96  # of a cell on a terminal; the whole text stands below the table


@click.command()
@base_option
@protocol_options
@click.option("-o", "--output", type=PATH, help="The run directory that is meant, new or begun.")
@click.option("--tiers", default="", metavar="A,B,...", help="Only these tiers of the protocol.")
@click.option("--imatrix", type=PATH, help="The importance matrix that the run will use instead of collecting one.")
@click.option("--drop-files", is_flag=True, help="The run will delete each tier's file once it is measured.")
@click.option("--no-measure", is_flag=True, help="Neither decode a chunk to tell the time, nor hash a small base.")
@measure_options
@engine_options
@format_option
def doctor(base: Path, protocol: str, settings: tuple[str, ...], output: Path | None, tiers: str, no_measure: bool,
           output_format: str, **engine: Any) -> None:
    """Look at everything that a run of a protocol on BASE depends on, and say what to do about each fault.

    Exit 0 where nothing would stop the run, 2 where an input must be mended, 3 where only this machine is in the way. Nothing is
    written.
    """
    from quantkit.core.errors import QuantkitError
    from quantkit.job.doctor import CHECKS, examine, exit_code
    from quantkit.job.doctor_case import Case
    from quantkit.spec.protocol import Protocol, load_protocol

    loaded: Protocol | QuantkitError
    try:
        loaded = load_protocol(protocol, settings)
    except QuantkitError as error:
        loaded = error
    names = [name.strip() for name in tiers.split(",") if name.strip()] or None
    findings: list[Finding] = []
    with stderr_progress() as progress, Case(base, loaded, tiers=names, run=output, options=run_options(**engine),
                                             measure=not no_measure, progress=progress) as case:
        progress.start("doctor", len(CHECKS))
        for check in CHECKS:
            findings += examine(case, [check])
            progress.advance()
        progress.finish()
    text = _as_markdown(findings) if output_format == "md" else render_table(_COLUMNS, map(_row, findings), output_format)
    click.echo(text, nl=False)
    click.get_current_context().exit(exit_code(findings))


def _row(finding: Finding) -> tuple[Cell, ...]:
    return finding.check, finding.state, finding.found, finding.fix


def _as_markdown(findings: Sequence[Finding]) -> str:
    """The table with cells that fit a terminal, and below it, whole, the lines that were cut."""
    rows = [tuple(_cut(str(cell)) for cell in _row(finding)) for finding in findings]
    notes = [f"- {md_text(f.check)}: {md_text(f.found)}\n" + (f"  Fix: {md_text(f.fix)}\n" if f.fix else "") for f in findings
             if max(len(f.found), len(f.fix)) > _WIDTH]
    count = {state: sum(f.state == state for f in findings) for state in ("problem", "warning")}
    end = f"{count['problem']} problem(s), {count['warning']} warning(s)\n"
    return "\n".join(filter(None, [md_table(_COLUMNS, rows), "".join(notes), end]))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[:_WIDTH - 1] + "…"
