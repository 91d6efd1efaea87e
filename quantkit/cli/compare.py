"""`quantkit compare`: several runs on one base, side by side."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("runs", type=PATH, nargs=-1, required=True)
@click.option("--format", "format_", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True,
              help="Which table to print.")
@click.option("-o", "--output", type=PATH, metavar="FOLDER", help="Write all tables and the pictures there too.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@click.option("--pairs", is_flag=True, help="Print the verdict of every pair instead; one RUN will do.")
def compare(runs: tuple[Path, ...], format_: str, output: Path | None, force: bool, pairs: bool) -> None:
    """Put the files of several RUNS on one table: publishers beside each other, versions beside each other.

    Runs of another base, other tokens or another evaluation are refused. Every pair of files is tested.
    """
    from quantkit.core.files import refuse_overwrite, write_atomic
    from quantkit.job.foreign import reading_records
    from quantkit.report.comparison import compare_run_folders, comparison_csv, comparison_json, comparison_md, draw_comparison

    if pairs:
        if output is not None or force:
            raise click.UsageError("--pairs prints: give --format, and no -o or --force.")
        click.echo(_pairs(runs, format_), nl=False)
        return
    with reading_records(_shown(runs)):
        found = compare_run_folders(runs)
        texts = {"md": comparison_md(found), "json": comparison_json(found), "csv": comparison_csv(found)}
        pictures = draw_comparison(found) if output is not None else {}
    if output is not None:
        made = {f"comparison.{kind}": text.encode() for kind, text in texts.items()}
        for name, picture in pictures.items():
            made[f"{name}.png"], made[f"{name}.svg"] = picture.png, picture.svg
        for name in made:
            refuse_overwrite(output / name, [run / "manifest.json" for run in runs], force=force)
        for name, content in made.items():
            write_atomic(output / name, content)
        click.echo(f"comparison: {output}", err=True)
    click.echo(texts[format_], nl=False)


def _pairs(runs: tuple[Path, ...], format_: str) -> str:
    """The verdicts of one run from its records; of several, from all their rows together."""
    from quantkit.core.errors import InputError
    from quantkit.job.foreign import reading_records
    from quantkit.report.comparison import compare_run_folders
    from quantkit.report.run_data import read_run
    from quantkit.report.verdict_table import pairs_csv, pairs_json, pairs_md

    with reading_records(_shown(runs)):
        verdicts = read_run(runs[0]).verdicts if len(runs) == 1 else compare_run_folders(runs).verdicts
    if verdicts is None:
        raise InputError(f"expected verdicts of all tiers of {runs[0]} in audit/pairs.json, found none or those of other rows: run "
                         "the command that made it again")
    return {"md": pairs_md, "json": pairs_json, "csv": pairs_csv}[format_](verdicts)


def _shown(runs: tuple[Path, ...]) -> str:
    return " or ".join(map(str, runs))
