"""Choosing tokens: the filters by hand, the noise by law, and chance that is the same in whatever order tokens are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.measure.sampling import Sampler, candidates, choice_margin, choose, gumbel, uniform


def sampler(**changes: float) -> Sampler:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "stream": 0} | changes
    return Sampler(temperature=values["temperature"], top_k=int(values["top_k"]), top_p=values["top_p"], min_p=values["min_p"],
                   seed=int(values["seed"]), stream=int(values["stream"]))


def row(*probabilities: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([math.log(p) for p in probabilities], np.float32)


def test_greedy_takes_the_first_maximum() -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), 0, None) == 1


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, [1, 3, 0, 2]),
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 9}, [1, 3, 0, 2]),
    ({"top_p": 0.45}, [1]),
    ({"top_p": 0.55}, [1, 3]),  # 0.5 is not enough
    ({"top_p": 0.95}, [1, 3, 0, 2]),
    ({"min_p": 0.55}, [1, 3]),  # 0.3 is 0.6 of 0.5
    ({"min_p": 1.0}, [1]),
    ({"top_k": 3, "top_p": 0.6}, [1, 3]),  # the share is of what top_k left: 0.5 of 0.9 is below 0.6
    ({"top_k": 2, "top_p": 0.6}, [1]),  # and here 0.5 of 0.8 is above
])
def test_filters_keep_what_they_say(changes: dict[str, float], expected: list[int]) -> None:
    assert candidates(row(0.1, 0.5, 0.1, 0.3), sampler(**changes)).tolist() == expected


def test_of_equal_tokens_the_smaller_id_comes_first() -> None:
    assert candidates(np.zeros(5, np.float32), sampler(top_p=0.5)).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = np.bincount([choose(row(*p), position, sampler()) for position in range(4_000)], minlength=4) / 4_000
    assert np.abs(drawn - p).max() < 4 * np.sqrt(0.25 / 4_000)


@pytest.mark.slow
def test_temperature_sharpens() -> None:
    p = np.array([0.6, 0.4])
    drawn = np.mean([choose(row(*p), position, sampler(temperature=0.5)) == 0 for position in range(4_000)])
    assert drawn == pytest.approx(0.36 / (0.36 + 0.16), abs=0.03)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(3, 1, 9, np.arange(200_000))
    assert noise.mean() == pytest.approx(0.577216, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)


def test_noise_is_pinned() -> None:
    """The same seed must give the same text next year and on another machine."""
    assert gumbel(1, 2, 3, np.array([0, 1, 248_319])).tolist() == pytest.approx(
        [-0.9691756739926684, 0.8434927540731589, 1.635892142435686], rel=1e-12)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), stream=st.integers(0, 1000), position=st.integers(0, 2**31), ids=st.sets(
    st.integers(0, 300_000), min_size=1, max_size=30))
def test_noise_belongs_to_the_token_not_to_its_company(seed: int, stream: int, position: int, ids: set[int]) -> None:
    together = gumbel(seed, stream, position, np.array(sorted(ids)))
    alone = [gumbel(seed, stream, position, np.array([i]))[0] for i in sorted(ids)]
    assert together.tolist() == alone


def test_each_of_seed_stream_and_position_moves_the_noise() -> None:
    tokens = np.arange(64)
    found = {tuple(gumbel(seed, stream, position, tokens)) for seed in (1, 2) for stream in (1, 2) for position in (1, 2)}
    assert len(found) == 8


def test_a_draw_that_is_thrown_away_moves_no_other() -> None:
    """What makes sampled text comparable: drafting draws at positions that it later draws at again."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2, (20, 50)).astype(np.float32)
    forward = [choose(rows[i], i, sampler()) for i in range(20)]
    for i in (5, 3, 11):
        choose(rng.normal(0, 2, 50).astype(np.float32), i, sampler())
    assert [choose(rows[i], i, sampler()) for i in reversed(range(20))] == forward[::-1]


def test_sampling_without_temperature_is_refused() -> None:
    with pytest.raises(InputError, match="temperature above 0"):
        sampler(temperature=0.0)


def test_margin_of_a_greedy_choice_is_that_of_the_logarithms() -> None:
    assert choice_margin(row(0.2, 0.6, 0.2), 0, None) == pytest.approx(np.log(3), rel=1e-6)


def test_margin_of_a_sampled_choice_is_what_would_have_changed_it() -> None:
    logits, s = row(0.4, 0.35, 0.25), sampler(temperature=0.7)
    chosen, margin = choose(logits, 4, s), choice_margin(logits, 4, s)
    assert margin is not None
    lowered = logits.copy()
    lowered[chosen] -= margin * 0.999
    assert choose(lowered, 4, s) == chosen
    lowered[chosen] -= margin * 0.002
    assert choose(lowered, 4, s) != chosen


def test_margin_of_a_single_candidate_is_undefined() -> None:
    assert choice_margin(row(0.4, 0.6), 0, sampler(top_k=1)) is None


def test_uniform_numbers_fill_the_unit_interval() -> None:
    found = uniform(5, 0, 10_000)
    assert 0 < found.min() < 0.01 < 0.99 < found.max() < 1
    assert found.mean() == pytest.approx(0.5, abs=0.02)
