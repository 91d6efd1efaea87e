"""Where two texts part, and what makes it a near-tie or a defect."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.fork import Fork, first_fork, judge_fork, log_softmax, row_difference


@pytest.mark.parametrize(("plain", "drafted", "expected"), [
    ([1, 2, 3], [1, 2, 3], None),
    ([1, 2, 3], [1, 5, 3], Fork(1, 2, 5)),
    ([1, 2, 3], [1, 2], Fork(2, 3, None)),
    ([1, 2], [1, 2, 9], Fork(2, None, 9)),  # 65 tokens where 64 were wanted
    ([], [], None),
])
def test_first_difference(plain: list[int], drafted: list[int], expected: Fork | None) -> None:
    assert first_fork(plain, drafted) == expected


def test_difference_of_rows_by_hand() -> None:
    a, b = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32), np.log(np.array([0.5, 0.2, 0.3])).astype(np.float32)
    assert row_difference(a, b) == pytest.approx(np.log(1.5), rel=1e-6)


def test_difference_is_of_probabilities_not_of_logits() -> None:
    row = np.random.default_rng(0).normal(0, 3, 100).astype(np.float32)
    assert row_difference(row, row) == 0.0
    assert row_difference(row, row + np.float32(8)) == pytest.approx(0.0, abs=1e-5)


def test_tokens_that_nobody_would_choose_do_not_count() -> None:
    row = np.linspace(0, 50, 200).astype(np.float32)
    other = row.copy()
    other[:100] -= 30
    assert row_difference(row, other) == pytest.approx(0.0, abs=1e-6)


def test_log_softmax_sums_to_one() -> None:
    assert np.exp(log_softmax(np.array([700, 710, 690], np.float32))).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("difference", "shape", "follows", "expected"), [
    (0.002, 0.002, True, "near-tie"),
    (0.0059, 0.002, True, "near-tie"),
    (0.0061, 0.002, True, "defect"),  # three times what shapes do is no longer their doing
    (0.002, 0.002, False, "defect"),  # a token that its own row does not give
    (0.0, 0.0, True, "near-tie"),  # an exact tie
    (1e-6, 0.0, True, "near-tie"),  # rounding, whatever made it
    (2e-4, 0.0, True, "defect"),  # rows differ though shapes make no difference
])
def test_verdict(difference: float, shape: float, follows: bool, expected: str) -> None:
    assert judge_fork(difference, shape, follows_own_row=follows) == expected
