"""Shared n-grams: what counts as a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.measure.ngrams import SharedNgrams, shared_ngrams

TEXT = b"one two three four five six seven eight nine ten"


def test_a_text_shares_all_of_itself() -> None:
    assert shared_ngrams(TEXT, TEXT, 4) == SharedNgrams(7, 1.0)


def test_texts_without_a_common_run_share_nothing() -> None:
    assert shared_ngrams(TEXT, b"ten nine eight seven six five four three two one", 2) == SharedNgrams(0, 0.0)


def test_the_share_is_of_the_smaller_text() -> None:
    assert shared_ngrams(TEXT, b"zero " + b"x y z " * 50 + b"three four five six", 4) == SharedNgrams(1, 1 / 7)
    assert shared_ngrams(TEXT, b"three four five six", 4) == SharedNgrams(1, 1.0)


def test_case_spacing_and_punctuation_hide_nothing() -> None:
    assert shared_ngrams(TEXT, b"One, two;\r\nTHREE  four_five -- six! seven (eight) nine @ ten.", 4).share == 1.0


def test_a_repeated_ngram_counts_once() -> None:
    assert shared_ngrams(b"a b " * 10, b"a b a", 3) == SharedNgrams(1, 1.0)


def test_a_text_shorter_than_n_words_shares_nothing() -> None:
    assert shared_ngrams(b"a b", TEXT, 13) == SharedNgrams(0, 0.0)
    assert shared_ngrams(b"", b"", 13) == SharedNgrams(0, 0.0)


@pytest.mark.slow
def test_the_calibration_text_of_the_tests_is_not_the_evaluation_text(shared: Path) -> None:
    calibration = (shared / "corpus" / "calibration.txt").read_bytes()
    evaluation = (shared / "corpus" / "wiki.test.raw").read_bytes()
    assert shared_ngrams(calibration, evaluation, 13).share < 0.001
    assert shared_ngrams(evaluation[:200_000], evaluation, 13).share == 1.0
