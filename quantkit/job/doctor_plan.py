"""Checks of the protocol, of what its rules make of this base, and of the importances that the plans need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from quantkit.core.errors import ImatrixError, QuantkitError
from quantkit.core.files import sha256_file
from quantkit.core.units import format_bytes
from quantkit.job.calibration import importance_notes, uses_importances
from quantkit.job.doctor_case import Case, Finding, not_applicable, ok, problem, warning
from quantkit.job.foreign import read_imatrix
from quantkit.job.quantize import prepare_importances
from quantkit.job.rundir import RunFolder, read_json
from quantkit.spec.imatrix_file import Imatrix
from quantkit.spec.json_records import record_to_json
from quantkit.spec.plan import Plan
from quantkit.spec.plan_coverage import Coverage, check_coverage
from quantkit.spec.plan_rules import RuleUse, bits, count_rule_uses
from quantkit.spec.protocol import Protocol
from quantkit.spec.tensor_types import FTYPES

_LOW_OUTPUT = "Q4_K"
_N_NAMED = 3


def look_at_protocol(case: Case) -> Iterator[Finding]:
    """Which protocol it is, and which tiers are asked of it."""
    protocol = case.protocol
    derived = f", derived by {', '.join(protocol.derived)}" if protocol.derived else ""
    yield ok("protocol", f"{protocol.name} {protocol.protocol_id[:12]}{derived}; tiers {', '.join(t.name for t in case.tiers)}")


def look_at_plans(case: Case) -> Iterator[Finding]:
    """What the rules make of the base: each tier's size, what is refused, and what was probably meant otherwise."""
    plans, refused = case.ladder
    if plans and case.protocol.plan.ladder != "stock":
        first = case.protocol.plan.tier(plans[0].tier)  # rules for all tiers match the same in each
        if unmatched := _unmatched(count_rule_uses(case.base_model, first, case.protocol.plan), own=False):
            yield ok("plan", f"rules for all tiers that are optional, and match nothing here: {unmatched}")
    for tier in case.tiers:
        if tier.name in refused:
            yield problem(f"plan {tier.name}", refused[tier.name], "correct the protocol")
            continue
        plan = next(p for p in plans if p.tier == tier.name)
        uses = [] if case.protocol.plan.ladder == "stock" else count_rule_uses(case.base_model, tier, case.protocol.plan)
        found = f"{plan.bpw:.4f} bpw, {format_bytes(plan.tensor_bytes)}"
        if unmatched := _unmatched(uses, own=True):
            found += f"; optional, and matching nothing here: {unmatched}"
        if faults := [*_low_output(plan), *_idle_rules(uses), *_misordered(plan, plans)]:
            yield warning(f"plan {tier.name}", f"{found}. {'; '.join(text for text, _ in faults)}", "; ".join(
                dict.fromkeys(fix for _, fix in faults)))
        else:
            yield ok(f"plan {tier.name}", found)


