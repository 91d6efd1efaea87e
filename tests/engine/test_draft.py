"""Decoding with drafts over a fake trunk: the text is the trunk's own whatever the head says, and every step is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import EngineError
from quantkit.engine.draft import Chooser, Generation, Tokens, decode_drafting, decode_in_blocks, decode_plainly
from quantkit.measure.acceptance import VerifyStep
from quantkit.measure.sampling import Sampler
from tests.engine.fake_draft import N_VOCAB, Clock, FakeHead, FakeTrunk, true_logits

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
SAMPLER = Sampler(temperature=0.8, top_k=8, top_p=0.95, min_p=0.05, seed=7, stream=2)


def plain(trunk: FakeTrunk, n_predict: int = 12, sampler: Sampler | None = None, prompt: Tokens = PROMPT) -> Generation:
    return decode_plainly(trunk, prompt, n_predict, Chooser(len(prompt), sampler))


def drafted(trunk: FakeTrunk, head: FakeHead, n_predict: int = 12, n_draft: int = 3, sampler: Sampler | None = None,
            prompt: Tokens = PROMPT) -> Generation:
    return decode_drafting(trunk, head, prompt, n_predict, n_draft, Chooser(len(prompt), sampler))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), n_draft=st.integers(1, 6), n_predict=st.integers(1, 20), n_batch=st.integers(7, 16),
       sampled=st.booleans(), n_prompt=st.integers(1, 20))
@pytest.mark.slow
def test_text_with_drafts_is_the_trunks_own(seed: int, n_draft: int, n_predict: int, n_batch: int, sampled: bool,
                                            n_prompt: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, N_VOCAB, n_prompt).astype(np.int32)
    right = rng.random(64) < rng.random()
    sampler = SAMPLER if sampled else None
    trunk = FakeTrunk(n_batch=n_batch)
    found = drafted(trunk, FakeHead(trunk, lambda pos: bool(right[pos % 64])), n_predict, n_draft, sampler, prompt)
    assert found.tokens == plain(FakeTrunk(n_batch=n_batch), n_predict, sampler, prompt).tokens
    assert len(found.tokens) == n_predict
    assert sum(step.n_accepted + 1 for step in found.steps) == n_predict
    assert all(0 <= step.n_accepted <= step.n_drafted <= n_draft for step in found.steps)


def test_a_head_that_is_always_right_needs_the_fewest_steps() -> None:
    trunk = FakeTrunk()
    found = drafted(trunk, FakeHead(trunk, lambda pos: True), n_predict=10, n_draft=3)
    # 4 + 4 + 2: the last draft is as long as what is still wanted, less the trunk's own token
    assert found.steps == (VerifyStep(3, 3), VerifyStep(3, 3), VerifyStep(1, 1))


def test_a_head_that_is_never_right_costs_and_changes_nothing() -> None:
    trunk = FakeTrunk()
    found = drafted(trunk, FakeHead(trunk, lambda pos: False), n_predict=5, n_draft=2)
    assert found.tokens == plain(FakeTrunk(), 5).tokens
    assert found.steps == (VerifyStep(2, 0), VerifyStep(2, 0), VerifyStep(2, 0), VerifyStep(1, 0), VerifyStep(0, 0))


def test_greedy_is_the_first_maximum_each_time() -> None:
    text = PROMPT.tolist()
    for token in plain(FakeTrunk(), 6).tokens:
        assert token == int(true_logits(text).argmax())
        text.append(token)


def test_the_text_ends_with_its_end_token_in_both_ways() -> None:
    whole = plain(FakeTrunk(), 12).tokens
    end = whole[5]
    expected = whole[:whole.index(end) + 1]
    trunk = FakeTrunk(end=end)
    assert plain(FakeTrunk(end=end), 12).tokens == expected
    assert drafted(trunk, FakeHead(trunk, lambda pos: True), 12, 4).tokens == expected


def test_a_memory_that_refuses_to_roll_back_is_an_error() -> None:
    trunk = FakeTrunk(can_roll_back=False)
    with pytest.raises(EngineError, match=r"cannot be rolled back to position 5"):
        drafted(trunk, FakeHead(trunk, lambda pos: False))


def test_a_memory_that_does_not_forget_changes_the_text() -> None:
    trunk = FakeTrunk(forgets=False)
    assert drafted(trunk, FakeHead(trunk, lambda pos: pos % 2 == 0)).tokens != plain(FakeTrunk()).tokens


def test_the_prompt_goes_to_the_head_unless_it_is_left_out() -> None:
    trunk = FakeTrunk(n_batch=3)
    head = FakeHead(trunk, lambda pos: True)
    chooser = Chooser(len(PROMPT), None)
    decode_drafting(trunk, head, PROMPT, 1, 1, chooser)
    assert (head.n_followed, head.n_noted) == (5, 0)
    decode_drafting(trunk, head, PROMPT, 1, 1, chooser, prompt_to_head=False)
    assert (head.n_followed, head.n_noted) == (1, 4)


def test_times_of_prompt_and_text_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("quantkit.engine.draft.time.perf_counter", clock)
    trunk = FakeTrunk(n_batch=4, clock=clock, seconds=1.0)
    found = decode_plainly(trunk, np.arange(10, dtype=np.int32), 5, Chooser(10, None))
    assert (found.t_prompt_s, found.t_decode_s) == (3.0, 5.0)  # 9 tokens in blocks of 4; 5 single ones
    trunk.n_batch = 16
    head = FakeHead(trunk, lambda pos: True, clock=clock, seconds=0.25)
    found = decode_drafting(trunk, head, np.arange(10, dtype=np.int32), 8, 3, Chooser(10, None))
    assert (found.t_prompt_s, found.t_decode_s) == (1.25, 2 * (1.0 + 0.25 * 3 + 0.25))


def test_watched_rows_are_those_that_chose() -> None:
    trunk = FakeTrunk()
    chooser = Chooser(len(PROMPT), None, watch=(0, 4))
    found = decode_plainly(trunk, PROMPT, 6, chooser)
    assert sorted(found.rows) == [0, 4]
    assert found.rows[4].tolist() == true_logits([*PROMPT.tolist(), *found.tokens[:4]]).tolist()


def test_blocks_of_a_given_text_give_the_rows_of_one_by_one() -> None:
    one = decode_plainly(FakeTrunk(), PROMPT, 8, Chooser(len(PROMPT), None, watch=range(8)))
    rows = decode_in_blocks(FakeTrunk(), PROMPT, one.tokens, 3, (1, 2, 5, 7))
    assert sorted(rows) == [1, 2, 5, 7]
    assert all((rows[i] == one.rows[i]).all() for i in rows)


def test_a_row_that_is_not_finite_names_its_position() -> None:
    trunk = FakeTrunk(logits=lambda tokens: np.full(N_VOCAB, np.nan if len(tokens) == 8 else 0.0, np.float32))
    with pytest.raises(EngineError, match=r"finite logits, .* at position 8"):
        plain(trunk)
