"""`quantkit search`: plans for byte budgets, proposed on measured costs, committed when proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, engine_options, protocol_options, run_options
from quantkit.cli.output import Cell, format_option, json_text, render_table, visible
from quantkit.core.units import parse_bytes

if TYPE_CHECKING:
    from quantkit.job.search_budget import Want
    from quantkit.spec.protocol import Protocol
    from quantkit.spec.search_records import Proposal, SearchResult

_COLUMNS = ("plan", "against", "bytes", "of budget", "KLD predicted", "KLD search", "KLD report", "incumbent's", "change", "99.9 %",
            "same top", "level", "label")


@click.command()
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The run directory; a search in it is resumed.")
@click.option("--size", "sizes", multiple=True, metavar="SIZE", help="A file of at most this size, such as 16.79GiB; repeatable.")
@click.option("--bpw", "bpws", multiple=True, type=click.FloatRange(0, 32, min_open=True),
              help="Tensor bits per weight of the whole file; repeatable.")
@click.option("--match", "matches", multiple=True, metavar="TIER", help="The bytes of llama.cpp's mix of this tier; repeatable.")
@click.option("--ladder", is_flag=True, help="Match every tier of the protocol from Q6_K down, from one measurement.")
@click.option("--quick", is_flag=True, help="Screen on few chunks, and verify nothing.")
@click.option("--ref", "refs", multiple=True, type=PATH,
              help="A reference pack in place of passes of the base, one for each text: repeat it. KLD is then a lower bound.")
@click.option("--imatrix", type=PATH, help="Use this importance matrix instead of collecting one.")
@engine_options
@format_option
def search(base: Path, protocol: str, settings: tuple[str, ...], output: Path, sizes: tuple[str, ...], bpws: tuple[float, ...],
           matches: tuple[str, ...], ladder: bool, quick: bool, refs: tuple[Path, ...], imatrix: Path | None,
           output_format: str, **engine: Any) -> None:
    """Search the types of all tensors for a byte budget: measure what each costs, spend bytes where they save most, prove it."""
    from quantkit.job.search import search as run_search
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    wants = _wants(loaded, sizes, bpws, matches, ladder)
    with stderr_progress() as progress:
        done = run_search(base, loaded, output, wants, progress, run_options(imatrix=imatrix, **engine), quick=quick,
                          refs=refs)
    click.echo(_text(done.result, output_format), nl=False)
    for tier, path in done.files.items():
        click.echo(f"{tier}: {path}", err=True)


def _wants(protocol: Protocol, sizes: Sequence[str], bpws: Sequence[float], matches: Sequence[str], ladder: bool) -> list[Want]:
    from quantkit.job.search_budget import Want
    from quantkit.spec.plan_rules import bits
    from quantkit.spec.tensor_types import FTYPES

    names = list(matches)
    if ladder:
        names += [t.name for t in protocol.plan.tiers
                  if (default := FTYPES[t.ftype].default_type) and bits(default) < bits("Q8_0") and t.name not in names]
    wants = [Want(kind="match", tier=name) for name in dict.fromkeys(names)]
    wants += [Want(kind="size", size_bytes=parse_bytes(size)) for size in sizes]
    wants += [Want(kind="bpw", bpw=bpw) for bpw in bpws]
    if not wants:
        raise click.UsageError("a search needs a budget: --size, --bpw, --match or --ladder")
    return wants


def _text(result: SearchResult, output_format: str) -> str:
    if output_format == "json":
        from quantkit.spec.json_records import record_to_json

        return json_text(record_to_json(result))
    table = render_table(_COLUMNS, [_row(p) for p in result.proposals], output_format)
    if output_format != "md" or not result.references:
        return table
    names = ", ".join(f"{visible(r.file)} (mass {r.mass:g})" for r in result.references)
    return f"{table}\nref: pack: every KLD is a lower bound, against {names}\n"


def _row(p: Proposal) -> tuple[Cell, ...]:
    judged = {o.name: o for o in p.obligations}
    kld, tail, top = (judged.get(name) for name in ("kld_mean", "kld_p999", "same_top_p"))
    return (p.tier, p.incumbent or None, f"{p.tensor_bytes:,}", f"{p.tensor_bytes / p.budget_bytes:.3%}", f"{p.predicted_kld:.6f}",
            f"{p.search_kld:.6f}", f"{kld.proposal:.6f}" if kld else None, f"{kld.incumbent:.6f}" if kld else None,
            f"{kld.proposal / kld.incumbent - 1:+.1%}" if kld else None,
            f"{tail.proposal / tail.incumbent - 1:+.1%}" if tail and tail.incumbent else None,
            f"{100 * (top.proposal - top.incumbent):+.2f} pp" if top else None, f"{p.alpha:.1e}" if p.k else None, _label(p))


def _label(p: Proposal) -> str:
    """The label, and what stands in the way."""
    needed = {o.name: f" (about {o.n_article_needed} articles would settle it)" for o in p.obligations if o.n_article_needed}
    against = [f"{o.name} {o.verdict}{needed.get(o.name, '')}" for o in p.obligations if o.verdict in ("worse", "not shown")]
    return f"{p.label}: {', '.join(against)}" if against else p.label
