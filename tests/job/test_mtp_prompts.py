"""Prompts: where a seed puts them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.engine.chat import ChatPrompt
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.mtp_prompts import choose_prompts, prompt_starts
from quantkit.spec.protocol import MtpSpec
from tests.engine.fake import InProcessPool
from tests.job.mtp_fakes import protocol
from tests.mtp_factory import headed_model

IDS = np.arange(1000, dtype=np.int32)


@pytest.fixture
def trunk(tmp_path: Path) -> Subject:
    return read_subject(headed_model(tmp_path / "m.gguf")[0], "m")


def spec(*settings: str) -> MtpSpec:
    return protocol(*settings).mtp


def test_each_prompt_lies_in_its_own_run_of_the_text() -> None:
    starts = prompt_starts(spec("mtp.n_prompt=10", "mtp.prompt_n_tokens=20"), 1000)
    assert all(i * 100 <= start <= (i + 1) * 100 - 20 for i, start in enumerate(starts))


def test_the_seed_moves_them_and_nothing_else_does() -> None:
    assert prompt_starts(spec(), 1000) == prompt_starts(spec("mtp.temperature=0.5"), 1000)
    assert prompt_starts(spec(), 1000) != prompt_starts(spec("mtp.seed=2"), 1000)


def test_a_text_that_just_holds_the_prompts_is_cut_without_overlap() -> None:
    assert prompt_starts(spec("mtp.n_prompt=3", "mtp.prompt_n_tokens=8"), 24) == [0, 8, 16]
    with pytest.raises(InputError, match=r"expected at least 3 x 8 tokens .* got 23"):
        prompt_starts(spec("mtp.n_prompt=3", "mtp.prompt_n_tokens=8"), 23)


def test_tokens_and_source_are_those_of_the_text(trunk: Subject) -> None:
    prompts = choose_prompts(InProcessPool(), spec(), trunk, IDS, add_bos=False)  # type: ignore[arg-type]
    for prompt in prompts:
        start = int(prompt.source.rsplit(" ", 1)[1])
        assert prompt.tokens.tolist() == list(range(start, start + 8))
    assert [prompt.sampler(spec()).stream for prompt in prompts] == [0, 1, 2]


def test_a_bos_stands_where_the_vocabulary_adds_one(trunk: Subject) -> None:
    ids = IDS.copy()
    ids[0] = 77
    prompts = choose_prompts(InProcessPool(), spec(), trunk, ids, add_bos=True)  # type: ignore[arg-type]
    assert [int(prompt.tokens[0]) for prompt in prompts] == [77, 77, 77]
    assert ids[1:].tolist() == IDS[1:].tolist()


def test_given_texts_follow_the_texts_pieces(trunk: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompts_of(state: object, *, path: Path, texts: tuple[str, ...]) -> list[ChatPrompt]:
        return [ChatPrompt(np.arange(len(text), dtype=np.int32), text != "raw") for text in texts]

    monkeypatch.setattr("quantkit.job.mtp_prompts.chat_prompts", prompts_of)
    given: Any = spec('mtp.prompts=["raw", "a question"]')
    prompts = choose_prompts(InProcessPool(), given, trunk, IDS, add_bos=False)  # type: ignore[arg-type]
    assert [prompt.source for prompt in prompts[3:]] == [
        "mtp.prompts[0], no chat template in the model", "mtp.prompts[1], with the chat template"]
    assert [len(prompt.tokens) for prompt in prompts[3:]] == [3, 10]
    too_long = spec(f'mtp.prompts=["{"x" * 21}"]')
    with pytest.raises(InputError, match=r"mtp.prompts\[0\]: expected 2 to 20 tokens .* got 21"):
        choose_prompts(InProcessPool(), too_long, trunk, IDS, add_bos=False)  # type: ignore[arg-type]
