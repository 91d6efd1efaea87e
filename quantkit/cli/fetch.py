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
    """Download the bundle that was published in the repository ID: every file of its manifest, by size and sha256, nothing else."""
    from quantkit.cli.bars import stderr_progress
    from quantkit.core.units import format_bytes
    from quantkit.job.hub.fetch import fetch as download

    with stderr_progress() as progress:
        done = download(repo, output, progress, revision=revision, force=force)
    click.echo(f"{output}: result {done.result_id}, {done.n_files} files, {format_bytes(done.size_bytes)}, commit {done.commit}")
    click.echo(f"every file has the size and sha256 of its manifest; `quantkit verify {output}` recomputes the numbers", err=True)
