"""The knapsack's answers are the best there are, within the budget to the byte, and say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.measure.allocate import Option, allocate


def random_items(seed: int, n_item: int = 6, n_option: int = 4, scale: float = 1.0) -> list[list[Option]]:
    rng = np.random.default_rng(seed)
    return [[Option(32 * int(rng.integers(10, 500)), scale * float(rng.gamma(1.0))) for _ in range(n_option)]
            for _ in range(n_item)]


def best_by_trying(items: list[list[Option]], budget: int) -> float:
    return min(sum(o.cost for o in picked) for picked in itertools.product(*items)
               if sum(o.size_bytes for o in picked) <= budget)


@pytest.mark.parametrize("scale", [1.0, 1e-7])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_no_allocation_within_the_budget_is_cheaper(seed: int, scale: float) -> None:
    items = random_items(seed, scale=scale)
    budget = sum(min(o.size_bytes for o in options) for options in items) + 8000
    found = allocate(items, budget)
    assert found.size_bytes <= budget
    assert found.cost == pytest.approx(best_by_trying(items, budget), rel=1e-9)
    assert found.bound == pytest.approx(found.cost, rel=1e-6)
    assert found.gap < 1e-6


def test_one_byte_less_than_an_option_needs_is_too_little() -> None:
    items = [[Option(1000, 0.0), Option(100, 1.0)], [Option(3_000_000_000, 0.0), Option(2_000_000_000, 1.0)]]
    assert allocate(items, 3_000_001_000).picks == (0, 0)
    assert allocate(items, 3_000_000_999).picks == (1, 0)


def test_bytes_that_are_there_are_spent() -> None:
    items = [[Option(1000, 0.5), Option(900, 0.4)], [Option(100, 0.1)]]
    assert allocate(items, 1100).size_bytes == 1000
    assert allocate(items, 1100, tolerance=0.001).size_bytes == 1100


def test_where_no_allocation_lies_that_close_the_best_below_is_taken() -> None:
    items = [[Option(1000, 0.5), Option(500, 0.9)]]
    assert allocate(items, 900, tolerance=0.001).picks == (1,)


def test_more_bytes_than_the_largest_options_take_are_no_error() -> None:
    assert allocate([[Option(10, 0.0), Option(5, 1.0)]], 10**12, tolerance=0.001).picks == (0,)


def test_a_budget_below_the_smallest_options_is_refused() -> None:
    with pytest.raises(InputError, match="at least 15 bytes"):
        allocate([[Option(10, 0.0)], [Option(5, 1.0)]], 14)
