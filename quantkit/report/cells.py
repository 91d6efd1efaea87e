"""Numbers of a row as people read them, the same in the page and on the card."""

from __future__ import annotations

from quantkit.report.escape import significant, with_error
from quantkit.spec.records import Estimate


def estimate_text(estimate: Estimate, *, percent: bool = False, signed: bool = False) -> str:
    """`0.00881 ± 0.00054`, `+0.79 ± 0.23 %`; `n/a` where the number is not defined."""
    if estimate.value is None:
        return "n/a"
    scale, unit = (100.0, " %") if percent else (1.0, "")
    return with_error(scale * estimate.value, None if estimate.se is None else scale * estimate.se, signed=signed) + unit


def interval_text(estimate: Estimate) -> str:
    """`0.0042 [0.0039, 0.0046]`; the number alone where it has no interval."""
    if estimate.value is None:
        return "n/a"
    if estimate.lo is None or estimate.hi is None:
        return significant(estimate.value, 3)
    return f"{significant(estimate.value, 3)} [{significant(estimate.lo, 3)}, {significant(estimate.hi, 3)}]"
