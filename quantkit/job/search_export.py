"""A searched plan as files that others can use.

    <tier>.toml               a protocol of one tier, for `quantkit quantize -p` and `quantkit run -p`, costs as comments
    <tier>.tensor-types.txt   for `llama-quantize --tensor-type-file`
    <tier>.command.txt        that command line
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from quantkit.core.errors import PlanError
from quantkit.core.files import write_atomic
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, resolve_plan
from quantkit.spec.plan_from import extract_protocol
from quantkit.spec.plan_records import anchored, tensor_size
from quantkit.spec.protocol import Protocol, parse_protocol, write_protocol
from quantkit.spec.search_records import Proposal
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES


def planned(stock: Plan, tier: str, types: Mapping[str, str]) -> Plan:
    """A stock plan with some tensors' types replaced."""
    rows = tuple(dataclasses.replace(row, type=types[row.name], wanted=types[row.name], change="", rule="search",
                                     size_bytes=tensor_size(row.shape, types[row.name])) if row.name in types else row
                 for row in stock.rows)
    return Plan(tier=tier, ftype=stock.ftype, rows=rows)


def as_protocol(base: ModelInfo, plan: Plan, template: Protocol, lengths: Mapping[str, int]) -> Protocol:
    """A protocol of one tier that gives the base this plan.

    Raises:
        PlanError: it would give other types.
    """
    types = {row.name: row.type for row in plan.rows}
    header = dataclasses.replace(
        base.header, path=Path(f"{plan.tier}.gguf"), parts=(Path(f"{plan.tier}.gguf"),),
        metadata={**base.header.metadata, "general.file_type": FTYPES[plan.ftype].id},
        tensors=tuple(dataclasses.replace(t, type=TENSOR_TYPES[types[t.name]], size_bytes=tensor_size(t.shape, types[t.name]))
                      for t in base.header.tensors))
    made = extract_protocol(describe_model(header), template)
    made = dataclasses.replace(made, name=plan.tier, title=f"Searched plan {plan.tier}")
    made = parse_protocol(write_protocol(made))
    again = resolve_plan(base, made.plan.tiers[0], made.plan, lengths)
    other = [f"{a.name} {a.type}, planned {b.type}" for a, b in zip(again.rows, plan.rows, strict=True) if a.type != b.type]
    if other:
        raise PlanError(f"plan {plan.tier} cannot be written as rules: expected its types back, got {len(other)} others, the first "
                        f"{other[0]}")
    return made


def write_plan(folder: Path, base: ModelInfo, plan: Plan, proposal: Proposal, template: Protocol,
               lengths: Mapping[str, int]) -> Path:
    """Write the three files; returns the protocol's path."""
    path = folder / f"{plan.tier}.toml"
    write_atomic(path, _comments(plan, proposal).encode() + write_protocol(as_protocol(base, plan, template, lengths)))
    lines = [f"{o.pattern}={o.type.lower()}" for o in (anchored(name, type_) for name, type_ in plan.overrides().items())]
    write_atomic(folder / f"{plan.tier}.tensor-types.txt", ("\n".join(lines) + "\n").encode())
    command = (f"llama-quantize --imatrix imatrix.gguf --tensor-type-file {plan.tier}.tensor-types.txt "
               f"{base.header.parts[0].name} {plan.tier}.gguf {plan.ftype}\n")
    write_atomic(folder / f"{plan.tier}.command.txt", command.encode())
    return path


def _comments(plan: Plan, proposal: Proposal) -> str:
    lines = [f"# {plan.tier}: {proposal.tensor_bytes:,} bytes of tensors, budget {proposal.budget_bytes:,}; {proposal.label}",
             f"# predicted KLD {proposal.predicted_kld:.6f}, measured on the search chunks {proposal.search_kld:.6f}",
             "#", "# tensors, type, bytes, KLD of this choice alone (± jackknife error by article):"]
    for cost in proposal.choices:
        error = f" ± {cost.se:.1e}" if cost.se is not None else ""
        lines.append(f"#   {cost.group}  {cost.type}  {cost.size_bytes:,}  {cost.kld:.3e}{error}  {cost.source}")
    return "\n".join(lines) + "\n\n"
