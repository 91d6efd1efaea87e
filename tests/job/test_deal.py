"""Chunks become tasks that end together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quantkit.job.deal import deal


def test_tasks_become_smaller_towards_the_end() -> None:
    assert [len(task) for task in deal(range(32), 2)] == [4, 4, 4, 4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    assert list(deal([3, 5], 2)) == [(3,), (5,)]
    assert list(deal([], 2)) == []


@given(st.lists(st.integers(0, 999), unique=True, max_size=100), st.integers(1, 9))
def test_each_chunk_is_dealt_once_in_order_and_no_task_is_more_than_half_a_share(chunks: list[int], n_workers: int) -> None:
    tasks = list(deal(chunks, n_workers))
    assert [chunk for task in tasks for chunk in task] == chunks
    left = len(chunks)
    for task in tasks:
        assert 1 <= len(task) <= max(1, left / (2 * n_workers))
        left -= len(task)
