"""What MTP heads accept, on the page; what they gain belongs to a machine and stands in report/speed.*."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.core.units import format_bytes
from quantkit.report.escape import with_error
from quantkit.report.html_parts import Cell, Html, bullets, table
from quantkit.spec.mtp_records import MtpResult

_COLUMNS = ["Tier", "Head", "Head size", "Accepted", "of drafted", "Tokens a step", "Teacher-forced", "unquantized head", "Check"]
_NOTES = ["Accepted: tokens of the drafts that the trunk kept, with the longest drafts; ± over prompts. Teacher-forced: how often "
          "the head's first choice is the trunk's, given the true text; ± over articles. Unquantized head: the same of the base's "
          "own head on the same trunk.",
          "What drafts gain in time belongs to a machine: see report/speed.md."]


def mtp_section(results: Sequence[MtpResult]) -> list[Html]:
    """One row a tier."""
    return [table(_COLUMNS, [_row(result) for result in results], sortable=True), bullets(_NOTES)]


def _row(r: MtpResult) -> list[Cell]:
    check = "; ".join(r.problems) or ("passed" if r.status == "measured" else "")
    if r.head is None:
        return [Cell(r.tier), Cell(r.reason or r.status, is_text=True), *[Cell("")] * 6, Cell(check, is_text=True)]
    teacher, own = r.teacher_forced_acceptance, r.reference.teacher_forced_acceptance if r.reference else None
    return [
        Cell(r.tier), Cell(r.head.type, is_text=True), Cell(format_bytes(r.head.block_bytes), r.head.block_bytes),
        Cell("" if r.acceptance_rate is None else with_error(r.acceptance_rate, r.acceptance_rate_se), r.acceptance_rate),
        Cell("" if r.n_drafted is None else f"{r.n_accepted} of {r.n_drafted}", r.n_drafted),
        Cell("" if r.mean_accepted_len is None else f"{r.mean_accepted_len:.2f}", r.mean_accepted_len),
        Cell("" if teacher is None else with_error(teacher.value, teacher.se), teacher.value if teacher else None),
        Cell("" if own is None else with_error(own.value, own.se), own.value if own else None), Cell(check, is_text=True),
    ]
