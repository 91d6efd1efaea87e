"""Which file for which card, in sentences: the least KLD that fits, and what is smaller and not told apart from it.

A tier that has collapsed, or whose types were substituted, is never recommended. Nothing is ranked inside the noise: what the
paired tests do not separate from the best is named beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.core.units import format_bytes
from quantkit.report.cells import interval_text
from quantkit.report.fit_table import card_fits, short_n_ctx
from quantkit.report.plot_size import COLLAPSED_KLD
from quantkit.report.run_data import RunData
from quantkit.report.table import TableRow
from quantkit.spec.memory_fit import CARDS_GIB
from quantkit.spec.verdict_records import Verdicts


def recommend(data: RunData) -> list[str]:
    """One sentence for each size of card at the shortest context that was estimated; empty without an estimate."""
    if data.base is None or not data.base.memory:
        return []
    sound = [row for row in data.tiers if not row.substituted and (row.summary.kld.value or 0.0) < COLLAPSED_KLD]
    smallest = {row.tier: card_fits(row, data.plans.get(row.tier), data.base)[0].card_gib for row in sound}
    n_ctx = short_n_ctx(data.base.memory[0].n_ctx)
    lines: list[str] = []
    before: TableRow | None = None
    for gib in CARDS_GIB:
        fitting = [row for row in sound if (needs := smallest[row.tier]) is not None and needs <= gib]
        best = min(fitting, key=lambda row: (_kld(row), row.size_bytes), default=None)
        if best is not None and best is not before:
            lines.append(f"{gib} GiB card, {n_ctx} tokens of context: {best.tier}, {format_bytes(best.size_bytes)}, mean KLD "
                         f"{interval_text(best.summary.kld)}{_ties(best, fitting, data.verdicts)}")
            before = best
    if before is not None and len(lines) == 1 and smallest[before.tier] == CARDS_GIB[0]:
        return [f"Every card from {CARDS_GIB[0]} GiB up holds the file with the least KLD: {lines[0].split(': ', 1)[1]}"]
    return lines


def _kld(row: TableRow) -> float:
    return float("inf") if row.summary.kld.value is None else row.summary.kld.value


def _ties(best: TableRow, fitting: Sequence[TableRow], verdicts: Verdicts | None) -> str:
    """Smaller files that no test separates from the best."""
    if verdicts is None or "kld" not in {c.statistic for c in verdicts.comparisons}:
        return ""
    apart = {frozenset((p.a, p.b)) for p in verdicts.comparison("kld").pairs if p.verdict.startswith(("better", "worse"))}
    names = [row.tier for row in fitting if row.size_bytes < best.size_bytes and frozenset((row.tier, best.tier)) not in apart]
    return f"; smaller and not told apart from it: {', '.join(names)}" if names else ""
