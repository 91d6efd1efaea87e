"""Teacher-forced acceptance by hand, its error by article, and when a head counts as dead."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.teacher import chance_level, dead_reason, teacher_forced
from quantkit.spec.mtp_records import TeacherForced


def found(value: float, *, chance: float = 0.1) -> TeacherForced:
    return TeacherForced(value=value, se=None, lo=None, hi=None, se_iid=None, se_chunk=None, n=100, n_chunk=2, n_article=1,
                         chance=chance, reason="1 article")


def test_value_and_chance_by_hand() -> None:
    trunk = np.array([1, 1, 1, 2, 3, 4], np.int32)
    head = np.array([1, 1, 2, 2, 9, 9], np.int32)
    result = teacher_forced(trunk, head, np.repeat([0, 1], 3), np.zeros(6, np.int64))
    assert (result.value, result.chance, result.n, result.n_chunk, result.n_article) == (0.5, 0.5, 6, 2, 1)
    assert (result.se, result.lo, result.hi, result.reason) == (None, None, None, "1 article")


def test_error_is_the_jackknife_over_articles() -> None:
    rng = np.random.default_rng(0)
    articles = np.repeat(np.arange(10), 50)
    right = rng.random(500) < np.repeat(rng.uniform(0.3, 0.9, 10), 50)
    trunk = np.arange(500, dtype=np.int32)
    result = teacher_forced(trunk, np.where(right, trunk, -1).astype(np.int32), articles, articles)
    without = np.array([right[articles != g].mean() for g in range(10)])
    assert result.se == pytest.approx(float(np.sqrt(9 / 10 * np.square(without - without.mean()).sum())))
    assert result.se_iid is not None
    assert result.lo is not None
    assert result.se_iid < (result.se or 0)
    assert result.lo < result.value < (result.hi or 0)


def test_chance_is_what_one_guess_can_reach() -> None:
    assert chance_level(np.array([7, 7, 7, 1, 2], np.int32)) == 0.6


@pytest.mark.parametrize(("value", "reference", "words"), [
    (0.6, None, None),
    (0.6, 0.62, None),
    (0.31, 0.62, None),  # exactly half lives
    (0.30, 0.62, "the unquantized head's in 62.00%"),
    (0.10, 0.62, "always guessing one token would be right in 10.00%"),
    (0.0, None, "in 0.00% of 100 positions"),
])
def test_dead_or_alive(value: float, reference: float | None, words: str | None) -> None:
    reason = dead_reason(found(value), None if reference is None else found(reference), 0.5)
    assert (reason is None) == (words is None)
    assert words is None or words in (reason or "")
