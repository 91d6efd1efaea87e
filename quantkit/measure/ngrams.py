"""How much of one text stands in another: shared n-grams of words.

    share = |A ∩ B| / min(|A|, |B|)        A, B: the sets of n-grams of each text

Words are runs of letters and digits in lower case, so that spacing, markup and line ends do not hide a copy. The smaller text's
share counts: a short text copied out of a long one is a leak though it is little of the long one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"[^\W_]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


class SharedNgrams(NamedTuple):
    """n_shared distinct n-grams stand in both texts; share is of the text that has fewer; 0 where one has none."""

    n_shared: int
    share: float


def shared_ngrams(a: bytes, b: bytes, n: int) -> SharedNgrams:
    """Compare two texts.

    Args:
        a, b: UTF-8; bytes that are not are read as the replacement character.
        n: words in an n-gram, 13 by custom (GPT-3's contamination study).

    Returns:
        Count and share. N-grams are compared by 64-bit hashes: a chance collision is one in 10^7 for texts of 10^6 words.
    """
    words: dict[str, int] = {}
    left, right = _hashes(a, n, words), _hashes(b, n, words)
    smaller = min(len(left), len(right))
    n_shared = len(np.intersect1d(left, right, assume_unique=True))
    return SharedNgrams(n_shared, n_shared / smaller if smaller else 0.0)


def _hashes(text: bytes, n: int, words: dict[str, int]) -> npt.NDArray[np.uint64]:
    """The distinct n-grams of a text as hashes; `words` numbers the words of both texts."""
    found = _WORD.findall(text.decode(errors="replace").lower())
    ids = np.array([words.setdefault(word, len(words) + 1) for word in found], np.uint64)
    if len(ids) < n:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(len(ids) - n + 1, np.uint64)
    for i in range(n):
        hashes = (hashes ^ ids[i:len(ids) - n + 1 + i]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)
