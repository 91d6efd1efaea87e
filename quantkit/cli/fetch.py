"""`quantkit fetch`: a published bundle into a folder."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("repo", metavar="ID")
@click.option("-o", "--output", required=True, type=PATH, help="The folder; one that an earlier fetch began is gone on with.")
@click.option("--revision", metavar="REV", help="A commit, branch or tag [default: the head of the default branch].")
@click.option("--force", is_flag=True, help="Replace files in the way.")
def fetch(repo: str, output: Path, revision: str | None, force: bool) -> None:
    """Download the bundle that was published in the repository ID, and verify it.

    Every file of its manifest is fetched and held against size and sha256, nothing else is; then numbers and tables are
    recomputed as `quantkit verify` does it. Exit 1 where something is not what it should be.
    """
    from quantkit.cli.bars import stderr_progress
    from quantkit.core.units import format_bytes
    from quantkit.job.hub.fetch import fetch as download
    from quantkit.job.verify import verify_bundle
    from quantkit.report.run_report import render_report

    with stderr_progress() as progress:
        done = download(repo, output, progress, revision=revision, force=force)
    verify_bundle(output, render_report).require(str(output))
    click.echo(f"{output}: result {done.result_id} verified, {done.n_files} files, {format_bytes(done.size_bytes)}, commit "
               f"{done.commit}")
