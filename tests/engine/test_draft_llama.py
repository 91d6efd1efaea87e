"""Drafting with llama.cpp on the tiny model: the oracle's tokens and counts, every way of rolling back, chained blocks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError
from quantkit.engine.chat import chat_prompts
from quantkit.engine.draft import Generation
from quantkit.engine.draft_session import (
    ChunkChoices,
    block_rows,
    follow_chunks,
    generate,
    open_draft,
    open_plain,
    open_teacher,
    peak_memory,
)
from quantkit.engine.lockstep import tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.mtp_files import split_model
from quantkit.measure.acceptance import VerifyStep
from quantkit.measure.fork import first_fork, judge_fork, row_difference
from quantkit.measure.sampling import Sampler, choice_margin, choose
from quantkit.measure.teacher import teacher_forced
from tests.mtp_factory import chained_model, with_zeros

pytestmark = pytest.mark.engine

# As the oracle's numbers were made: flash attention is llama.cpp's own choice on the CPU.
SETTINGS = ContextSettings(n_ctx=512, n_batch=512, n_ubatch=512, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=2)
N_DRAFT = 3


class Bench:
    """Two workers, one for each way of decoding, with the tiny model's text."""

    def __init__(self, plain: WorkerPool, drafting: WorkerPool, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        self.plain, self.drafting, self.ids = plain, drafting, ids

    def open(self, trunk: Path, head: Path, *, settings: ContextSettings = SETTINGS, n_draft: int = N_DRAFT, **more: Any) -> Any:
        self.plain.call("plain", open_plain, trunk=trunk, settings=settings, offload=Offload())
        return self.drafting.call("draft", open_draft, trunk=trunk, head=head, settings=settings, offload=Offload(),
                                  n_draft=n_draft, **more)

    def both(self, prompt: Any, n_predict: int, sampler: Sampler | None = None, *, n_draft: int = N_DRAFT,
             **more: Any) -> tuple[Generation, Generation]:
        one = self.plain.call("plain", generate, prompt=prompt, n_predict=n_predict, n_draft=0, sampler=sampler, **more)
        two = self.drafting.call("draft", generate, prompt=prompt, n_predict=n_predict, n_draft=n_draft, sampler=sampler, **more)
        return one, two

    def same_text(self, prompt: Any, n_predict: int, sampler: Sampler | None = None, *, n_draft: int = N_DRAFT,
                  **more: Any) -> Generation:
        """Both ways give one text, or part where two tokens are as near as batch shapes bring rows apart; the drafting run."""
        one, two = self.both(prompt, n_predict, sampler, n_draft=n_draft, **more)
        fork = first_fork(one.tokens, two.tokens)
        if fork is not None:
            watch = tuple(range(max(0, fork.position - 15), fork.position + 1))
            plain, drafted = self.both(prompt, n_predict, sampler, n_draft=n_draft, watch=watch, **more)
            blocks = self.drafting.call("draft", block_rows, prompt=prompt, tokens=one.tokens, n_block=n_draft + 1, watch=watch)
            shape = max(row_difference(plain.rows[i], blocks[i]) for i in watch)
            follows = choose(drafted.rows[fork.position], len(prompt) + fork.position, sampler) == fork.drafted
            difference = row_difference(plain.rows[fork.position], drafted.rows[fork.position])
            assert judge_fork(difference, shape, follows_own_row=follows) == "near-tie", (fork, difference, shape)
        return two


@pytest.fixture(scope="module")
def bench(tiny_model: Path, wiki_test: Path) -> Iterator[Bench]:
    with WorkerPool(1) as plain, WorkerPool(1) as drafting:
        yield Bench(plain, drafting, plain.call("tokenize", tokenize, path=tiny_model, text=wiki_test.read_bytes()).ids)


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "oracle" / "oracle.json").read_text())
    return found


@pytest.fixture(scope="module")
def parts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("parts")
    split_model(tiny_model, folder / "trunk.gguf", folder / "head.gguf")
    return folder / "trunk.gguf", folder / "head.gguf"


def sampler(stream: int) -> Sampler:
    return Sampler(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1, stream=stream)


