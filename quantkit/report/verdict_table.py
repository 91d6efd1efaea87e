"""Verdicts between tiers and beside noise floors, as markdown, csv and json. Reads the records; computes no statistic."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from quantkit.core.files import pretty_json
from quantkit.report.escape import csv_text, md_text, significant
from quantkit.spec.json_records import record_to_json
from quantkit.spec.verdict_records import Comparison, FloorVerdict, PairVerdict, Verdicts

_NAMES = {"kld": "mean KLD", "ln_ppl_ratio": "ln ratio of perplexities", "same_top_p": "share of equal top tokens"}
_COLUMNS: dict[str, Callable[[PairVerdict], object]] = {name: (lambda pair, name=name: getattr(pair, name)) for name in (  # type: ignore[misc]
    "statistic", "a", "b", "verdict", "difference", "se", "lo", "hi", "lo_simultaneous", "hi_simultaneous", "p", "p_holm",
    "p_equivalent", "p_equivalent_holm", "detectable", "n_article_needed", "arithmetic", "reason")}


def pairs_csv(verdicts: Verdicts) -> str:
    """Every pair by every statistic, one line each; columns as in `PairVerdict`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for comparison in verdicts.comparisons:
        for pair in comparison.pairs:
            writer.writerow([_csv_cell(read(pair)) for read in _COLUMNS.values()])
    return out.getvalue()


def pairs_json(verdicts: Verdicts) -> str:
    """The whole record."""
    return pretty_json({"schema": 1, **record_to_json(verdicts)}).decode()


def pairs_md(verdicts: Verdicts) -> str:
    """Every pair by every statistic, for people."""
    lines = ["# Which tiers differ"]
    for comparison in verdicts.comparisons:
        lines += ["", f"## By {_NAMES.get(comparison.statistic, comparison.statistic)}", ""]
        lines += pair_lines(verdicts, comparison, comparison.pairs)
    lines += floor_lines(verdicts)
    return "\n".join(lines) + "\n"


def verdict_lines(verdicts: Verdicts) -> list[str]:
    """For the retention table: neighbours by size and every other pair that is not told apart, by mean KLD; floors."""
    if len(verdicts.tiers) < 2:
        return floor_lines(verdicts)
    comparison = verdicts.comparison("kld")
    neighbours = set(pairwise(verdicts.tiers))
    shown = [pair for pair in comparison.pairs
             if (pair.a, pair.b) in neighbours or not pair.verdict.startswith(("better", "worse")) or pair.arithmetic]
    return ["", "## Which tiers differ", "", *pair_lines(verdicts, comparison, shown), *floor_lines(verdicts)]


def pair_lines(verdicts: Verdicts, comparison: Comparison, pairs: Sequence[PairVerdict]) -> list[str]:
    """Some pairs of one comparison as a table, and what it means."""
    if not pairs:
        return ["There is one tier: nothing to compare."]
    by_ratio = comparison.statistic == "kld"
    names = ["Tier", "against", "KLD ratio" if by_ratio else "difference", "95 %, all pairs at once", "adjusted p", "the first is"]
    rows = [[md_text(pair.a), md_text(pair.b), *_pair_cells(pair, by_ratio), _word(pair)] for pair in pairs]
    lines = ["| " + " | ".join(row) + " |" for row in (names, [":---", ":---", *["---:"] * 3, ":---"], *rows)]
    return [*lines, "", _meaning(verdicts, comparison)]


def floor_lines(verdicts: Verdicts) -> list[str]:
    """Tiers beside their own noise floors; nothing where none was measured."""
    if not verdicts.floors:
        return []
    names = ["Tier", "KLD", "its noise floor", "ratio", "95 %", "floor by", "verdict"]
    rows = [names, [":---", *["---:"] * 4, ":---", ":---"]]
    rows += [_floor_cells(floor, verdicts.floor_factor) for floor in verdicts.floors]
    return ["", "## Beside their noise floors", "", *("| " + " | ".join(row) + " |" for row in rows), "",
            "A noise floor is the KLD of a file from itself in other arithmetic, on some of the same chunks. A tier is "
            f"indistinguishable from base here where its KLD is below {verdicts.floor_factor:g} times its own floor, Holm over all "
            "tiers. That is about this arithmetic, not about the weights."]


def _pair_cells(pair: PairVerdict, by_ratio: bool) -> list[str]:
    if pair.difference is None or pair.lo_simultaneous is None or pair.hi_simultaneous is None or pair.p_holm is None:
        return ["n/a", "n/a", "n/a"]
    write = _ratio if by_ratio else _difference
    ends = f"{write(pair.lo_simultaneous)} to {write(pair.hi_simultaneous)}"
    return [write(pair.difference), ends, "< 0.001" if pair.p_holm < 0.001 else f"{pair.p_holm:.3f}"]


def _ratio(theta: float) -> str:
    return significant(math.exp(theta), 3)


def _difference(theta: float) -> str:
    return significant(theta, 3, signed=True)


def _word(pair: PairVerdict) -> str:
    if pair.difference is None:
        return f"{pair.verdict} ({md_text(pair.reason or 'no numbers')})"
    word = pair.verdict
    if word == "not resolved" and pair.n_article_needed is not None:
        word += f" (the margin would need about {pair.n_article_needed:,} articles like these)"
    word += f" ({md_text(pair.reason)})" if pair.reason else ""
    return word + ("; within arithmetic" if pair.arithmetic else "")


def _meaning(verdicts: Verdicts, comparison: Comparison) -> str:
    """One paragraph: family, margin, what could be seen."""
    by_ratio, n_pair = comparison.statistic == "kld", len(comparison.pairs)
    margin = f"{100 * math.expm1(comparison.margin):.0f} %" if by_ratio else f"{comparison.margin:g}"
    detectable = sorted(pair.detectable for pair in comparison.pairs if pair.detectable)
    seen = ""
    if detectable:
        median, largest = detectable[len(detectable) // 2], detectable[-1]
        low, high = (f"{100 * math.expm1(x):.1f} %" if by_ratio else significant(x, 2) for x in (median, largest))
        seen = f" Detectable in four of five cases: {low} for the median pair, {high} for the widest."
    looks = f" Errors are shared over {verdicts.n_looks} looks." if verdicts.n_looks > 1 else ""
    family = "the one pair" if n_pair == 1 else f"all {n_pair} pairs"
    return (f"Paired over the same tokens of {verdicts.n_article} articles; the family is {family}, p is Holm's. "
            f"Equivalent: by less than {margin}. Not resolved is not equal.{seen}{looks}")


def _floor_cells(floor: FloorVerdict, factor: float) -> list[str]:
    def number(x: float | None) -> str:
        return "n/a" if x is None else significant(x, 3)

    ends = "n/a" if floor.lo is None or floor.hi is None else f"{number(floor.lo)} to {number(floor.hi)}"
    word = "more than arithmetic" if floor.lo is not None and floor.lo > factor else "not resolved"
    word = "indistinguishable from base here" if floor.indistinguishable else word
    word += f" ({md_text(floor.reason)})" if floor.reason else ""
    return [md_text(floor.tier), number(floor.kld), number(floor.floor), number(floor.ratio), ends, md_text(floor.kernel or ""),
            word]


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return csv_text(value) if isinstance(value, str) else repr(value)
