"""Which chunks are evaluated, and which article each of them counts to.

An article is what the errors are clustered by. WikiText marks its start with a line ` = Title = ` between empty lines; a
section heading has more signs (` = = Section = = `), and two formula lines in the test split look like titles but have text
around them. A text without documents is cut into 12 equal runs of chunks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import CorpusError, InputError

Offsets = npt.NDArray[np.int64]

N_RUNS = 12  # of a text without documents


def find_articles(text: bytes, documents: Literal["wikitext", "none"]) -> Offsets:
    """Byte offsets at which the articles of a text start, ascending; none for a text without documents.

    Args:
        text: the whole corpus.
        documents: how it marks them: `wikitext`, or `none`.

    Raises:
        CorpusError: `wikitext` was promised and there is no title.
    """
    if documents == "none":
        return np.empty(0, dtype=np.int64)
    lines = text.split(b"\n")
    ends = np.cumsum([len(line) + 1 for line in lines])
    starts = [
        int(ends[i]) - len(line) - 1
        for i, line in enumerate(lines)
        if _is_title(line) and (i == 0 or not lines[i - 1].strip()) and (i + 1 == len(lines) or not lines[i + 1].strip())
    ]
    if not starts:
        raise CorpusError("expected articles that start with a line ' = Title = ' between empty lines, found none in "
                          f"{len(text)} bytes: is this WikiText? A text without documents says documents = \"none\", set that")
    return np.array(starts, dtype=np.int64)


def _is_title(line: bytes) -> bool:
    return len(line) > 6 and line.startswith(b" = ") and line.endswith(b" = ") and not line.startswith(b" = = ")


def assign_chunks(
    article_starts: Offsets, token_ends: Offsets, n_ctx: int, chunks: npt.NDArray[np.integer]
) -> npt.NDArray[np.int32]:
    """The article of each chunk: the one with most of its scored tokens, of two equals the first.

    Args:
        article_starts: from `find_articles`; empty for a text without documents, which gives 12 equal runs of chunks.
        token_ends: (n_tokens,) for each token of the whole text, the byte offset just behind it. A token belongs to the article
            that holds its last byte; what stands before the first title belongs to the first article.
        n_ctx: tokens a chunk. The scored targets of a chunk are its tokens n_ctx//2 + 1 … n_ctx − 1.
        chunks: (n_chunk,) numbers of chunks in the whole text.

    Returns:
        (n_chunk,) int32, articles counted from 0 in the whole text.
    """
    n_total = len(token_ends) // n_ctx
    if not len(article_starts):
        return (np.asarray(chunks, dtype=np.int64) * min(N_RUNS, n_total) // max(n_total, 1)).astype(np.int32)
    article_of_token = np.searchsorted(article_starts, np.asarray(token_ends) - 1, side="right") - 1
    article_of_token = np.maximum(article_of_token, 0)
    articles = np.empty(len(chunks), dtype=np.int32)
    for i, chunk in enumerate(chunks):
        first = int(chunk) * n_ctx
        articles[i] = np.argmax(np.bincount(article_of_token[first + n_ctx // 2 + 1 : first + n_ctx]))
    return articles


def chunk_indices(rule: Literal["all", "spread", "first"], n_chunk: int, n_total: int) -> npt.NDArray[np.int64]:
    """The numbers of the chunks that a protocol evaluates, ascending.

    Args:
        rule: `all`; `spread`: chunk ⌊(i + ½)·N/C⌋ for i = 0 … C − 1; `first`: 0 … C − 1.
        n_chunk: C; not used by `all`.
        n_total: N, whole chunks in the text.

    Raises:
        InputError: the text has fewer than two chunks, or fewer than are asked for.
    """
    if n_total < 2:
        raise InputError(f"expected a text of at least two chunks, got {n_total}: use a longer text or a smaller n_ctx")
    if rule == "all":
        return np.arange(n_total, dtype=np.int64)
    if not 1 <= n_chunk <= n_total:
        raise InputError(f"expected a number of chunks from 1 to the text's {n_total}, got {n_chunk}: ask for fewer, or use a "
                         "longer text")
    i = np.arange(n_chunk, dtype=np.int64)
    return i if rule == "first" else (2 * i + 1) * n_total // (2 * n_chunk)


def screening_order(n: int, seed: int) -> npt.NDArray[np.int64]:
    """An order of n chunks of which every beginning is spread over the text: for screenings that may stop early.

    Point i is the fraction part of u + φ(i), u drawn from the seed, φ the sequence of van der Corput (0, ½, ¼, ¾, ⅛, ...); a
    chunk that has come already is passed over. The first 2^k chunks lie one in each of 2^k equal parts.

    Source: van der Corput 1935; the random start makes it a systematic sample.
    """
    start = np.random.default_rng(seed).random()
    n_point = 4 * n
    fractions, scale = np.zeros(n_point), 0.5
    digits = np.arange(n_point)
    while digits.any():
        fractions += scale * (digits & 1)
        digits, scale = digits >> 1, scale / 2
    places = np.minimum((((start + fractions) % 1.0) * n).astype(np.int64), n - 1)
    _, first = np.unique(places, return_index=True)
    found = places[np.sort(first)]
    return np.concatenate([found, np.setdiff1d(np.arange(n), found)])