def _low_output(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every token goes through the output matrix; with tied embeddings that is the embedding, which rules for either name reach."""
    tied = all(row.role != "output" for row in plan.rows)
    for row in plan.rows:
        if (row.role == "output" or (tied and row.name == "token_embd.weight")) and bits(row.type) < bits(_LOW_OUTPUT):
            yield (f"{row.name}{', which is the output too (tied embeddings),' if tied else ''} would be {row.type}",
                   f"add a rule for output.weight with at_least = \"Q5_K\" to tier {plan.tier}")


def _unmatched(uses: Sequence[RuleUse], *, own: bool) -> str:
    """Rules that match nothing, named; they are optional, or the plan would have been refused. A slip of the pen shows here."""
    return _named([use.rule.match for use in uses if use.is_own == own and not use.n_reached])


def _idle_rules(uses: Sequence[RuleUse]) -> Iterator[tuple[str, str]]:
    """A rule that names a type for tensors which all get it from others. A floor that others reach anyway is no fault."""
    idle = [use.label for use in uses if use.is_own and use.rule.type and use.n_reached and not use.n_decided]
    if idle:
        yield (f"{_named(idle)}: decides no tensor's type, other rules overlap it", "narrow the rules that overlap, or take it out")


def _misordered(plan: Plan, plans: Sequence[Plan]) -> Iterator[tuple[str, str]]:
    for above, below in pairwise(plans):
        if below is plan and below.tensor_bytes >= above.tensor_bytes:
            yield f"it is no smaller than {above.tier} before it", "look at the shapes below, or take one of the two out"


def look_at_shapes(case: Case) -> Iterator[Finding]:
    """Tensors whose rows the blocks of their type do not divide, and what the types instead of it cost."""
    plans, check = case.ladder.plans, "shapes"
    if not plans:
        yield not_applicable(check, "no tier can be planned")
        return
    odd = [plan for plan in plans if plan.substituted]
    for plan in odd:
        n, share, cost = len(plan.substituted), plan.share_params(plan.substituted), _cost_bpw(plan)
        yield warning(f"{check} {plan.tier}", f"{n} of {len(plan.rows)} tensors get another type ({share:.1%} of parameters): "
                      f"{_rows_words(plan)}; {plan.bpw:.4f} bpw instead of {plan.bpw - cost:.4f} ({cost:+.4f})",
                      "nothing is lost but size; the tier is marked in tables, so say its bits per weight and not its name alone")
    if not odd:
        yield ok(check, f"no tensor of {len(plans)} tiers needs another type than its plan's")


def _cost_bpw(plan: Plan) -> float:
    """Bits per weight of the whole file that substitutions add; of llama.cpp's own mix, against the mix's default type."""
    mix = FTYPES[plan.ftype].default_type
    wanted = {row.name: row.wanted if row.wanted != row.type else mix for row in plan.substituted}
    return sum(8 * row.size_bytes - row.n_elements * bits(wanted[row.name]) for row in plan.substituted) / plan.n_params


def _rows_words(plan: Plan) -> str:
    lengths = sorted({row.shape[0] for row in plan.substituted})
    return f"rows of {', '.join(map(str, lengths[:_N_NAMED]))}{', ...' if len(lengths) > _N_NAMED else ''} are not whole blocks"


def look_at_imatrix(case: Case) -> Iterator[Finding]:
    """Whether the plans need importances, and whether the matrix that is there covers them."""
    plans, check, spec = case.ladder.plans, "importance matrix", case.protocol.imatrix
    if not plans:
        yield not_applicable(check, "no tier can be planned")
    elif not uses_importances({row.type for plan in plans for row in plan.rows if row.quantizable}):
        yield not_applicable(check, "no tier uses importances")
    elif (given := case.options.imatrix) is not None:
        yield from _look_at_matrix(check, given, case.imatrix, case.protocol, plans, given=True)
    elif case.run is not None and _is_collected(case, RunFolder(path=case.run)):
        path = RunFolder(path=case.run).imatrix
        yield from _look_at_matrix(check, path, read_imatrix(path), case.protocol, plans, given=False)
    else:
        n = f"{spec.n_chunk} chunks" if spec.n_chunk else "all chunks"
        state = sorted((case.run / "parts" / "imatrix").glob("*.sums")) if case.run is not None else []
        yield ok(check, f"will be collected over {spec.corpus}, {n} of {spec.n_ctx} tokens, for every matrix"
                        f"{'; a collection was begun and goes on' if state else ''}")


def _is_collected(case: Case, run: RunFolder) -> bool:
    """Whether the run would take the matrix that it holds, as `ladder.importance_matrix` decides."""
    held = read_json(run.record("imatrix", "imatrix"))
    return (isinstance(held, dict) and held.get("imatrix_id") == case.protocol.imatrix_id
            and held.get("offload") == record_to_json(case.offload) and run.imatrix.is_file()
            and sha256_file(run.imatrix) == held.get("sha256"))


def _look_at_matrix(check: str, path: Path, matrix: Imatrix | None, protocol: Protocol, plans: Sequence[Plan], *,
                    given: bool) -> Iterator[Finding]:
    if matrix is None:
        raise ImatrixError(f"expected an importance matrix at {path}, found none: give its path")
    coverages: dict[str, Coverage] = {}
    for plan in plans:
        try:
            coverages[plan.tier] = check_coverage(plan, matrix, protocol.imatrix)
        except QuantkitError as error:
            yield problem(check, error, "collect a matrix from this base with `quantkit imatrix`")
            return
    found = f"{path.name}: {len(matrix.entries)} entries over {matrix.chunk_count} chunks"
    names = sorted({name for plan in plans for name in plan.overrides()})
    ready = prepare_importances(path, matrix, names, protocol.imatrix.zero_floor)
    notes = importance_notes(ready, coverages, None if given else ())
    notes += [f"{p.tier}: {len(p.no_imatrix)} tensors get a type that needs no importances" for p in plans if p.no_imatrix]
    faults = [note.removeprefix("imatrix: ") for note in notes if "format does not hold" not in note]
    if faults:
        yield warning(check, f"{found}; {'; '.join(faults)}", "collect over more text, or with `quantkit imatrix`, which covers "
                                                              "every matrix; what is missing is mended and told in the report")
    else:
        yield ok(check, found + ("; the text that it was collected over is not told by it" if given else ", collected by this run"))


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_N_NAMED]) + (f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else "")
