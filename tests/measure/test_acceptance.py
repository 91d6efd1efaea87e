"""Acceptance by hand, and the identities that hold between its numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.measure.acceptance import VerifyStep, count_acceptance, share

STEPS = st.integers(0, 4).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))).map(lambda t: VerifyStep(*t))
TEXTS = st.lists(st.lists(STEPS, max_size=12), max_size=5)


def test_numbers_of_two_texts_by_hand() -> None:
    found = count_acceptance([[VerifyStep(3, 3), VerifyStep(3, 1)], [VerifyStep(3, 0), VerifyStep(1, 1), VerifyStep(0, 0)]], 3)
    assert (found.n_draft, found.n_text, found.n_step, found.n_drafted, found.n_accepted) == (3, 2, 5, 10, 5)
    assert found.acceptance_rate == 0.5
    assert found.mean_accepted_len == 2.0  # (3+1 + 1+1 + 0+1 + 1+1 + 0+1) / 5
    by_position = [(p.position, p.n_offered, p.n_reached, p.n_accepted, p.conditional, p.per_step)
                   for p in found.acceptance_by_position]
    assert by_position == [(1, 4, 4, 3, 3 / 4, 3 / 4), (2, 3, 2, 1, 1 / 2, 1 / 3), (3, 3, 1, 1, 1.0, 1 / 3)]


def test_the_error_is_a_jackknife_over_texts() -> None:
    found = count_acceptance([[VerifyStep(4, 1)], [VerifyStep(4, 3)], [VerifyStep(2, 2)]], 4)
    without = [5 / 6, 3 / 6, 4 / 8]
    mean = sum(without) / 3
    assert found.acceptance_rate_se == pytest.approx((2 / 3 * sum((x - mean) ** 2 for x in without)) ** 0.5)


@pytest.mark.parametrize("texts", [[], [[VerifyStep(2, 1)]], [[VerifyStep(2, 1)], [VerifyStep(0, 0)]]])
def test_too_few_texts_have_no_error(texts: list[list[VerifyStep]]) -> None:
    assert count_acceptance(texts, 2).acceptance_rate_se is None


def test_nothing_drafted_has_no_rate_and_not_zero() -> None:
    found = count_acceptance([[VerifyStep(0, 0)] * 3], 2)
    assert (found.n_drafted, found.acceptance_rate, found.mean_accepted_len) == (0, None, 1.0)
    assert [(p.conditional, p.per_step) for p in found.acceptance_by_position] == [(None, None), (None, None)]
    empty = count_acceptance([], 1)
    assert (empty.n_step, empty.acceptance_rate, empty.mean_accepted_len) == (0, None, None)


@settings(max_examples=40)
@given(texts=TEXTS)
@pytest.mark.slow
def test_positions_add_up_to_the_totals(texts: list[list[VerifyStep]]) -> None:
    found = count_acceptance(texts, 4)
    assert sum(p.n_accepted for p in found.acceptance_by_position) == found.n_accepted
    assert sum(p.n_offered for p in found.acceptance_by_position) == found.n_drafted
    for before, here in zip(found.acceptance_by_position, found.acceptance_by_position[1:], strict=False):
        assert here.n_reached <= before.n_accepted
        assert here.n_accepted <= here.n_reached


@settings(max_examples=40)
@given(texts=TEXTS)
@pytest.mark.slow
def test_the_order_of_steps_and_texts_does_not_matter(texts: list[list[VerifyStep]]) -> None:
    turned = count_acceptance([list(reversed(text)) for text in reversed(texts)], 4)
    found = count_acceptance(texts, 4)
    assert (turned.n_step, turned.acceptance_rate, turned.acceptance_by_position) == (
        found.n_step, found.acceptance_rate, found.acceptance_by_position)


def test_a_share_of_nothing_is_undefined() -> None:
    assert (share(0, 0), share(0, 4), share(1, 4)) == (None, 0.0, 0.25)
