"""A plan on the page: how much is stored as which type, and which rule chose it; of a foreign file, where it is from."""

from __future__ import annotations

from pathlib import Path

from quantkit.core.units import format_bytes
from quantkit.report.html_parts import Cell, Html, code, definitions, details, element, join, table
from quantkit.spec.blocks import block_of, kind_of
from quantkit.spec.plan_records import Plan, PlanRow
from quantkit.spec.source_facts import FileSource


def plan_details(plan: Plan, path: Path) -> Html:
    """One tier's plan, closed until it is wanted."""
    total = plan.size_bytes
    types = [[Cell(t.type), Cell(f"{t.n_tensors}"), Cell(f"{t.n_params / plan.n_params:.1%}"), Cell(f"{t.size_bytes / total:.1%}"),
              Cell(format_bytes(t.size_bytes))] for t in plan.types]
    groups: dict[tuple[str, str, str], list[PlanRow]] = {}
    for row in plan.rows:
        groups.setdefault((kind_of(row.name, row.role), row.type, row.rule), []).append(row)
    rows = [[Cell(kind), Cell(type_), Cell(str(len(members))), Cell(_blocks(members), is_text=True), Cell(rule, is_text=True)]
            for (kind, type_, rule), members in groups.items()]
    core = "" if plan.bpw_core is None else f", {plan.bpw_core:.2f} without embedding, output and MTP"
    return details(f"{plan.tier}: {plan.bpw:.2f} bpw{core}, ftype {plan.ftype}", join([
        table(["Type", "tensors", "of parameters", "of bytes", "bytes"], types),
        table(["Kind", "type", "tensors", "blocks", "chosen by"], rows),
        element("p", join([Html("Every tensor: "), code(f"plan/{path.name}")], ""), class_="note")]))


def source_details(tier: str, bpw: float, source: FileSource) -> Html:
    """What stands in a plan's place for a file that came from elsewhere: where it is from, and the types that lie in it."""
    parts = "" if source.n_parts == 1 else f", {source.n_parts} parts"
    ftype = f", calls itself {source.ftype}" if source.ftype else ""
    types = [[Cell(t.type), Cell(str(t.n_tensors)), Cell(format_bytes(t.size_bytes))] for t in source.types]
    kinds = [[Cell(t.kind), Cell(t.type), Cell(str(t.n_tensors)), Cell(format_bytes(t.size_bytes))] for t in source.kinds]
    place = [(name, code(value)) for name, value in (("repository", source.repository), ("revision", source.revision)) if value]
    return details(f"{tier}: {bpw:.2f} bpw, not made here{ftype}{parts}", join([
        element("p", "What the file says of itself is its maker's word.", class_="note"),
        definitions([*place, *((key, value) for key, value in source.said.items())]),
        table(["Type", "tensors", "bytes"], types), table(["Kind", "type", "tensors", "bytes"], kinds)]))


def _blocks(rows: list[PlanRow]) -> str:
    """`0-2, 4`."""
    runs: list[list[int]] = []
    for block in sorted({b for row in rows if (b := block_of(row.name)) is not None}):
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
