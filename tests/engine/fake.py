"""A fake at the lowest seam: models and contexts whose logits are a function of the tokens, and a pool that runs in-process.

Only `Model` and `Context` are replaced; everything above them is the real code. What a model does wrong is in its file, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.engine import lockstep
from quantkit.engine.library import BuildFacts
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.slices import Piece

Tokens = npt.NDArray[np.int32]
BUILD = BuildFacts(backend="CPU", llama_cpp_python="0", llama_cpp_commit="fake", system_info="fake")


class FakeModel:
    """`n_vocab`, `add_bos`, `bos`, `noise` and faults from the file's JSON; tokens are bytes modulo n_vocab."""

    def __init__(self, path: Path, **_: Any) -> None:
        self.path = path
        self.facts: dict[str, Any] = json.loads(path.read_text())
        self.n_vocab = int(self.facts.get("n_vocab", 32))
        self.add_bos = bool(self.facts.get("add_bos", False))
        self.bos = 1
        self.closed = False

    def tokenize(self, text: bytes, **_: bool) -> Tokens:
        return np.frombuffer(text, np.uint8).astype(np.int32) % self.n_vocab

    def token_ends(self, ids: Tokens, **_: bool) -> npt.NDArray[np.int64]:
        return np.arange(1, len(ids) + 1)

    def pieces(self, ids: Tokens) -> dict[int, Piece]:
        return {i: Piece(bytes([i]), False) for i in np.unique(ids).tolist()}

    def close(self) -> None:
        self.closed = True


class FakeContext:
    """A sequence with a memory: logits depend on all tokens since `clear`, so a missing clear shows."""

    inputs: list[list[int]] = []  # noqa: RUF012 - a record for tests, reset by the fixture

    def __init__(self, model: FakeModel, settings: ContextSettings, *, n_outputs_max: int, **_: Any) -> None:
        self.model = model
        self.n_batch = min(settings.n_batch, settings.n_ctx)
        self._n_outputs_max = n_outputs_max
        self._state = 0

    def clear(self) -> None:
        self._state = 0

    def decode(self, tokens: Tokens, pos: int, scored: slice) -> npt.NDArray[np.float32]:
        assert len(tokens) <= self.n_batch
        FakeContext.inputs.append(tokens.tolist())
        out = []
        for i, token in enumerate(tokens):
            self._state = (self._state * 31 + int(token) + 7) % 1_000_003
            if i in range(*scored.indices(len(tokens))):
                out.append(self._logits(pos + i))
        assert len(out) <= self._n_outputs_max
        return np.array(out, np.float32).reshape(len(out), self.model.n_vocab)

    def _logits(self, pos: int) -> npt.NDArray[np.float32]:
        facts = self.model.facts
        logits = np.random.default_rng(self._state).normal(0, 3, self.model.n_vocab)
        noise = np.random.default_rng((self._state, 1)).normal(0, 1, self.model.n_vocab)
        if pos == facts.get("nan_at"):
            logits[0] = np.nan
        return (logits + float(facts.get("noise", 0.0)) * noise).astype(np.float32)

    def close(self) -> None:
        pass


class InProcessPool:
    """A `WorkerPool` without processes: each worker is a state of its own, commands run at once."""

    def __init__(self, n_workers: int = 1) -> None:
        self.workers = [WorkerState() for _ in range(n_workers)]
        self.steps: list[str] = []

    def call(self, step: str, command: Callable[..., Any], *, on_item: Callable[[Any], None] | None = None,
             **arguments: Any) -> Any:
        self.steps.append(step)
        result = command(self.workers[0], **arguments)
        if not isinstance(result, Iterator):
            return result
        for item in result:
            if on_item is not None:
                on_item(item)
        return None

    def each(self, step: str, command: Callable[..., Any], arguments: Sequence[dict[str, Any]]) -> list[Any]:
        self.steps.append(step)
        return [command(worker, **own) for worker, own in zip(self.workers, arguments, strict=False)]

    def broadcast(self, step: str, command: Callable[..., Any], **arguments: Any) -> list[Any]:
        return self.each(step, command, [arguments] * len(self.workers))

    def stream(self, step: str, command: Callable[..., Any], tasks: Sequence[dict[str, Any]]) -> Iterator[Any]:
        self.steps.append(step)
        for i, task in enumerate(tasks):
            yield from command(self.workers[i % len(self.workers)], **task)

    def kill(self) -> None:
        for worker in self.workers:
            worker.close()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes in llama.cpp's place."""
    FakeContext.inputs = []
    monkeypatch.setattr(lockstep, "Model", FakeModel)
    monkeypatch.setattr(lockstep, "Context", FakeContext)
    monkeypatch.setattr(lockstep, "load_library", lambda: None)
    monkeypatch.setattr(lockstep, "build_facts", lambda *_: BUILD)


def write_model(path: Path, **facts: Any) -> Path:
    """A model file for `FakeModel`."""
    path.write_text(json.dumps(facts))
    return path


SETTINGS = ContextSettings(n_ctx=16, n_batch=16, n_ubatch=16, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=1)
OFFLOAD = Offload()
