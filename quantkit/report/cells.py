"""Numbers of a row as people read them, the same in the page and on the card."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.report.escape import significant, with_error
from quantkit.report.mtp_report import machine_words
from quantkit.report.table_rows import TableRow
from quantkit.spec.records import Estimate
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.speed_records import SpeedResult


def estimate_text(estimate: Estimate, *, percent: bool = False, signed: bool = False) -> str:
    """`0.00881 ± 0.00054`, `+0.79 ± 0.23 %`; `n/a` where the number is not defined."""
    if estimate.value is None:
        return "n/a"
    scale, unit = (100.0, " %") if percent else (1.0, "")
    return with_error(scale * estimate.value, None if estimate.se is None else scale * estimate.se, signed=signed) + unit


def shortfall_text(reference: PackReference | None) -> str:
    """`+2.1e-05 ± 4e-07 est.`, what a lower bound of KLD falls short by, nats; empty where KLD is no bound."""
    if reference is None:
        return ""
    if reference.shortfall is None:
        return "unknown"
    error = "" if reference.shortfall_se is None else f" ± {reference.shortfall_se:.1g}"
    return f"+{reference.shortfall:.2g}{error} est."


def reference_text(row: TableRow) -> str:
    """`pack, mass 0.9999`, or `base`; empty for the base itself."""
    if row.is_base:
        return ""
    return f"{row.reference.kind}, mass {row.reference.mass:g}" if row.reference else "base"


def interval_text(estimate: Estimate) -> str:
    """`0.0042 [0.0039, 0.0046]`; the number alone where it has no interval."""
    if estimate.value is None:
        return "n/a"
    if estimate.lo is None or estimate.hi is None:
        return significant(estimate.value, 3)
    return f"{significant(estimate.value, 3)} [{significant(estimate.lo, 3)}, {significant(estimate.hi, 3)}]"


def rate_text(value: float | None) -> str:
    """Tokens a second: `1,234`, `85.3`; empty where nothing was timed."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def draft_text(speed: SpeedResult) -> str:
    """Decoding with the best drafts beside the trunk alone: `1.24 x with 2`, `0.81 x at best`; empty where nothing was drafted."""
    best = max((d for d in speed.drafts if d.speedup.value is not None), key=lambda d: d.speedup.value or 0.0, default=None)
    if best is None:
        return ""
    return f"{best.speedup.value:.2f} x " + (f"with {best.n_draft}" if best.n_draft == speed.best_n_draft else "at best")


def speed_notes(speeds: Iterable[SpeedResult]) -> list[str]:
    """What speeds were taken on, machine by machine; none where there are no speeds."""
    by_machine: dict[str, list[SpeedResult]] = {}
    for speed in speeds:
        by_machine.setdefault(machine_words(speed), []).append(speed)
    out = []
    for machine, found in by_machine.items():
        tiers = "" if len(by_machine) == 1 else f" ({', '.join(speed.tier for speed in found)})"
        out.append(f"Speed and peak memory: {machine}{tiers}. The trunk alone, one sequence; prompt processing and decoding apart. "
                   "The peak is the process's, pages mapped from the file included. Another machine has other speeds.")
    if any(speed.drafts for found in by_machine.values() for speed in found):
        out.append("With drafts: how many times faster the MTP head's best draft length decodes than the trunk alone; below 1 it "
                   "costs time. Intervals are in report/speed.md.")
    return out