def test_ten_prompts_greedy_and_sampled_are_the_trunks_own_and_the_oracles(bench: Bench, oracle: dict[str, Any],
                                                                         parts: tuple[Path, Path]) -> None:
    rollback = bench.open(*parts)
    assert (rollback.mode, rollback.n_rs_seq) == ("recurrent snapshots", N_DRAFT)
    for i, expected in enumerate(oracle["mtp"]):
        prompt = bench.ids[expected["prompt_from_token"]:][:expected["n_prompt"]]
        # a few tokens more than the oracle's, whose last step drafts in full where ours drafts what is still wanted
        plain, drafted = bench.both(prompt, expected["n_predict"] + N_DRAFT + 1)
        assert plain.tokens[:expected["n_predict"]] == tuple(expected["greedy_tokens"])
        assert drafted.tokens == plain.tokens
        steps = steps_until(drafted, expected["n_predict"])
        per_step = [sum(step.n_accepted >= at for step in steps) / len(steps) for at in (1, 2, 3)]
        assert per_step == pytest.approx(expected["acceptance_by_position_per_step"], abs=1 / len(steps) + 1e-9)
        assert len(bench.same_text(prompt, 32, sampler(i)).tokens) == 32


def steps_until(found: Generation, n_tokens: int) -> list[VerifyStep]:
    """The steps that bring the text to so many tokens."""
    steps, n = [], 0
    for step in found.steps:
        if n >= n_tokens:
            break
        steps.append(step)
        n += step.n_accepted + 1
    return steps


def test_totals_agree_with_llama_speculative_simple(bench: Bench, oracle: dict[str, Any], tiny_model: Path) -> None:
    """Prompts are handled the same way: all but the last token first, each also to the head. What differs is the end: that program
    goes on until there are more than n_predict tokens, cuts a draft to what is wanted, yet drafts in full when nothing more is. So
    the counts may part by the steps after the first cut: one draft and its acceptance.
    """
    bench.open(tiny_model, tiny_model)
    for expected in oracle["llama_speculative_simple"]:
        prompt = bench.plain.call("tokenize", tokenize, path=tiny_model, text=expected["prompt"].encode()).ids
        found = bench.drafting.call("draft", generate, prompt=prompt, n_predict=104, n_draft=N_DRAFT, sampler=None)
        steps = steps_until(found, expected["n_predict_asked"] + 1)
        assert abs(sum(s.n_drafted for s in steps) - expected["n_drafted"]) <= N_DRAFT
        assert abs(sum(s.n_accepted for s in steps) - expected["n_accept"]) <= N_DRAFT


def test_teacher_forced_acceptance_is_the_oracles(bench: Bench, oracle: dict[str, Any], parts: tuple[Path, Path], tiny_model: Path
                                                  ) -> None:
    items: list[ChunkChoices] = []
    bench.drafting.call("teacher", open_teacher, trunk=tiny_model, heads=[tiny_model, parts[1]], settings=SETTINGS,
                        offload=Offload(), tokens=bench.ids)
    bench.drafting.call("teacher", follow_chunks, on_item=items.append, chunks=tuple(range(oracle["n_chunk"])))
    trunk, head = (np.concatenate(rows) for rows in zip(*((i.trunk, i.heads[0]) for i in items), strict=True))
    chunks = np.repeat(np.arange(len(items)), 511)
    found, expected = teacher_forced(trunk, head, chunks, chunks * 0), oracle["teacher_forced_acceptance"]
    assert found.n == oracle["n_chunk"] * 511
    assert found.value == pytest.approx(expected["value"], abs=2e-3)  # 16 positions of 8176: other kernels on other machines
    assert found.se_chunk == pytest.approx(expected["se_cluster"], rel=0.05)
    assert found.chance < 0.2
    assert all((item.heads[0] == item.heads[1]).all() for item in items)
    # a chunk alone gives what it gave after others: the memory is cleared in between
    again: list[ChunkChoices] = []
    bench.drafting.call("teacher", follow_chunks, on_item=again.append, chunks=(7,))
    assert (again[0].heads[0] == items[7].heads[0]).all()


def test_every_way_of_rolling_back_gives_the_same_text(bench: Bench, tiny_model: Path) -> None:
    texts = {}
    for snapshots, mode in ((True, "recurrent snapshots"), (False, "checkpoint")):
        assert bench.open(tiny_model, tiny_model, snapshots=snapshots).mode == mode
        drafted = bench.same_text(bench.ids[20000:20064], 48)
        texts[mode] = drafted.tokens
        assert any(step.n_accepted < step.n_drafted for step in drafted.steps)
    assert texts["checkpoint"] == texts["recurrent snapshots"]


