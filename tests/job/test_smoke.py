"""The smoke test: what passes, what is told, and what a crash comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from quantkit.core.errors import EngineCrash
from quantkit.engine.pool import WorkerPool
from quantkit.engine.smoke import Answer, ServedAnswer, answer_prompt, has_server, serve_prompt
from quantkit.job import smoke as module
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.smoke import SmokeRecord, smoke_path, smoke_test, smoke_tier
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model as write_tiny

PROTOCOL = load_protocol("demo-v1")
SHA256 = "12" * 32


class FakePool:
    """Answers with what it was given, in order; an error is raised."""

    def __init__(self, *answers: Answer | ServedAnswer | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def call(self, step: str, command: Callable[..., Any], **arguments: Any) -> Any:
        self.calls.append((command, arguments))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(n: int = 32, text: bytes = b" a text", *, ids: tuple[int, ...] | None = None, template: bool = False) -> Answer:
    return Answer(token_ids=tuple(range(n)) if ids is None else ids, text=text, n_prompt_tokens=7, ended=n < 32,
                  template_applied=template)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "a model.gguf")[0]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_server", lambda: True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "engine" not in request.keywords and "served" not in request.fixturenames:
        monkeypatch.setattr(module, "has_server", lambda: False)


def ask(model: Path, *answers: Answer | ServedAnswer | Exception) -> SmokeRecord:
    return smoke_test(cast(WorkerPool, FakePool(*answers)), PROTOCOL, model, SHA256, 1)


def test_an_answer_passes_and_everything_is_on_record(model: Path) -> None:
    record = ask(model, answer())
    assert record == SmokeRecord(
        schema=1, file="a model.gguf", sha256=SHA256, prompt="The history of the town begins with", n_predict=32, template="none",
        through="in-process", n_tokens=32, ended=False, valid_utf8=True, repeat_share=0.0, looped=False, text=" a text",
        served_text=None, passed=True, failures=())
    assert SmokeRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(("n", "failures"), [(16, ()), (15, ("expected at least 16 tokens, got 15",)),
                                             (0, ("expected at least 16 tokens, got 0",))])
def test_fewer_than_16_tokens_fail(model: Path, n: int, failures: tuple[str, ...]) -> None:
    record = ask(model, answer(n))
    assert (record.n_tokens, record.failures, record.passed) == (n, failures, not failures)


@pytest.mark.parametrize(("text", "valid", "shown"), [
    ("grün".encode(), True, "grün"), ("grün".encode()[:3], True, "gr"), (b"gr\xffn", False, "gr�n"), (b"gr\xc3n", False, "gr�n")])
def test_bytes_that_are_not_utf_8_fail_but_for_a_cut_end(model: Path, text: bytes, valid: bool, shown: str) -> None:
    record = ask(model, answer(text=text))
    assert (record.valid_utf8, record.text, record.passed) == (valid, shown, valid)


def test_a_loop_is_told_and_does_not_fail(model: Path) -> None:
    record = ask(model, answer(ids=(5, 6) * 16))
    assert (record.looped, record.passed) == (True, True)
    assert record.repeat_share == pytest.approx(27 / 29)


def test_a_crash_is_a_failure_in_its_words_and_names_no_folder(model: Path) -> None:
    record = ask(model, EngineCrash(f"smoke a model: the worker process ended by SIGABRT. Last lines of its log: {model}: bad"))
    assert record.failures == ("smoke a model: the worker process ended by SIGABRT. Last lines of its log: a model.gguf: bad",)
    assert (record.passed, record.n_tokens, record.repeat_share) == (False, 0, None)


@pytest.mark.usefixtures("served")
def test_the_server_is_asked_the_same_and_must_answer(model: Path) -> None:
    pool = FakePool(answer(text=b"a text", template=True), ServedAnswer(text="another", n_tokens=15, finish_reason="stop"))
    record = smoke_test(cast(WorkerPool, pool), PROTOCOL, model, SHA256, 2)
    assert [command for command, _ in pool.calls] == [answer_prompt, serve_prompt]
    first, second = (arguments for _, arguments in pool.calls)
    assert second == {**first, "chat": True}
    assert (first["path"], first["n_predict"], first["n_threads"]) == (model, 32, 2)
    assert (record.through, record.served_text, record.failures) == (
        "server", "another", ("expected at least 16 tokens from the server, got 15",))


def test_a_record_of_this_file_and_prompt_is_kept(model: Path, tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path / "run")

    def ask(*answers: Answer, protocol: Any = PROTOCOL, sha256: str = SHA256) -> SmokeRecord:
        return smoke_tier(run, cast(WorkerPool, FakePool(*answers)), protocol, "Q8_0", model, sha256, 1)

    first = ask(answer())
    assert read_json(smoke_path(run, "Q8_0")) == first.to_json()
    assert ask() == first
    assert ask(answer(20), sha256="34" * 32).n_tokens == 20
    other = dataclasses.replace(PROTOCOL, gate=dataclasses.replace(PROTOCOL.gate, smoke_prompt="Hello"))
    assert ask(answer(21), protocol=other).prompt == "Hello"
    smoke_path(run, "Q8_0").write_text("{}")
    assert ask(answer(22)).n_tokens == 22


@pytest.mark.engine
def test_real_files(tiny_model: Path, moe_model: Path) -> None:
    """One has a chat template; the other's weights are random, and so are its bytes."""
    with WorkerPool() as pool:
        chat, noise = (smoke_test(pool, PROTOCOL, path, SHA256, 1) for path in (tiny_model, moe_model))
    assert (chat.passed, chat.n_tokens, len(chat.template), chat.failures) == (True, 32, 64, ())
    assert (noise.passed, noise.template, noise.failures) == (False, "none", ("expected UTF-8, got other bytes",))
    assert chat.through == ("server" if has_server() else "in-process")


@pytest.mark.engine
@pytest.mark.skipif(not has_server(), reason="needs the server extra of llama-cpp-python")
def test_the_server_says_the_same_as_the_api(tiny_model: Path) -> None:
    with WorkerPool() as pool:
        assert smoke_test(pool, PROTOCOL, tiny_model, SHA256, 1).served_text is None


@pytest.mark.engine
def test_a_template_that_cannot_be_applied_fails(tmp_path: Path) -> None:
    [path] = write_tiny(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{{ raise_exception('tools only') }}"})
    with WorkerPool() as pool:
        record = smoke_test(pool, PROTOCOL, path, SHA256, 1)
    assert record.failures == ("the chat template of the file cannot be applied: ValueError: tools only; correct "
                               "tokenizer.chat_template",)
