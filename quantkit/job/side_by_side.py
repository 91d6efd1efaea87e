"""Tiers made side by side: each in a worker process of its own, with its share of the cores.

llama.cpp reads, quantizes and writes a file tensor by tensor, with one thread but for the quantizing itself. Two files at a time
on half the cores each waste less of them, the more so the smaller the tensors. The files do not depend on it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from quantkit.core.errors import QuantkitError
from quantkit.engine.pool import WorkerPool
from quantkit.job.memory import free_memory_bytes
from quantkit.job.progress import Progress
from quantkit.spec.gguf_header import GgufHeader

_BYTES_A_WEIGHT = 12  # of the tensor at hand: as F32, its importances or source, and what it becomes
_MEMORY_SHARE = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where one job is done: a pool of one worker, its threads, and who hears of its progress."""

    pool: WorkerPool
    n_threads: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What a job gave: its value, or the error that it ended with."""

    value: T | None
    error: QuantkitError | None

    def result(self) -> T:
        """The value; raises the error."""
        if self.error is not None or self.value is None:
            raise self.error or AssertionError("a job gave nothing")
        return self.value


def n_side(header: GgufHeader, n_job: int, n_cores: int, memory_bytes: int | None = None) -> int:
    """How many files of a base are quantized at a time: no more than cores, and than memory holds of the largest tensor.

    Args:
        memory_bytes: what may be used; by default half of what is free.
    """
    free = int(free_memory_bytes() * _MEMORY_SHARE) if memory_bytes is None else memory_bytes
    largest = max((tensor.n_elements for tensor in header.tensors), default=0)
    return max(1, min(n_job, n_cores, free // max(1, largest * _BYTES_A_WEIGHT)))


@contextlib.contextmanager
def pools_beside(pool: WorkerPool, n: int, log_folder: Path | None = None) -> Iterator[list[WorkerPool]]:
    """A pool and n - 1 more of one worker each; all load the library while the caller prepares the jobs."""
    with ExitStack() as stack:
        pools = [pool, *(stack.enter_context(WorkerPool(1, log_folder)) for _ in range(n - 1))]
        for own in pools:
            own.start(1)
        yield pools


def side_by_side(jobs: Sequence[Callable[[Bench], T]], pools: Sequence[WorkerPool], n_cores: int,
                 progress: Progress) -> list[Outcome[T]]:
    """Run jobs, as many at a time as there are pools, each to its end; one that fails leaves the others whole.

    Args:
        pools: of each the first worker is used.
        progress: of all jobs together, a step that the caller starts and finishes.

    Returns:
        The outcomes, in the jobs' order.

    Raises:
        BaseException: what stopped the caller, such as Ctrl-C; all workers are ended first.
    """
    shared, stopped = _Shared(progress), threading.Event()
    benches: queue.SimpleQueue[Bench] = queue.SimpleQueue()
    for own in pools:
        benches.put(Bench(own, max(1, n_cores // len(pools)), shared))

    def run(job: Callable[[Bench], T]) -> Outcome[T] | None:
        bench = benches.get()
        try:
            return None if stopped.is_set() else Outcome(job(bench), None)
        except QuantkitError as error:
            return Outcome(None, error)
        except BaseException:
            stopped.set()
            raise
        finally:
            benches.put(bench)

    with ThreadPoolExecutor(len(pools)) as threads:
        waiting = [threads.submit(run, job) for job in jobs]
        try:
            return [outcome for one in waiting if (outcome := one.result()) is not None]
        except BaseException:
            stopped.set()
            for own in pools:
                own.kill()
            raise


class _Shared:
    """One step's progress, heard from several threads; the jobs' own steps have no bars."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()

    def start(self, step: str, total: int) -> None:
        """A part of the whole begins."""

    def advance(self, n: int = 1) -> None:
        """Some units are done."""
        with self._lock:
            self._progress.advance(n)

    def finish(self) -> None:
        """A part of the whole is done."""

    def note(self, text: str) -> None:
        """One line."""
        with self._lock:
            self._progress.note(text)
