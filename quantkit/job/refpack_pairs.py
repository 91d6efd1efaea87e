"""Verdicts on mean KLD where some tiers were measured against a reference pack, whose KLD is a lower bound.

Tiers of one pack are compared as they are: each falls short by nearly the same share. Between a pack and base, or two packs,
a verdict stands only if it does not hang on what the bound leaves out: it must be the same with every KLD of a pack raised by the
most that it may fall short by, the estimate and three of its errors. That a bound is already larger is enough to be worse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from quantkit.measure.numbers import Rows
from quantkit.measure.verdict import compare_pairs
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.verdict_records import PairVerdict

_STANDS = "across references: a pack's KLD is a lower bound, and the verdict is the same with what it may fall short by added"
_FALLS = "measured against different references, and what a pack's KLD may fall short by decides"


def compare_kld(rows: Mapping[str, Rows], references: Mapping[str, PackReference | None], *, margin: float, alpha: float = 0.05,
                n_looks: int = 1) -> tuple[PairVerdict, ...]:
    """All pairs by mean KLD, as `measure.verdict.compare_pairs` gives them where all tiers have one reference.

    Args:
        references: of each tier: its pack, or None where that was base itself.

    Raises:
        InputError: rows of other tokens or another base.
    """
    pairs = compare_pairs(rows, "kld", margin=margin, alpha=alpha, n_looks=n_looks)
    packs = {ref.sha256 for ref in references.values() if ref is not None}
    if not packs or len({ref.sha256 if ref else None for ref in references.values()}) == 1:
        return pairs
    raised = {pack: compare_pairs({tier: _raised(own, references[tier], pack) for tier, own in rows.items()}, "kld", margin=margin,
                                  alpha=alpha, n_looks=n_looks) for pack in sorted(packs)}
    out = []
    for i, pair in enumerate(pairs):
        own = [ref.sha256 if (ref := references[tier]) else None for tier in (pair.a, pair.b)]
        if own[0] != own[1]:
            pair = _across(pair, [raised[pack][i].verdict for pack in own if pack], [references[pair.a], references[pair.b]])
        out.append(pair)
    return tuple(out)


def most_that_is_missing(ref: PackReference) -> float:
    """The most that a pack's KLD may fall short by, nats: the estimate and three errors; infinite where there is no estimate."""
    if ref.shortfall is None or ref.shortfall_se is None:
        return math.inf
    return ref.shortfall + 3 * ref.shortfall_se


def _raised(rows: Rows, ref: PackReference | None, pack: str) -> Rows:
    if ref is None or ref.sha256 != pack or not math.isfinite(most_that_is_missing(ref)):
        return rows
    out = rows.copy()
    out["kld"] += most_that_is_missing(ref)
    return out


def _across(pair: PairVerdict, raised: list[str], references: list[PackReference | None]) -> PairVerdict:
    """A pair across references: its verdict where none of the raised ones contradicts it."""
    verdicts = {verdict.partition(",")[0] for verdict in (pair.verdict, *raised)}
    word = pair.verdict.partition(",")[0]
    endless = [ref is not None and not math.isfinite(most_that_is_missing(ref)) for ref in references]
    holds = len(verdicts) == 1 and word != "not resolved"
    if any(endless):  # of such a pack only that it is worse can be known
        holds = holds and word == ("worse" if endless[0] else "better") and not all(endless)
    if not holds:
        return dataclasses.replace(pair, verdict="not resolved", reason=_FALLS)
    same = all(verdict == pair.verdict for verdict in raised) and not any(endless)
    return dataclasses.replace(pair, verdict=pair.verdict if same else word, reason=_STANDS)
