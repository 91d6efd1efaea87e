"""The commit rule: may a candidate replace the incumbent?

Every protected obligation has a rank, a whole number: 0 is met, above that is how far from it. One vector of ranks stands for the
incumbent, one for the candidate. No obligation may get worse, and one must get better:

    strict progress        none worse, one better at least
    complete               none worse, and every obligation of the candidate is met; commits if one got better
    no progress            none worse, none better
    protected regression   one worse at least, none better
    incomparable           some better, some worse: no number buys a broken obligation

A strict commit lowers the sum of ranks by one at least, so their number is bounded by the sum at the start.

For an obligation that is a number, the rank counts margins: how many of them lie between the first incumbent and a perfect tier. A
number that is statistically better takes the whole margins that it gained off the rank, one at least; one that is not worse leaves
it; anything else adds one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from quantkit.core.errors import InputError

Label = Literal["strict progress", "complete", "no progress", "protected regression", "incomparable"]
Verdict = Literal["better", "not worse", "worse", "not shown", "not compared"]


class Decision(NamedTuple):
    """What the rule says."""

    label: Label
    commits: bool


def decide(incumbent: Sequence[int], candidate: Sequence[int]) -> Decision:
    """The rule over two vectors of ranks, 0 or more; the same obligations in the same order.

    Raises:
        InputError: vectors of different lengths, empty ones, or a negative rank.
    """
    if len(incumbent) != len(candidate) or not incumbent or min(*incumbent, *candidate) < 0:
        raise InputError(f"expected ranks of the same obligations, 0 or more, got {list(incumbent)} and {list(candidate)}: "
                         "give both by one list")
    better = any(c < i for i, c in zip(incumbent, candidate, strict=True))
    worse = any(c > i for i, c in zip(incumbent, candidate, strict=True))
    if worse:
        return Decision("incomparable" if better else "protected regression", False)
    if not any(candidate):
        return Decision("complete", better)
    return Decision("strict progress" if better else "no progress", better)


def first_rank(distance: float, margin: float) -> int:
    """Margins between a value and a perfect one, rounded up.

    Args:
        distance: of the value from a perfect one, on the margin's scale; 0 or below is perfect.
        margin: above 0.
    """
    return max(0, math.ceil(distance / margin - 1e-9))  # 0.9 / 0.3 is a little above 3 in floating point


def next_rank(rank: int, verdict: Verdict, gain: float, margin: float) -> int:
    """The candidate's rank, from the incumbent's and what the comparison said; see the module.

    Args:
        gain: by how much the candidate is better, on the margin's scale.
        margin: above 0.
    """
    if verdict == "better":
        return max(0, rank - max(1, int(gain / margin + 1e-9)))
    return rank + (verdict in ("worse", "not shown"))
