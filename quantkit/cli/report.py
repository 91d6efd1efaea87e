"""`quantkit report`: the tables of a run, from its records."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("run", type=PATH)
@click.option("--format", "format_", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True,
              help="What to print; all three are written.")
def report(run: Path, format_: str) -> None:
    """Write RUN/report/retention.md, .csv and .json from the records of a run, and print one of them."""
    from quantkit.report.run_report import write_report

    written = write_report(run)
    click.echo({"md": written.markdown, "json": written.json, "csv": written.csv}[format_], nl=False)
