"""Tasks handed out, judged and handed out again, with a cluster that is a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineCrash, EngineError, EngineKilled, EnvironmentFault, InputError
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job import dask_tasks
from quantkit.job.dask_files import ModelFile
from quantkit.job.dask_tasks import TaskStream
from quantkit.job.dask_worker import Done, Group, Task, Unfit, measure
from quantkit.job.progress import Silent
from quantkit.spec.records import ROW_DTYPE

SETTINGS = ContextSettings(n_ctx=16, n_batch=16, n_ubatch=16, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=1)
FILE = ModelFile(paths=(Path("a.gguf"),), sizes=(1,), sha256="0" * 64)
GROUP = Group(id="group", owner="me", base=FILE, tiers=(FILE,), settings=SETTINGS, tier_settings=(SETTINGS,), offload=Offload(),
              tokens=np.arange(160, dtype=np.int32), fetch_from="")
TASKS = [Task("audit q", (i,), False) for i in range(5)]


class KilledWorker(Exception):
    """As distributed.scheduler has it."""

    def __init__(self) -> None:
        super().__init__("killed")
        self.allowed_failures, self.last_worker = 3, SimpleNamespace(address="tcp://a")


class Cluster:
    """Answers each task as a script says: a Done, an error that Dask reports, or None while it is not done."""

    def __init__(self, answer: Callable[[Task, list[str]], Any], fit: str = "ab") -> None:
        self.fit = {f"tcp://{name}": None for name in fit}
        self.client = self
        self.n_slots = len(fit)
        self.handed: list[tuple[Task, list[str]]] = []
        self.shared: list[list[str]] = []
        self.stopped: list[str] = []
        self.excluded: list[str] = []
        self.cancelled: list[Any] = []
        self.at_refresh: Callable[[], None] = lambda: None
        self._answer = answer

    def refresh(self, progress: Silent) -> None:
        self.at_refresh()

    def exclude(self, address: str, reason: str, progress: Silent) -> None:
        self.fit.pop(address, None)
        self.excluded.append(f"{address}: {reason}")

    def stop_engines(self, group: str) -> None:
        self.stopped.append(group)

    def submit(self, function: Any, *arguments: Any, workers: list[str], **_: Any) -> SimpleNamespace:
        if function is not measure:
            self.shared.append(workers)
            return SimpleNamespace(status="finished")
        self.handed.append((arguments[1], workers))
        answer = self._answer(arguments[1], workers)
        status = "pending" if answer is None else "error" if isinstance(answer, Exception) else "finished"
        return Future(status=status, result=lambda timeout: answer, exception=lambda: answer)

    def cancel(self, futures: list[Any], force: bool) -> None:
        self.cancelled += futures

    @contextmanager
    def as_current(self) -> Iterator[None]:
        yield


class Future(SimpleNamespace):
    """A future that can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@pytest.fixture(autouse=True)
def no_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(wait=lambda *_, **__: None, CancelledError=CancelledError))
    monkeypatch.setitem(sys.modules, "distributed.scheduler", SimpleNamespace(KilledWorker=KilledWorker))
    monkeypatch.setattr(dask_tasks, "_POLL_S", 0.0)


def rows(*chunks: int) -> tuple[Any, ...]:
    table = np.zeros(7 * len(chunks), ROW_DTYPE)
    table["chunk"] = np.repeat(chunks, 7)
    return (table,)


def good(task: Task, workers: list[str]) -> Done:
    return Done(workers[0], rows(*task.chunks))


def unless_a(outcome: Any) -> Callable[[Task, list[str]], Done]:
    """A task goes to worker a if it may, where it comes to this; any other worker does it."""
    return lambda task, workers: Done("tcp://a", outcome) if "tcp://a" in workers else good(task, workers)


def run(cluster: Cluster, tasks: list[Task] = TASKS) -> list[Task]:
    return [task for task, _ in TaskStream(cluster, GROUP, tasks, {}, Silent())]  # type: ignore[arg-type]


