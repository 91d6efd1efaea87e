"""The commit rule: its truth table, and why it must end."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.measure.gate import decide, first_rank, next_rank

INCUMBENT = (0, 1, 1)


@pytest.mark.parametrize(("candidate", "label", "commits"), [
    ((0, 0, 1), "strict progress", True),
    ((0, 1, 0), "strict progress", True),
    ((0, 0, 0), "complete", True),
    ((0, 1, 1), "no progress", False),
    ((1, 1, 1), "protected regression", False),
    ((1, 0, 0), "incomparable", False),
    ((1, 0, 1), "incomparable", False),
    ((1, 1, 0), "incomparable", False),
])
def test_truth_table(candidate: tuple[int, ...], label: str, commits: bool) -> None:
    assert decide(INCUMBENT, candidate) == (label, commits)


def test_nothing_is_left_to_do_for_a_complete_incumbent() -> None:
    assert decide((0, 0), (0, 0)) == ("complete", False)


def test_a_candidate_commits_exactly_if_it_is_smaller_in_the_product_order() -> None:
    vectors = list(product(range(3), repeat=3))
    found = {(i, c) for i in vectors for c in vectors if decide(i, c).commits}
    expected = {(i, c) for i in vectors for c in vectors if i != c and all(y <= x for x, y in zip(i, c, strict=True))}
    assert expected == found


@pytest.mark.parametrize(("incumbent", "candidate"), [((), ()), ((0,), (0, 1)), ((0, -1), (0, 0))])
def test_vectors_of_other_obligations_are_refused(incumbent: tuple[int, ...], candidate: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected ranks of the same obligations"):
        decide(incumbent, candidate)


RANKS = st.lists(st.integers(0, 4), min_size=3, max_size=3)


@given(RANKS, st.lists(RANKS, max_size=60))
def test_the_sum_of_ranks_bounds_the_commits(first: list[int], candidates: list[list[int]]) -> None:
    incumbent, n_commits = first, 0
    for candidate in candidates:
        if decide(incumbent, candidate).commits:
            incumbent, n_commits = candidate, n_commits + 1
    assert n_commits <= sum(first)


@pytest.mark.parametrize(("distance", "margin", "rank"), [
    (1.0, 0.02, 50), (0.9, 0.3, 3), (0.95, 0.3, 4), (0.0, 0.1, 0), (-0.2, 0.1, 0),
])
def test_first_rank_counts_margins_to_perfect(distance: float, margin: float, rank: int) -> None:
    assert first_rank(distance, margin) == rank


@pytest.mark.parametrize(("verdict", "gain", "expected"), [
    ("better", 0.001, 9), ("better", 0.3, 7), ("better", 99.0, 0), ("not worse", 0.3, 10), ("not compared", 0.0, 10),
    ("worse", 0.0, 11), ("not shown", 0.0, 11),
])
def test_next_rank_takes_whole_margins_and_one_at_least(verdict: str, gain: float, expected: int) -> None:
    assert next_rank(10, verdict, gain, 0.1) == expected  # type: ignore[arg-type]


def test_an_obligation_that_is_met_cannot_get_better() -> None:
    assert next_rank(0, "better", 1.0, 0.1) == 0
