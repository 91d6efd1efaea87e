"""`quantkit publish`: a run's bundle to the hub; without --yes only what would happen."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quantkit.cli.options import PATH
from quantkit.cli.output import Cell, format_option, render_table, visible


@click.command()
@click.argument("run", type=PATH)
@click.option("--repo", required=True, metavar="ID", help="The repository, such as user/model-GGUF.")
@click.option("--yes", is_flag=True, help="Send it; without this nothing is.")
@format_option
def publish(run: Path, repo: str, yes: bool, output_format: str) -> None:
    """Publish what the manifest of RUN lists, and the card (RUN/README.md or RUN/report/README.md) last.

    Without --yes the files are checked, searched for tokens and paths, compared with the repository and listed; nothing is sent.
    With it the bundle is verified, and what is missing there is sent and held against the hub's own sizes and hashes; after an
    interruption the same command goes on. Remote files are never deleted. The hub is huggingface_hub's, or the address in
    HF_ENDPOINT.
    """
    from quantkit.cli.bars import Lines
    from quantkit.core.units import format_bytes
    from quantkit.job.hub.client import hide_library_bars
    from quantkit.job.hub.publish import plan_publish
    from quantkit.job.hub.publish import publish as send
    from quantkit.job.verify import verify_bundle
    from quantkit.report.run_report import render_report

    plan = plan_publish(run, repo)
    rows: list[tuple[Cell, ...]] = [(item.action, item.file.path, item.file.size_bytes, item.file.sha256) for item in plan.items]
    click.echo(render_table(("action", "file", "bytes", "sha256"), rows, output_format), nl=False)
    n_bytes = sum(item.file.size_bytes for item in plan.items if item.action != "keep")
    if plan.fault is not None:
        click.echo(f"what the repository holds is unknown: {plan.fault}", err=True)
    elif plan.commit is None:
        click.echo(f"{visible(repo)} does not exist at {plan.endpoint}: it will be made, by default for all to see", err=True)
    elif plan.last_commit not in (None, plan.commit):
        click.echo(f"{visible(repo)} was changed since this run was last published there", err=True)
    if plan.bundle.card is None:
        click.echo(f"card: none; `quantkit report {run} --update {run}/README.md` writes one", err=True)
    else:
        click.echo(f"card: {plan.bundle.card.local.relative_to(plan.bundle.folder)}, sent last as README.md", err=True)
    if not yes:
        click.echo(f"nothing was sent: {format_bytes(n_bytes)} would be; pass --yes to send it", err=True)
        return
    verify_bundle(run, render_report).require(str(run))
    if not sys.stderr.isatty():
        hide_library_bars()
    with Lines() as progress:  # on a terminal the library's own bars move
        commit = send(plan, progress)
    click.echo(f"published result {plan.bundle.result_id[:12]} in {visible(repo)} at commit {commit}", err=True)
