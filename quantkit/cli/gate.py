"""`quantkit gate`: may a candidate's bundle replace the published one?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.options import PATH, protocol_options
from quantkit.cli.output import Cell, format_option, json_text, render_table, visible

if TYPE_CHECKING:
    from quantkit.job.gate import GateResult
    from quantkit.spec.protocol import Protocol

_COLUMNS = ("Tier", "Obligation", "Incumbent", "Candidate", "Loss", "Margin", "p of worse", "p of no gain", "Verdict", "Rank",
            "Reason")


@click.command()
@click.argument("candidate", type=PATH)
@click.option("--against", "incumbent", type=PATH, help="The incumbent's bundle [default: the store's current one].")
@protocol_options
@click.option("--tier", "tiers", multiple=True, metavar="T", help="Compare only this tier, all others being equal.")
@click.option("--store", type=PATH, help="Where bundles replace each other: the candidate becomes STORE/current, or is kept.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and leave the store as it is.")
@click.option("--junit", type=PATH, help="Write the verdicts as JUnit XML too.")
@format_option
def gate(candidate: Path, incumbent: Path | None, protocol: str, settings: tuple[str, ...], tiers: tuple[str, ...],
         store: Path | None, dry_run: bool, junit: Path | None, output_format: str) -> None:
    """Take a candidate if no protected number got worse and one got better; exit 1 if it is not taken.

    Without --store nothing is written: the exit code says whether the rule allows it.
    """
    from quantkit.core.errors import CheckFailed, InputError
    from quantkit.core.files import write_atomic
    from quantkit.job.foreign import reading_records
    from quantkit.job.gate import gate_runs, gate_store
    from quantkit.report.run_report import render_report
    from quantkit.spec.protocol import load_protocol

    loaded, names = load_protocol(protocol, settings), tiers or None
    with reading_records(f"{candidate} or its incumbent"):
        if store is not None:
            result = gate_store(candidate, incumbent, loaded, store, render_report, names, dry_run=dry_run)
        elif incumbent is not None:
            result = gate_runs(candidate, incumbent, loaded, render_report, names)
        else:
            raise InputError("expected an incumbent to compare with, got none: give --against RUN, --store STORE, or both")
    if junit is not None:
        from quantkit.cli.junit import gate_junit

        write_atomic(junit, gate_junit(result))
    click.echo(_render(result, loaded, output_format), nl=False)
    click.echo(_sentence(result, store, dry_run), err=True)
    if not result.commits:
        raise CheckFailed(f"{candidate} does not replace the incumbent: {result.label}"
                          + (f", but {result.reason}" if result.reason else "")
                          + "; see the obligations in the table, or keep the incumbent")


def _render(result: GateResult, protocol: Protocol, output_format: str) -> str:
    if output_format == "json":
        return json_text({**result.to_json(protocol), "moved": result.moved})
    rows: list[list[Cell]] = []
    for judged in result.obligations:
        o = judged.obligation
        numbers: list[Any] = [o.incumbent, o.candidate, o.loss, o.margin, o.p_not_worse, o.p_better_holm]
        if output_format == "md":
            numbers = [None if number is None else f"{number:.4g}" for number in numbers]
        rows.append([judged.tier, o.name, *numbers, o.verdict, f"{judged.incumbent_rank} → {judged.candidate_rank}", o.reason])
    table = render_table(_COLUMNS, rows, output_format)
    return table if output_format == "csv" else f"{table}\n**{result.label}**\n"


def _sentence(result: GateResult, store: Path | None, dry_run: bool) -> str:
    counts = f"{result.n_commits} of at most {result.bound} commits (sum of first ranks {result.first_rank_sum}, max_commits " \
             f"{result.max_commits})"
    if result.moved:
        return visible(f"{store}/current is {result.candidate} now; {counts}")
    if store is None or dry_run:
        return f"nothing was written; {counts}"
    kept = "" if result.candidate == result.incumbent else f", the candidate is kept in {store}/rejected/{result.candidate}"
    return visible(f"{store}/current is {result.incumbent} as before{kept}; {counts}")
