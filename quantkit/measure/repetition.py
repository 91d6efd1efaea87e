"""Text that only repeats itself: an acceptance measured on it says nothing.

    repeat_share = n-grams of the text that stood in it before / all n-grams of the text

0 for a text in which no run of n tokens comes twice, near 1 for `of-of-of-`. A period of any length shows, since each turn after
the first repeats.
"""

from __future__ import annotations

from collections.abc import Sequence


def repeat_share(tokens: Sequence[int], n: int) -> float | None:
    """Share of the n-grams that stood earlier in the text, 0 to 1; None for a text shorter than two n-grams.

    Args:
        tokens: the generated tokens alone, without the prompt.
        n: length of a run.
    """
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return (len(grams) - len(set(grams))) / len(grams) if len(grams) >= 2 else None


def is_degenerate(tokens: Sequence[int], n: int, max_share: float) -> bool:
    """Whether more of a text repeats than a protocol allows."""
    found = repeat_share(tokens, n)
    return found is not None and found > max_share
