"""How a run ends on the command line: the report is written, the table shown, failures told."""

from __future__ import annotations

import click

from quantkit.core.errors import EnvironmentFault
from quantkit.job.ladder import RunResult


def finish_run(result: RunResult) -> None:
    """Write the report, print the table to stdout, name the folder.

    Raises:
        EnvironmentFault: some tiers failed; the others' results stand.
    """
    from quantkit.report.run_report import write_report

    if result.result_id is not None:
        click.echo(write_report(result.folder.path).markdown)
        click.echo(f"report: {result.folder.report}", err=True)
    if result.failed:
        lines = "\n".join(f"  {name}: {error}" for name, error in result.failed.items())
        codes = {error.exit_code for error in result.failed.values()}
        error = EnvironmentFault(f"{len(result.failed)} of the tiers failed, the others stand; see to each:\n{lines}")
        error.exit_code = codes.pop() if len(codes) == 1 else EnvironmentFault.exit_code
        raise error