def test_chained_blocks_draft_one_position_each(bench: Bench, tmp_path: Path) -> None:
    prompt = np.arange(40, 60, dtype=np.int32)
    settings = dataclasses.replace(SETTINGS, n_ctx=128, n_batch=128, n_ubatch=128)
    by_right = {}
    for right in ((True, True), (True, False), (False, True)):
        model = chained_model(tmp_path / f"chained-{right}.gguf", right)
        assert bench.open(model, model, settings=settings, n_draft=4).mode == "plain KV"
        plain, drafted = bench.both(prompt, 40, n_draft=4)
        assert drafted.tokens == plain.tokens
        assert max(step.n_drafted for step in drafted.steps) == 2  # no more than there are blocks
        by_right[right] = {step.n_accepted for step in drafted.steps if step.n_drafted == 2}
    assert by_right[True, True] == {2}
    assert by_right[True, False] == {1}
    assert by_right[False, True] == {0}


def test_a_head_whose_projection_is_zero_leaves_the_text_alone(bench: Bench, tiny_model: Path, tmp_path: Path) -> None:
    dead = with_zeros(tiny_model, tmp_path / "dead.gguf", "blk.4.nextn.eh_proj.weight")
    bench.open(dead, dead)
    drafted = bench.same_text(bench.ids[2000:2064], 48)
    assert sum(s.n_accepted for s in drafted.steps) < 0.1 * sum(s.n_drafted for s in drafted.steps)


def test_without_the_prompt_the_head_accepts_something_else(bench: Bench, tiny_model: Path) -> None:
    bench.open(tiny_model, tiny_model)
    n_accepted = []
    for prompt_to_head in (True, False):
        runs = [bench.same_text(bench.ids[at:at + 64], 48, sampler(0), prompt_to_head=prompt_to_head) for at in (2000, 8000, 20000)]
        n_accepted.append([sum(s.n_accepted for s in run.steps) for run in runs])
    assert n_accepted[0] != n_accepted[1]


def test_a_near_tie_is_told_by_rows_that_batch_shapes_alone_bring_as_far_apart(bench: Bench, tiny_model: Path) -> None:
    """Without flash attention the text after this prompt forks on some machines; where it does, it is by a hair."""
    settings = dataclasses.replace(SETTINGS, flash_attn=False)
    bench.open(tiny_model, tiny_model, settings=settings)
    prompt = bench.ids[14000:14064]
    plain, drafted = bench.both(prompt, 96)
    fork = first_fork(plain.tokens, drafted.tokens)
    if fork is None:
        pytest.skip("this machine's kernels round alike for all batch shapes here")
    watch = tuple(range(max(0, fork.position - 15), fork.position + 1))
    one, two = bench.both(prompt, 96, watch=watch)
    blocks = bench.drafting.call("draft", block_rows, prompt=prompt, tokens=plain.tokens, n_block=N_DRAFT + 1, watch=watch)
    margin = choice_margin(one.rows[fork.position], 0, None)
    assert margin is not None
    assert margin < 0.01
    assert row_difference(one.rows[fork.position], two.rows[fork.position]) <= 3 * max(
        row_difference(one.rows[i], blocks[i]) for i in watch)


def test_a_head_of_another_width_is_refused(bench: Bench, tiny_model: Path, tmp_path: Path) -> None:
    other = chained_model(tmp_path / "other.gguf", (True,))
    with pytest.raises(EngineError, match=r"other.gguf is not a head of .*: expected hidden rows of 256 values, found 64"):
        bench.open(tiny_model, other)


def test_given_prompts_take_the_models_own_template(bench: Bench, tiny_model: Path, moe_model: Path) -> None:
    (chat,) = bench.plain.call("chat", chat_prompts, path=tiny_model, texts=("Where is it?",))
    raw = bench.plain.call("tokenize", tokenize, path=tiny_model, text=b"Where is it?").ids
    assert chat.templated
    assert len(chat.tokens) > len(raw) + 2
    assert ((chat.tokens == 4094).sum(), (chat.tokens == 4095).sum()) == (2, 1)  # <|im_start|> and <|im_end|> are one token each
    (bare,) = bench.plain.call("chat", chat_prompts, path=moe_model, texts=("Where is it?",))
    assert not bare.templated


def test_peak_memory_is_of_the_process(bench: Bench) -> None:
    assert 50e6 < bench.plain.call("memory", peak_memory) < 2e9
