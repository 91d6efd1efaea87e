"""Fixed times give exact ratios, and ratios have the error that prompts give them."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.speed import against_itself, break_even_acceptance, paired_ratio, rate


def test_fixed_times_give_the_exact_ratio_and_no_width() -> None:
    slow, fast = np.full((4, 3), 0.020), np.full((4, 3), 0.016)
    found = paired_ratio(slow, fast)
    assert found.value == pytest.approx(1.25, rel=1e-12)
    assert found.lo == pytest.approx(1.25, rel=1e-9)
    assert found.hi == pytest.approx(1.25, rel=1e-9)
    assert found.n_prompt == 4


def test_interval_is_students_over_prompts_by_hand() -> None:
    ratios = np.array([1.1, 1.3, 1.2])
    found = paired_ratio(np.repeat(ratios[:, None], 2, 1), np.ones((3, 2)))
    x = np.log(ratios)
    reach = 4.302652729911275 * x.std(ddof=1) / 3**0.5
    assert found.value == pytest.approx(np.exp(x.mean()))
    assert found.lo == pytest.approx(np.exp(x.mean() - reach))
    assert found.hi == pytest.approx(np.exp(x.mean() + reach))


def test_prompts_of_any_length_weigh_the_same() -> None:
    assert paired_ratio(np.array([[2.0], [200.0]]), np.array([[1.0], [100.0]])).value == pytest.approx(2.0)


def test_turning_the_two_around_inverts_the_ratio() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.uniform(1, 2, (5, 3)), rng.uniform(1, 2, (5, 3))
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.lo is not None
    assert there.value == pytest.approx(1 / (back.value or 0))
    assert there.lo == pytest.approx(1 / (back.hi or 0))


def test_no_prompt_and_one_prompt_say_why_there_is_no_interval() -> None:
    none, one = paired_ratio(np.zeros((0, 3)), np.zeros((0, 3))), paired_ratio(np.array([[3.0]]), np.array([[2.0]]))
    assert (none.value, none.reason) == (None, "no prompt left to time")
    assert (one.lo, one.hi, one.reason) == (None, None, "one prompt has no interval")
    assert one.value == pytest.approx(1.5)


def test_a_way_against_itself_is_one_and_shows_drift() -> None:
    assert against_itself(np.full((3, 4), 0.5)).value == pytest.approx(1.0)
    drifting = np.array([[1.0, 1.1, 1.0, 1.1]] * 3)
    assert against_itself(drifting).value == pytest.approx(1 / 1.1)
    assert against_itself(np.ones((3, 5))).value == pytest.approx(1.0)  # the fifth has no partner
    assert against_itself(np.ones((3, 1))).value is None
    assert against_itself(np.zeros((0, 3))).value is None


def test_rate_is_tokens_over_seconds() -> None:
    assert rate(np.array([10, 30]), np.array([[1.0, 1.0], [2.0, 4.0]])) == 80 / 8
    assert rate(np.zeros(0, np.int64), np.zeros((0, 3))) is None


def test_break_even_by_hand() -> None:
    # a step of 1.6 tokens' time yields 1 + 3a tokens: it pays from a = 0.2 on
    assert break_even_acceptance(1.6, 3) == pytest.approx(0.2)
    assert break_even_acceptance(0.9, 2) == 0.0
    assert break_even_acceptance(2.5, 1) == 1.5
