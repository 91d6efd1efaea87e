"""Text that repeats itself is told from text that does not."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.repetition import is_degenerate, repeat_share


def test_share_by_hand() -> None:
    assert repeat_share([1, 2, 3, 1, 2, 3], 2) == 2 / 5  # of 12 23 31 12 23 two stood before


@pytest.mark.parametrize("period", [[5], [7, 8], [1, 2, 3, 4, 5, 6, 7]], ids=["of-of-of", "two", "seven"])
def test_a_loop_is_degenerate_whatever_its_period(period: list[int]) -> None:
    tokens = (period * 96)[:96]
    assert is_degenerate(tokens, 4, 0.5)


def test_of_of_of_is_voided() -> None:
    of, dash = 315, 12
    found = repeat_share([of, dash] * 48, 4)
    assert found is not None
    assert found > 0.97
    assert is_degenerate([of, dash] * 48, 4, 0.5)


def test_ordinary_text_is_not() -> None:
    """Zipf's law over 4096 tokens, as ordinary text has it."""
    rng = np.random.default_rng(0)
    tokens = rng.choice(4096, 256, p=(weights := 1 / np.arange(1, 4097)) / weights.sum())
    assert not is_degenerate(tokens.tolist(), 4, 0.5)


def test_a_loop_in_a_part_of_the_text_counts_by_its_part() -> None:
    found = repeat_share([*range(100), *[1] * 100], 1)
    assert found == 0.5


@pytest.mark.parametrize("tokens", [[], [1], [1, 1, 1, 1]])
def test_text_of_less_than_two_runs_is_undefined_and_not_voided(tokens: list[int]) -> None:
    assert repeat_share(tokens, 4) is None
    assert not is_degenerate(tokens, 4, 0.0)
