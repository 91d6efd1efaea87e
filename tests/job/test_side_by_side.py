"""Tiers side by side: as many as cores and memory allow, each whole, whatever becomes of the others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quantkit.core.errors import EngineError
from quantkit.engine.pool import WorkerPool
from quantkit.job.side_by_side import Bench, n_side, side_by_side
from quantkit.spec.gguf_header import read_header
from tests.gguf_factory import tiny_model as write_tiny_model


class Steps:
    """Counts what the jobs report."""

    def __init__(self) -> None:
        self.n, self.notes, self.started = 0, list[str](), 0

    def start(self, step: str, total: int) -> None:
        self.started += 1

    def advance(self, n: int = 1) -> None:
        self.n += n

    def finish(self) -> None:
        self.started += 1

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_jobs_run_at_the_same_time_and_answer_in_order(tmp_path: Path) -> None:
    meet = threading.Barrier(2, timeout=10)  # only two jobs at a time can pass it
    steps = Steps()

    def job(name: str) -> str:
        return name

    def waits(bench: Bench) -> str:
        meet.wait()
        bench.progress.start("part", 3)
        bench.progress.advance(3)
        bench.progress.finish()
        return job(f"{bench.n_threads} threads")

    outcomes = side_by_side([waits, waits, waits, waits], [WorkerPool(1, tmp_path) for _ in range(2)], 8, steps)
    assert [outcome.result() for outcome in outcomes] == ["4 threads"] * 4
    assert (steps.n, steps.started) == (12, 0)  # the parts' own steps have no bars


def test_one_that_fails_leaves_the_others_whole(tmp_path: Path) -> None:
    def fails(bench: Bench) -> str:
        raise EngineError("expected weights, got none")

    outcomes = side_by_side([fails, lambda bench: "whole"], [WorkerPool(1, tmp_path)], 1, Steps())
    assert [outcome.value for outcome in outcomes] == [None, "whole"]
    with pytest.raises(EngineError, match="got none"):
        outcomes[0].result()


def test_an_interruption_reaches_the_caller_and_starts_no_further_job(tmp_path: Path) -> None:
    ran = []

    def interrupted(bench: Bench) -> None:
        raise KeyboardInterrupt

    def counts(bench: Bench) -> None:
        ran.append(1)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupted, *[counts] * 100], [WorkerPool(1, tmp_path)], 1, Steps())
    assert ran == []


@pytest.mark.parametrize(("n_job", "n_cores", "memory", "expected"), [
    (7, 2, 1 << 40, 2), (1, 64, 1 << 40, 1), (7, 64, 1 << 40, 7), (7, 64, 0, 1), (0, 2, 1 << 40, 1)])
def test_no_more_than_jobs_cores_and_memory(tmp_path: Path, n_job: int, n_cores: int, memory: int, expected: int) -> None:
    header = read_header(write_tiny_model(tmp_path / "m.gguf")[0])
    assert n_side(header, n_job, n_cores, memory) == expected


def test_memory_is_counted_by_the_largest_tensor(tmp_path: Path) -> None:
    header = read_header(write_tiny_model(tmp_path / "m.gguf")[0])
    largest = max(tensor.n_elements for tensor in header.tensors)
    assert [n_side(header, 9, 9, 12 * largest * n) for n in (1, 2, 5)] == [1, 2, 5]
