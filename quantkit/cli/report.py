"""`quantkit report`: everything that people read of a run, from its records."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("run", type=PATH)
@click.option("--format", "format_", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True,
              help="Which table to print; all are written.")
@click.option("--check", is_flag=True, help="Write nothing: fail if the report is not what the records give.")
@click.option("--card", is_flag=True, help="Print a model card for the hub instead of the table.")
@click.option("--update", type=PATH, metavar="README.md",
              help="Replace the block between the markers of a card, or write a new card. With --check: fail if it is out of date.")
@click.option("--base-model", metavar="OWNER/NAME", help="The base's repository, for a new card [default: what its file says].")
@click.option("--license", "license_", metavar="ID", help="The licence, for a new card [default: what the base's file says].")
@click.option("--quantized-by", metavar="NAME", help="The publisher, for a new card.")
def report(run: Path, format_: str, check: bool, card: bool, update: Path | None, base_model: str | None, license_: str | None,
           quantized_by: str | None) -> None:
    """Write RUN/report from the records of a run: tables (md, csv, json, parquet), pictures (png, svg) and report.html.

    The same records give the same bytes.
    """
    from quantkit.job.foreign import reading_records
    from quantkit.report.card import CardOptions, missing_keys, new_card, updated_card, write_card
    from quantkit.report.check import check_card, check_report
    from quantkit.report.run_data import read_run
    from quantkit.report.run_report import write_report

    options = CardOptions(base_model=base_model, license=license_, quantized_by=quantized_by)
    with reading_records(run):
        if check:
            n_files = check_report(run)
            if update is not None:
                check_card(update, run)
            click.echo(f"{n_files} files of the report{' and the card' if update else ''} are what the records give", err=True)
            return
        written = write_report(run)
        data = read_run(run)
        is_new = card or (update is not None and not update.exists())
        if update is not None:
            write_card(update, updated_card(update, data, options), data)
            click.echo(f"card: {update}", err=True)
        if card:
            click.echo(new_card(data, options), nl=False)
        elif update is None:
            click.echo({"md": written.markdown, "json": written.json, "csv": written.csv}[format_], nl=False)
        if is_new and (missing := missing_keys(data, options)):
            click.echo(f"the hub also wants {', '.join(missing)} in a card's front matter: see --help", err=True)
