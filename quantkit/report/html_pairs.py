"""Verdicts on the page: neighbours by size, and each tier beside its own noise floor."""

from __future__ import annotations

import math
from itertools import pairwise

from quantkit.report.escape import significant
from quantkit.report.html_parts import Cell, Html, bullets, element, join, table
from quantkit.spec.verdict_records import Comparison, FloorVerdict, PairVerdict, Verdicts


def pairs_section(verdicts: Verdicts) -> list[Html]:
    """What the paired tests say of neighbours, in words and numbers; every other pair is in audit/pairs.json."""
    parts = []
    by_kld = next((c for c in verdicts.comparisons if c.statistic == "kld"), None)
    if by_kld is not None and len(verdicts.tiers) > 1:
        columns = ["Tier", "against", "KLD ratio", "95 %, all pairs at once", "adjusted p", "the first is", "detectable"]
        rows = [_pair_row(_find(by_kld, a, b), a, b) for a, b in pairwise(verdicts.tiers)]
        parts += [table(columns, rows), bullets(_notes(verdicts, by_kld))]
    if verdicts.floors:
        columns = ["Tier", "mean KLD there", "its own floor", "ratio", "95 %", "the largest by", "verdict"]
        rows = [_floor_row(floor, verdicts.floor_factor) for floor in verdicts.floors]
        parts += [element("h3", "Beside its own noise floor"), table(columns, rows),
                  bullets(["A floor is what the same file has against itself in other arithmetic. A tier counts as not told from "
                           f"the base where its KLD is below {verdicts.floor_factor:g} times its floor, beyond the noise."])]
    return [join(parts)] if parts else []


def _find(comparison: Comparison, a: str, b: str) -> PairVerdict:
    """The pair seen from a's side; records hold each pair once, the larger file first."""
    return next(p for p in comparison.pairs if (p.a, p.b) == (a, b))


def _pair_row(pair: PairVerdict, a: str, b: str) -> list[Cell]:
    if pair.difference is None:
        words = f"{pair.verdict}: {pair.reason}"
        return [Cell(a), Cell(b, is_text=True), *[Cell("")] * 3, Cell(words, is_text=True), Cell("")]
    words = pair.verdict + (" (by no more than arithmetic)" if pair.arithmetic else "")
    words += f" ({pair.reason})" if pair.reason else ""
    if pair.verdict == "not resolved" and pair.n_article_needed is not None:
        words += f"; about {pair.n_article_needed:,} articles like these would resolve the margin"
    p = pair.p_holm
    return [Cell(a), Cell(b, is_text=True), Cell(_ratio(pair.difference)),
            Cell(f"{_ratio(pair.lo_simultaneous or 0.0)} to {_ratio(pair.hi_simultaneous or 0.0)}"),
            Cell("" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"), Cell(words, is_text=True),
            Cell("" if pair.detectable is None else f"{100 * math.expm1(pair.detectable):.1f} %")]


def _ratio(theta: float) -> str:
    return significant(math.exp(theta), 3)


def _notes(verdicts: Verdicts, by_kld: Comparison) -> list[str]:
    lines = [f"Paired over the same tokens, by article ({verdicts.n_article}); p by Holm over all {len(by_kld.pairs)} pairs, "
             "intervals for all of them at once. Neighbours by size; the others are in audit/pairs.json.",
             f"Equivalent: by less than {100 * math.expm1(by_kld.margin):.0f} %. Detectable: what this text shows in "
             "four of five cases. Not resolved is not equal."]
    if verdicts.n_looks > 1:
        lines.append(f"The text was looked at up to {verdicts.n_looks} times, and the errors were spent over the looks.")
    return lines


def _floor_row(floor: FloorVerdict, factor: float) -> list[Cell]:
    if floor.ratio is None:
        return [Cell(floor.tier), *[Cell("")] * 5, Cell(floor.reason or "", is_text=True)]
    verdict = "not resolved"
    if floor.indistinguishable:
        verdict = "not told from the base"
    elif floor.lo is not None and floor.lo > factor:
        verdict = "more than arithmetic"
    ends = "" if floor.lo is None or floor.hi is None else f"{significant(floor.lo, 3)} to {significant(floor.hi, 3)}"
    return [Cell(floor.tier), Cell(significant(floor.kld or 0.0, 3)), Cell(significant(floor.floor or 0.0, 3)),
            Cell(significant(floor.ratio, 3)), Cell(ends), Cell(floor.kernel or "", is_text=True),
            Cell(verdict, is_text=True)]
