"""Retention in words: one honest sentence a tier, from the verdicts. Nothing here says more than a test said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quantkit.core.units import format_bytes
from quantkit.report.escape import significant
from quantkit.report.table_rows import TableRow
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import PairVerdict, Verdicts


def tier_sentences(rows: Sequence[TableRow], verdicts: Verdicts | None) -> dict[str, str]:
    """A sentence for each tier, in the order of the table.

    Args:
        rows: in the order of the table, the base first.
        verdicts: between all tiers; None where there are none, and nothing is said of differences then.
    """
    base, *tiers = rows
    larger = dict(zip((row.tier for row in tiers), [base, *tiers], strict=False))
    return {row.tier: _sentence(row, larger[row.tier], tiers, verdicts) for row in tiers}


def _sentence(row: TableRow, larger: TableRow, tiers: Sequence[TableRow], verdicts: Verdicts | None) -> str:
    kld = _kld(row.summary.kld)
    kld = kld.replace("KLD", "KLD of at least", 1) if row.reference else kld  # a pack's is a lower bound
    parts = [_size(row, larger), kld, _perplexity(row.summary.ln_ppl_ratio, row.summary.ppl_drift)]
    if row.floor_verdict is not None and row.floor_verdict.indistinguishable:
        parts.append(f"indistinguishable from {larger.tier if larger.is_base else 'the base'} here: its KLD is less than "
                     f"{verdicts.floor_factor if verdicts else 2:g} times what other arithmetic does to the same file")
    if verdicts is not None:
        parts += _differences(row.tier, {other.tier: other.size_bytes for other in tiers}, verdicts)
    if row.substituted > 0.5:
        parts.append(f"{100 * row.substituted:.0f} % of it is not of the type that its name says")
    return "; ".join(part for part in parts if part) + "."


def _size(row: TableRow, larger: TableRow) -> str:
    difference = larger.size_bytes - row.size_bytes
    if difference < 0:
        return f"{format_bytes(-difference)} more than {larger.tier}"
    return f"{format_bytes(difference)} less than {larger.tier}" if difference else f"of the size of {larger.tier}"


def _kld(kld: Estimate) -> str:
    if kld.value is None:
        return ""
    if kld.value == 0:
        return "equal to the base in every row"
    if kld.lo is None or kld.hi is None:
        return f"KLD {significant(kld.value, 2)}, no interval: {kld.reason}"
    digits = 2 + (kld.hi - kld.lo < kld.value / 5)  # so that the ends differ from the value
    return f"KLD {significant(kld.value, digits)} [{significant(kld.lo, digits)}, {significant(kld.hi, digits)}]"


def _perplexity(ratio: Estimate, drift: Estimate) -> str:
    if ratio.lo is None or ratio.hi is None or drift.value is None or drift.value == 0:
        return ""
    if ratio.lo <= 0 <= ratio.hi:
        return "no measurable difference of perplexity"
    return f"perplexity {100 * drift.value:+.2g} %"


def _differences(tier: str, sizes: Mapping[str, int], verdicts: Verdicts) -> list[str]:
    """What the tests say of this tier and others, by mean KLD; being better than a smaller one goes without saying."""
    pairs = [_from(pair, tier) for pair in verdicts.comparison("kld").pairs if tier in (pair.a, pair.b)]
    if pairs and all(pair.difference is None and pair.reason is not None for pair in pairs):
        return [f"not compared with the other tiers ({pairs[0].reason})"]
    known = [pair for pair in pairs if pair.b in sizes]
    worse = [pair.b for pair in known if pair.verdict == "worse" and sizes[pair.b] <= sizes[tier]]
    better = [pair.b for pair in known if pair.verdict == "better" and sizes[pair.b] > sizes[tier]]
    equal = [pair.b for pair in known if pair.verdict == "equivalent" or "less than the margin" in pair.verdict]
    unresolved = [pair for pair in known if pair.verdict == "not resolved"]
    margin = f"{100 * math.expm1(verdicts.comparison('kld').margin):.0f} %"
    parts = [f"worse than {_list(worse)}, no larger than it"] if worse else []
    parts += [f"better than {_list(better)}, though smaller"] if better else []
    parts += [f"within {margin} of {_list(equal)}"] if equal else []
    if unresolved:
        shown = max(pair.detectable or 0.0 for pair in unresolved)
        parts.append(f"not resolved from {_list([pair.b for pair in unresolved])} on {verdicts.n_article} articles "
                     f"(a difference of {100 * math.expm1(shown):.1f} % would show)")
    arithmetic = [pair.b for pair in known if pair.arithmetic]
    parts += [f"its difference to {_list(arithmetic)} is within what arithmetic does"] if arithmetic else []
    return parts or (["told apart from every other tier"] if known else [])


def _from(pair: PairVerdict, tier: str) -> PairVerdict:
    """The pair as seen from a tier: `a` is the tier, the verdict is about it."""
    if pair.a == tier:
        return pair
    word, sign, rest = pair.verdict.partition(",")
    turned = {"better": "worse", "worse": "better"}.get(word, word)
    return PairVerdict(a=tier, b=pair.a, statistic=pair.statistic, difference=pair.difference, detectable=pair.detectable,
                       verdict=turned + sign + rest, arithmetic=pair.arithmetic, reason=pair.reason)


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
