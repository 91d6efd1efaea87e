"""`quantkit remote`: the models of a repository on the hub, from their headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from quantkit.cli.output import Cell, csv_table, format_option, json_text, md_table, md_text, visible

if TYPE_CHECKING:
    from quantkit.job.hub.looks import ModelLook, PlanDiff, RepoLook

_COLUMNS = ("model", "files", "size", "ftype", "bpw", "bpw core", "MTP head", "chat template", "unlike stock", "unlike ours",
            "substituted")
_CSV_COLUMNS = ("name", "n_files", "size_bytes", "architecture", "ftype", "n_params", "bpw", "bpw_core", "mtp", "template_sha256",
                "n_unlike_stock", "n_unlike_ours", "n_substituted", "notes")
_DIFF_COLUMNS = ("tensors", "n", "in the file", "by the plan")


@click.command()
@click.argument("repo", metavar="ID")
@click.option("-p", "--protocol", metavar="NAME|FILE", help="Compare with this protocol's tiers too, by ftype.")
@click.option("--revision", metavar="REV", help="A commit, branch or tag [default: the head of the default branch].")
@format_option
def remote(repo: str, protocol: str | None, revision: str | None, output_format: str) -> None:
    """Look at every GGUF in the repository ID: only headers are read, some megabytes of each.

    Shown are types, bits per weight, whether the MTP head is there, the chat template's hash, the tensors that differ from what
    llama.cpp's mix of the file's ftype would give and from our tier, and what changed since the last look.
    """
    from quantkit.cli.bars import stderr_progress
    from quantkit.core.units import format_bytes
    from quantkit.job.hub.remote import look
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol) if protocol else None
    with stderr_progress() as progress:
        found = look(repo, progress, revision=revision, protocol=loaded)
    if output_format == "json":
        click.echo(json_text(dataclasses.asdict(found)), nl=False)
    elif output_format == "csv":
        click.echo(csv_table(_CSV_COLUMNS, (_csv_row(model) for model in found.models)), nl=False)
    else:
        click.echo(_as_markdown(found), nl=False)
    click.echo(f"read {format_bytes(found.n_bytes_read)} of {format_bytes(sum(m.size_bytes for m in found.models))}", err=True)
    for change in found.changes if found.changes is not None else ("this is the first look",):
        click.echo(f"since the last look: {visible(change)}", err=True)


def _as_markdown(found: RepoLook) -> str:
    sections = [f"# {md_text(found.repo_id)} at {found.commit[:12]}\n", md_table(_COLUMNS, (_row(m) for m in found.models)),
                "".join(f"- {md_text(m.name)}: {md_text(note)}\n" for m in found.models for note in m.notes)]
    for model in found.models:
        for diff in (model.stock, model.ours):
            if diff is not None and diff.n_different:
                sections += [f"## {md_text(model.name)} beside {md_text(diff.plan)}\n", md_table(_DIFF_COLUMNS, _diff_rows(diff))]
        if model.substituted:
            sections += [f"## {md_text(model.name)}: substituted\n", "".join(f"- {md_text(text)}\n" for text in model.substituted)]
    return "\n".join(filter(None, sections))


def _row(model: ModelLook) -> tuple[Cell, ...]:
    from quantkit.core.units import format_bytes

    template = model.template_sha256[:12] if model.template_sha256 else "none" if model.architecture else None
    return (model.name, model.n_files, format_bytes(model.size_bytes), model.ftype, _bpw(model.bpw), _bpw(model.bpw_core),
            model.mtp, template, _count(model.stock), _count(model.ours), len(model.substituted) or None)


def _csv_row(model: ModelLook) -> tuple[Cell, ...]:
    return (model.name, model.n_files, model.size_bytes, model.architecture, model.ftype, model.n_params, model.bpw, model.bpw_core,
            model.mtp, model.template_sha256, _count(model.stock), _count(model.ours), len(model.substituted),
            "; ".join(model.notes))


def _diff_rows(diff: PlanDiff) -> Sequence[tuple[Cell, ...]]:
    return [(group.tensors, group.n, group.in_file, group.planned) for group in diff.groups]


def _count(diff: PlanDiff | None) -> int | None:
    return None if diff is None else diff.n_different


def _bpw(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
