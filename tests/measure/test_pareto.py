"""The front of size and loss, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.measure.pareto import Choice, Standing, find_standings, is_below
from quantkit.spec.records import Estimate

SIZES = st.integers(1, 5)


def by_margin(choices: list[Choice], margin: float) -> list[Standing]:
    return find_standings(choices, lambda i, j: choices[i].loss < choices[j].loss - margin)


def test_a_clean_ladder_is_all_front() -> None:
    assert by_margin([Choice(4, 0.1), Choice(3, 0.2), Choice(2, 0.4)], 0.01) == [
        Standing(on_front=True, dominated_by=(), tied_with=())] * 3


def test_a_larger_and_worse_file_is_dominated() -> None:
    found = by_margin([Choice(4, 0.3), Choice(3, 0.1), Choice(2, 0.4)], 0.01)
    assert found[0] == Standing(on_front=False, dominated_by=(1,), tied_with=())
    assert found[1].on_front


def test_inside_the_noise_nothing_is_dominated_and_the_larger_is_tied() -> None:
    found = by_margin([Choice(4, 0.11), Choice(3, 0.10), Choice(2, 0.4)], 0.05)
    assert found[0] == Standing(on_front=False, dominated_by=(), tied_with=(1,))
    assert found[1] == Standing(on_front=True, dominated_by=(), tied_with=())


def test_equal_files_are_both_on_the_front() -> None:
    assert [s.on_front for s in by_margin([Choice(2, 0.1), Choice(2, 0.1)], 0)] == [True, True]


def test_of_equal_sizes_the_worse_is_dominated() -> None:
    assert by_margin([Choice(2, 0.1), Choice(2, 0.3)], 0)[1] == Standing(on_front=False, dominated_by=(0,), tied_with=())


def test_intervals_must_be_apart() -> None:
    assert is_below(Estimate(value=1, lo=0.9, hi=1.1), Estimate(value=2, lo=1.2, hi=3))
    assert not is_below(Estimate(value=1, lo=0.9, hi=1.3), Estimate(value=2, lo=1.2, hi=3))
    assert not is_below(Estimate(value=1), Estimate(value=2, lo=1.2, hi=3))


@given(st.lists(st.builds(Choice, SIZES, st.integers(1, 5).map(float)), min_size=1, max_size=8))
@pytest.mark.slow
def test_laws(choices: list[Choice]) -> None:
    standings = by_margin(choices, 0)
    assert any(s.on_front for s in standings)
    assert all(not (s.on_front and s.dominated_by) for s in standings)
    assert all(not set(s.dominated_by) & set(s.tied_with) for s in standings)