def test_every_task_is_done_once_with_little_in_advance() -> None:
    cluster = Cluster(good, fit="a")
    seen = []
    for task, tables in TaskStream(cluster, GROUP, TASKS, {}, Silent()):  # type: ignore[arg-type]
        seen.append((task.chunks, len(tables[0]), len(cluster.handed)))
    assert seen == [((0,), 7, 2), ((1,), 7, 2), ((2,), 7, 4), ((3,), 7, 4), ((4,), 7, 5)]
    assert cluster.shared == [["tcp://a"]]
    assert cluster.stopped == []


def test_a_crash_is_tried_once_on_another_worker() -> None:
    cluster = Cluster(unless_a(EngineCrash("SIGKILL")))
    assert run(cluster, TASKS[:1]) == TASKS[:1]
    assert [workers for _, workers in cluster.handed] == [["tcp://a", "tcp://b"], ["tcp://b"]]
    both = Cluster(lambda task, workers: Done(workers[0], EngineKilled("audit q: SIGKILL")))
    with pytest.raises(EngineKilled, match=r"audit q: SIGKILL \(worker tcp://b\)"):
        run(both, TASKS[:1])
    assert len(both.handed) == 2
    alone = Cluster(lambda task, workers: Done(workers[0], EngineCrash("SIGKILL")), fit="a")
    with pytest.raises(EngineCrash):
        run(alone, TASKS[:1])
    assert len(alone.handed) == 1


@pytest.mark.parametrize(("answer", "kind", "message"), [
    (Done("tcp://a", InputError("not a tier")), InputError, "not a tier"),
    (KilledWorker(), EngineCrash, "every Dask worker that took chunks 0 to 0 died, 4 of them, the last tcp://a: see"),
    (ModuleNotFoundError("no quantkit"), EngineError, "could not run chunks 0 to 0: ModuleNotFoundError: no quantkit"),
    (Done("tcp://a", rows(3)), EngineError, "expected the rows of chunks (0,) from worker tcp://a, got others"),
    (Done("tcp://a", (np.zeros(0, ROW_DTYPE),)), EngineError, "expected the rows of chunks (0,) from worker tcp://a, got others"),
])
def test_a_failed_task_ends_the_step_and_what_is_under_way(answer: Any, kind: type[Exception], message: str) -> None:
    cluster = Cluster(lambda task, workers: answer if task.chunks == (0,) else None)
    with pytest.raises(kind) as caught:
        run(cluster)
    assert message in str(caught.value)
    assert len(cluster.cancelled) == 3
    assert cluster.stopped == ["group"]


def test_a_worker_without_the_files_gets_no_more_tasks() -> None:
    cluster = Cluster(unless_a(Unfit(reason="no file")))
    assert sorted(run(cluster)) == TASKS
    assert set(cluster.excluded) == {"tcp://a: no file"}
    assert cluster.handed[-1][1] == ["tcp://b"]


def test_tasks_of_workers_that_are_all_gone_go_to_those_that_came_after_them() -> None:
    cluster = Cluster(lambda task, workers: good(task, workers) if workers == ["tcp://c"] else None, fit="a")

    def restart() -> None:
        if len(cluster.handed) == 2:
            cluster.fit = {} if "tcp://a" in cluster.fit else {"tcp://c": None}

    cluster.at_refresh = restart
    assert sorted(run(cluster)) == TASKS
    assert len(cluster.cancelled) == 2
    assert cluster.shared == [["tcp://a"], ["tcp://c"]]


def test_a_caller_that_stops_listening_leaves_nothing_under_way() -> None:
    cluster = Cluster(lambda task, workers: good(task, workers))
    stream = iter(TaskStream(cluster, GROUP, TASKS, {}, Silent()))  # type: ignore[arg-type]
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(cluster.cancelled) == 3
    assert cluster.stopped == ["group"]


def test_a_scheduler_that_forgot_a_task_is_no_fault_of_a_tier() -> None:
    cluster = Cluster(lambda task, workers: None)
    held = cluster.submit

    def forget(function: Any, *arguments: Any, **options: Any) -> SimpleNamespace:
        future = held(function, *arguments, **options)
        future.status = "cancelled"
        return future

    cluster.submit = forget  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match="the Dask scheduler dropped a task"):
        run(cluster)
