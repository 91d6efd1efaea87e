"""`quantkit plan`: what every tensor would become, and what a tier would weigh, before any work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from quantkit.cli.options import PATH, base_option, protocol_options
from quantkit.cli.output import Cell, csv_table, format_option, json_text, md_table, md_text
from quantkit.core.units import MIB
from quantkit.spec.plan import Plan, PlanRow

_LADDER_COLUMNS = ("tier", "ftype", "tensor bytes", "MiB", "bpw", "bpw core", "types by parameters")
_TENSOR_COLUMNS = ("tensor", "shape", "from", "to", "bytes", "rule")
_CSV_COLUMNS = ("tier", "ftype", "name", "shape", "role", "source_type", "type", "wanted", "change", "rule", "quantizable",
                "size_bytes")


@click.command()
@base_option
@protocol_options
@click.option("-t", "--tier", "tiers", multiple=True,
              help="A tier to show tensor by tensor; may be repeated [default: all, in sum].")
@click.option("--imatrix", type=PATH, help="Importance matrix to plan with [default: one that covers every matrix].")
@format_option
def plan(base: Path, protocol: str, settings: tuple[str, ...], tiers: tuple[str, ...], imatrix: Path | None,
         output_format: str) -> None:
    """Show the plan of a ladder: types, exact bytes, and the rule that chose each type.

    Whatever cannot be carried out is refused here as it would be by `quantize`. JSON and CSV always hold every tensor.
    """
    from quantkit.job.plans import resolve_ladder
    from quantkit.spec.protocol import load_protocol

    plans = resolve_ladder(base, load_protocol(protocol, settings), list(dict.fromkeys(tiers)) or None, imatrix)
    if output_format == "json":
        text = json_text([p.to_json() for p in plans])
    elif output_format == "csv":
        text = csv_table(_CSV_COLUMNS, (_csv_row(p, row) for p in plans for row in p.rows))
    else:
        text = _as_markdown(plans, with_tensors=bool(tiers))
    click.echo(text, nl=False)


def _as_markdown(plans: Sequence[Plan], *, with_tensors: bool) -> str:
    notes = [f"- {md_text(p.tier)}: {md_text(note)}\n" for p in plans for note in p.notes()]
    sections = [md_table(_LADDER_COLUMNS, (_ladder_row(p) for p in plans)), "".join(notes)]
    if with_tensors:
        for p in plans:
            sections += [f"## {md_text(p.tier)}\n", md_table(_TENSOR_COLUMNS, (_tensor_row(row) for row in p.rows))]
    return "\n".join(filter(None, sections))


def _ladder_row(p: Plan) -> tuple[Cell, ...]:
    types = ", ".join(f"{t.type} {t.n_params / p.n_params:.1%}" for t in p.types)
    core = None if p.bpw_core is None else f"{p.bpw_core:.4f}"
    return p.tier, p.ftype, f"{p.tensor_bytes:,}", f"{p.tensor_bytes / MIB:,.2f}", f"{p.bpw:.4f}", core, types


def _tensor_row(row: PlanRow) -> tuple[Cell, ...]:
    return row.name, _shape(row.shape), row.source_type, row.type, f"{row.size_bytes:,}", row.rule


def _csv_row(p: Plan, row: PlanRow) -> tuple[Cell, ...]:
    return (p.tier, p.ftype, row.name, _shape(row.shape), row.role, row.source_type, row.type, row.wanted, row.change, row.rule,
            row.quantizable, row.size_bytes)


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))
