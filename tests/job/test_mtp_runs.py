"""The order of timed runs: everything once a repeat, and each way before the other as often as after."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.job.mtp_runs import schedule


@given(n_prompt=st.integers(1, 6), n_arm=st.integers(1, 4), repeats=st.integers(3, 6), together=st.booleans())
def test_every_arm_of_every_prompt_runs_once_a_repeat(n_prompt: int, n_arm: int, repeats: int, together: bool) -> None:
    turns = list(schedule(n_prompt, range(n_arm), repeats, together=together))
    assert Counter(turns) == Counter((r, p, a) for r in range(repeats) for p in range(n_prompt) for a in range(n_arm))
    assert [turn.repeat for turn in turns] == sorted(turn.repeat for turn in turns)


@pytest.mark.parametrize("n_prompt", [2, 8])
def test_each_way_comes_first_as_often(n_prompt: int) -> None:
    turns = list(schedule(n_prompt, [0, 1, 3], 4, together=True))
    first = Counter(turns[i].n_draft for i in range(0, len(turns), 3))
    assert first == {0: 2 * n_prompt, 3: 2 * n_prompt}


def test_a_process_at_a_time_changes_hands_once_a_repeat() -> None:
    drafting = [turn.n_draft > 0 for turn in schedule(4, [0, 1, 2], 4, together=False)]
    changes = sum(a != b for a, b in itertools.pairwise(drafting))
    assert changes == 4  # plain draft | draft plain | plain draft | draft plain
