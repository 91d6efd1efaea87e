"""A check without llama.cpp: the sessions hold fake trunks and heads, commands run in this process, and a clock stands still.

The seam is `engine.draft_session`'s session classes; jobs, loops, choices and records above them are the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.engine import draft, draft_session
from quantkit.engine.draft_session import ChunkChoices
from quantkit.engine.lockstep import Tokenized
from quantkit.engine.worker import WorkerState
from quantkit.job import mtp_check
from quantkit.job.rundir import RunFolder
from quantkit.spec.mtp_records import Rollback
from quantkit.spec.protocol import Protocol, load_protocol
from tests.engine.fake import BUILD, InProcessPool
from tests.engine.fake_draft import N_VOCAB, Clock, FakeHead, FakeTrunk, true_logits

TEXT = b"".join(b" \n = Title = \n \n" + b"x" * 100 for _ in range(8))
SETTINGS = ["mtp.n_prompt=3", "mtp.prompt_n_tokens=8", "mtp.n_predict=12", "mtp.n_draft=[1, 3]", "mtp.n_ctx=32", "mtp.n_batch=16",
            "mtp.n_ubatch=16", "mtp.teacher_chunks=all", "mtp.teacher_n_chunk=0", "mtp.n_threads=1"]


@dataclass
class World:
    """What the fake engine does, and what it did. Tests set fields before they run a check.

    right: whether the head guesses right, by position. reference_right: the same of a head in another file than the trunk's.
    wrong_at: a position at which a wrong draft token is accepted unseen. teacher_right: share of right first guesses, by file name.
    """

    clock: Clock = field(default_factory=Clock)
    trunk: dict[str, Any] = field(default_factory=dict)
    right: Callable[[int], bool] = lambda position: position % 3 != 0
    wrong_at: int | None = None
    teacher_right: dict[str, float] = field(default_factory=dict)
    rollback: Rollback = field(default_factory=lambda: Rollback(mode="plain KV", n_rs_seq=0))
    plain_seconds: float = 1.0
    draft_seconds: float = 0.25
    loops: bool = False
    opened: list[str] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Put the fakes in llama.cpp's place."""

    def logits(tokens: Sequence[int]) -> Any:
        if world.loops:
            return np.eye(N_VOCAB, dtype=np.float32)[5] * 50
        return true_logits(tokens)

    class Plain:
        def __init__(self, trunk: Path, *_: Any) -> None:
            world.opened.append(f"plain {trunk.name}")
            self.trunk = FakeTrunk(clock=world.clock, seconds=world.plain_seconds, logits=logits)

        def close(self) -> None:
            world.opened.append("close plain")

    class Drafting:
        def __init__(self, trunk: Path, head: Path, *_: Any, **__: Any) -> None:
            world.opened.append(f"draft {trunk.name} {head.name}")
            self.trunk = FakeTrunk(clock=world.clock, seconds=world.plain_seconds, logits=logits, **world.trunk)
            self.trunk.rollback = world.rollback  # type: ignore[attr-defined]
            self.head = FakeHead(self.trunk, world.right, clock=world.clock, seconds=world.draft_seconds)

        def close(self) -> None:
            world.opened.append("close draft")

    class Teacher:
        def __init__(self, trunk: Path, heads: Sequence[Path], *_: Any, tokens: Any, **__: Any) -> None:
            self._heads, self._tokens = heads, tokens

        def follow(self, chunk: int) -> ChunkChoices:
            rng = np.random.default_rng(chunk)
            trunk = rng.integers(0, N_VOCAB, 31).astype(np.int32)
            heads = [np.where(rng.random(31) < world.teacher_right.get(path.name, 0.7), trunk, (trunk + 1) % N_VOCAB)
                     for path in self._heads]
            return ChunkChoices(chunk, trunk, tuple(head.astype(np.int32) for head in heads))

        def close(self) -> None:
            pass

    true_verify = draft.verify

    def verify(rows: Any, guesses: Sequence[int], position: int, chooser: Any) -> tuple[int, int]:
        if world.wrong_at is not None and guesses and position == world.wrong_at:
            return 1, chooser.choose(rows[1], position + 1)  # the first is taken unseen
        return true_verify(rows, guesses, position, chooser)

    monkeypatch.setattr(draft_session, "PlainSession", Plain)
    monkeypatch.setattr(draft_session, "DraftSession", Drafting)
    monkeypatch.setattr(draft_session, "TeacherSession", Teacher)
    monkeypatch.setattr(draft, "verify", verify)
    monkeypatch.setattr("quantkit.engine.draft.time.perf_counter", world.clock)
    monkeypatch.setattr(mtp_check, "_pools", _pools)
    for name, command in (("tokenize", _tokenize), ("read_build", lambda *_, **__: BUILD), ("detokenize", _detokenize)):
        monkeypatch.setattr(mtp_check, name, command)


@contextmanager
def _pools(run: RunFolder) -> Iterator[tuple[InProcessPool, InProcessPool]]:
    yield InProcessPool(), InProcessPool()


def _tokenize(state: WorkerState, *, path: Path, text: bytes) -> Tokenized:
    ids = (np.arange(len(text)) * 7 % N_VOCAB).astype(np.int32)
    return Tokenized(ids, np.arange(1, len(text) + 1), N_VOCAB, False)


def _detokenize(state: WorkerState, *, path: Path, texts: tuple[tuple[int, ...], ...]) -> list[str]:
    return [" ".join(map(str, ids)) for ids in texts]


def protocol(*settings: str) -> Protocol:
    """A small MTP protocol over a text of bytes."""
    return load_protocol("demo-v1", [*SETTINGS, *settings])
