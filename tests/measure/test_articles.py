"""Articles of WikiText, the article of each chunk, and the chunks of a protocol."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import CorpusError, InputError
from quantkit.measure.articles import assign_chunks, chunk_indices, find_articles, screening_order


def test_wikitext_has_60_articles_in_its_test_split(wiki_test: Path) -> None:
    text = wiki_test.read_bytes()
    starts = find_articles(text, "wikitext")
    titles = [text[start:].split(b"\n", 1)[0] for start in starts]
    assert len(starts) == 60  # two more lines look like titles and are formulas
    assert titles[0] == b" = Robert Boulter = "
    assert titles[-1] == b" = The Hustler ( film ) = "
    assert starts.tolist() == sorted(set(starts.tolist()))
    assert not any(b"1 rad" in title or b"1 henry" in title for title in titles)


def test_a_title_stands_between_empty_lines_and_has_one_sign() -> None:
    text = (b" = First = \n \n text \n \n = = Section = = \n \n with L \n = 1 henry and C = \n 1 farad \n"
            b" \n = Second = = = x = \n \n more \n\n = Third = \n")
    starts = find_articles(text, "wikitext")
    assert [text[start:].split(b"\n", 1)[0] for start in starts] == [b" = First = ", b" = Second = = = x = ", b" = Third = "]


def test_a_text_without_documents_has_no_articles() -> None:
    assert find_articles(b" \n = Title = \n \n", "none").tolist() == []


def test_wikitext_without_a_title_is_refused() -> None:
    with pytest.raises(CorpusError, match="found none in 11 bytes"):
        find_articles(b"plain text\n", "wikitext")


def byte_tokens(n: int) -> npt.NDArray[np.int64]:
    """Token ends where each token is one byte."""
    return np.arange(1, n + 1, dtype=np.int64)


def test_a_chunk_belongs_whole_to_the_article_of_most_scored_tokens() -> None:
    # n_ctx 8: tokens 5, 6, 7 of a chunk are scored targets
    starts = np.array([0, 14, 22, 30], np.int64)
    chunks = np.arange(5, dtype=np.int64)
    # chunk 1 scores 13 | 14 15: two of article 1; chunk 2 scores 21 | 22 23: article 2; chunk 3 scores 29 | 30 31: article 3
    assert assign_chunks(starts, byte_tokens(40), 8, chunks).tolist() == [0, 1, 2, 3, 3]
    assert assign_chunks(np.array([0, 7], np.int64), byte_tokens(16), 8, chunks[:1]).tolist() == [0]  # 5 6 | 7


def test_text_before_the_first_title_belongs_to_the_first_article() -> None:
    assert assign_chunks(np.array([12, 14], np.int64), byte_tokens(24), 8, np.array([0, 2])).tolist() == [0, 1]


def test_tokens_of_no_bytes_and_of_several_are_placed_by_their_last_byte() -> None:
    ends = np.array([0, 3, 6, 9, 12, 15, 18, 21], np.int64)  # BOS, then three bytes each
    assert assign_chunks(np.array([0, 17], np.int64), ends, 8, np.array([0])).tolist() == [1]
    assert assign_chunks(np.array([0, 19], np.int64), ends, 8, np.array([0])).tolist() == [0]


def test_a_text_without_documents_is_cut_into_12_equal_runs() -> None:
    none = np.empty(0, np.int64)
    got = assign_chunks(none, byte_tokens(8 * 120), 8, np.arange(120))
    assert np.bincount(got).tolist() == [10] * 12
    assert assign_chunks(none, byte_tokens(8 * 5), 8, np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert assign_chunks(none, byte_tokens(8 * 120), 8, np.arange(8)).tolist() == [0] * 8  # the first eight are one run


def test_chunks_of_each_rule() -> None:
    assert chunk_indices("all", 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert chunk_indices("first", 3, 783).tolist() == [0, 1, 2]
    assert chunk_indices("spread", 4, 10).tolist() == [1, 3, 6, 8]
    assert chunk_indices("spread", 10, 10).tolist() == list(range(10))
    spread = chunk_indices("spread", 64, 783)
    assert spread.tolist() == [int((i + 0.5) * 783 / 64) for i in range(64)]
    assert len(set(spread.tolist())) == 64


def test_chunks_that_the_text_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="from 1 to the text's 10, got 11"):
        chunk_indices("spread", 11, 10)
    with pytest.raises(InputError, match="got 0"):
        chunk_indices("first", 0, 10)
    with pytest.raises(InputError, match="at least two chunks, got 1"):
        chunk_indices("all", 0, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(0, 2**32 - 1))
def test_an_order_for_screening_holds_every_chunk_once_and_begins_spread(n: int, seed: int) -> None:
    order = screening_order(n, seed)
    assert sorted(order.tolist()) == list(range(n))
    for k in (8, 32):
        if n >= 4 * k:
            gaps = np.diff(np.sort(order[:k]))
            assert gaps.max() <= np.ceil(n / k) + 1
            assert gaps.min() >= n // k - 1


def test_an_order_for_screening_is_the_seeds() -> None:
    assert screening_order(783, 1).tolist() == screening_order(783, 1).tolist()
    assert screening_order(783, 1).tolist() != screening_order(783, 2).tolist()
