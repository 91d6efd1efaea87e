"""`quantkit plan`: what every tensor would become, and what a tier would weigh, before any work; or the plan of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from quantkit.cli.options import PATH
from quantkit.cli.output import Cell, csv_table, format_option, json_text, md_table, md_text, visible
from quantkit.core.units import MIB
from quantkit.spec.plan import Plan, PlanRow

_LADDER_COLUMNS = ("tier", "ftype", "tensor bytes", "MiB", "bpw", "bpw core", "types by parameters")
_TENSOR_COLUMNS = ("tensor", "shape", "from", "to", "bytes", "rule")
_CSV_COLUMNS = ("tier", "ftype", "name", "shape", "role", "source_type", "type", "wanted", "change", "rule", "quantizable",
                "size_bytes")


_TEMPLATE = "wikitext2-v1"  # of an extracted plan: what it does not say itself
_N_SHOWN = 10


@click.command()
@click.option("-b", "--base", type=PATH, help="The BF16 GGUF, or the first part of a split one.")
@click.option("-p", "--protocol", metavar="NAME|FILE", help="A published protocol or a .toml file.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="Derive a protocol: another value for one key. It has its own ids and is marked in every table.")
@click.option("-t", "--tier", "tiers", multiple=True,
              help="A tier to show tensor by tensor; may be repeated [default: all, in sum].")
@click.option("--imatrix", type=PATH, help="Importance matrix to plan with [default: one that covers every matrix].")
@click.option("--from", "model", type=PATH, metavar="MODEL",
              help="Write the plan of this GGUF, anyone's, as a protocol of one tier.")
@click.option("-o", "--output", type=PATH, help="With --from: the protocol file [default: stdout].")
@click.option("--force", is_flag=True, help="With -o: replace an existing file.")
@format_option
def plan(base: Path | None, protocol: str | None, settings: tuple[str, ...], tiers: tuple[str, ...], imatrix: Path | None,
         model: Path | None, output: Path | None, force: bool, output_format: str) -> None:
    """Show the plan of a ladder: types, exact bytes, and the rule that chose each type.

    Whatever cannot be carried out is refused here as it would be by `quantize`. JSON and CSV always hold every tensor.

    With --from, the tensor types of MODEL become a protocol file that `quantize` and `run` take with -p. With -b it is held against
    that base first; -p names the protocol for everything but the plan [default: wikitext2-v1].
    """
    if model is not None:
        if tiers or imatrix is not None or output_format != "md":
            raise click.UsageError("--from goes with -b, -p, --set, -o and --force only")
        _write_plan_of(model, base, protocol or _TEMPLATE, settings, output, force)
        return
    if base is None or protocol is None:
        raise click.UsageError("a plan needs -b and -p, or --from MODEL")
    if output is not None or force:
        raise click.UsageError("-o and --force go with --from only: a plan is printed")
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


def _write_plan_of(model: Path, base: Path | None, template: str, settings: Sequence[str], output: Path | None,
                   force: bool) -> None:
    from quantkit.core.files import refuse_overwrite, write_atomic
    from quantkit.spec.gguf_header import read_header
    from quantkit.spec.model import describe_model
    from quantkit.spec.plan_from import apply_to_base, as_base, differences, extract_protocol, require_same_tensors
    from quantkit.spec.protocol import load_protocol, write_protocol

    header = read_header(model)
    info = describe_model(header)
    target = as_base(info) if base is None else describe_model(read_header(base))
    if output is not None:
        refuse_overwrite(output, [*header.parts, *target.header.parts], force=force)
    if base is not None:
        require_same_tensors(info, target)
    made = extract_protocol(info, load_protocol(template, settings))
    other = differences(info, apply_to_base(made, target))
    for d in other[:_N_SHOWN]:
        click.echo(f"note: {visible(d.name)} is {d.in_file} in the file, and becomes {d.planned}: {visible(d.rule)}", err=True)
    if len(other) > _N_SHOWN:
        click.echo(f"note: so it is with {len(other) - _N_SHOWN} more", err=True)
    tier = made.plan.tiers[0]
    click.echo(f"tier {tier.name}: {len(tier.rules)} rules above {tier.default} give {len(header.tensors) - len(other)} of "
               f"{len(header.tensors)} tensors the file's type", err=True)
    if output is None:
        click.echo(write_protocol(made).decode(), nl=False)
    else:
        write_atomic(output, write_protocol(made))


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
