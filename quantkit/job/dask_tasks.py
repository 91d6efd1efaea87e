"""The tasks of one step under way: handed out, waited for, judged, and handed out again where their workers are gone.

Dask itself sends a task of a worker that died to another one, a few times (`distributed.scheduler.allowed-failures`). What it
cannot know is decided here: a task whose engine process died is tried once more, by another worker, and is then at fault itself; a
worker that lacks a file gets no more tasks; a task that waits for workers that are all gone is handed to those that came later.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from quantkit.core.errors import EngineCrash, EngineError, EnvironmentFault, QuantkitError
from quantkit.job.dask_worker import Done, Group, Task, Unfit, measure
from quantkit.job.parts import Rows
from quantkit.job.progress import Progress

if TYPE_CHECKING:
    from quantkit.job.dask_cluster import DaskCluster

_POLL_S = 0.5
_FETCH_S = 60.0
_AHEAD = 2  # tasks for each engine: one in hand, one that waits


class _Flight(NamedTuple):
    """A task that was handed out, and the workers that may have it."""

    task: Task
    workers: frozenset[str]


class TaskStream:
    """Runs the tasks of one group; iterating gives each task with the rows of every tier, in the order in which they come.

    Raises (while iterating):
        EngineCrash, EngineError, InputError: a task failed by itself.
        EnvironmentFault: no worker is left, or the scheduler is gone.
    """

    def __init__(self, cluster: DaskCluster, group: Group, tasks: Sequence[Task], resources: dict[str, float],
                 progress: Progress) -> None:
        self._cluster, self._group, self._resources, self._progress = cluster, group, resources, progress
        self._waiting = deque(tasks)
        self._flying: dict[Any, _Flight] = {}
        self._crashed: dict[Task, set[str]] = defaultdict(set)
        self._shared: Any = None
        self._shared_by: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[tuple[Task, tuple[Rows, ...]]]:
        try:
            while self._waiting or self._flying:
                self._cluster.refresh(self._progress)
                self._rescue()
                self._hand_out()
                for future in self._landed():
                    flight = self._flying.pop(future)
                    if (rows := self._judge(flight, future)) is not None:
                        yield flight.task, rows
        finally:
            if self._flying:
                with suppress(Exception):  # the scheduler may be gone, and the reason is on its way up
                    self._cluster.client.cancel(list(self._flying), force=True)
                self._cluster.stop_engines(self._group.id)
            self._flying.clear()
            self._shared = None

    def _rescue(self) -> None:
        """Take back what waits for workers that are all gone, and share the group anew where its holders are gone."""
        alive = self._cluster.fit.keys()
        lost = not (self._shared_by & alive)
        gone = [future for future, flight in self._flying.items() if lost or not (flight.workers & alive)]
        for future in gone:
            self._waiting.appendleft(self._flying.pop(future).task)
        if gone:
            self._cluster.client.cancel(gone, force=True)
        if lost and alive:
            self._shared_by = frozenset(alive)
            self._shared = self._submit(_itself, self._group, workers=self._shared_by, resources={})

    def _hand_out(self) -> None:
        """Keep every engine busy, and little more waiting with it: a worker that dies takes its waiting tasks along."""
        fit = frozenset(self._cluster.fit)
        while fit and self._waiting and len(self._flying) < _AHEAD * self._cluster.n_slots:
            task = self._waiting.popleft()
            workers = (fit - self._crashed[task]) or fit
            future = self._submit(measure, self._shared, task, workers=workers, resources=self._resources)
            self._flying[future] = _Flight(task, workers)

    def _submit(self, function: Any, *arguments: Any, workers: frozenset[str], resources: dict[str, float]) -> Any:
        return self._cluster.client.submit(function, *arguments, key=f"quantkit-{function.__name__.strip('_')}-{uuid.uuid4().hex}",
                                           workers=sorted(workers), resources=resources or None, pure=False)

    def _landed(self) -> list[Any]:
        from distributed import CancelledError, wait

        if not self._flying:
            time.sleep(_POLL_S)  # for a worker to come
            return []
        with suppress(TimeoutError, CancelledError), self._cluster.client.as_current():
            wait(list(self._flying), timeout=_POLL_S, return_when="FIRST_COMPLETED")
        return [future for future in self._flying if future.status != "pending"]

    def _judge(self, flight: _Flight, future: Any) -> tuple[Rows, ...] | None:
        """The rows of a task that is done; None where it has to be done again."""
        step = flight.task.step
        if future.status == "error":
            raise _death(step, flight.task, future.exception())
        if future.status != "finished":
            raise EnvironmentFault(f"{step}: the Dask scheduler dropped a task ({future.status}): it was restarted or told to; "
                                   "run the same command again to go on from here")
        done = self._fetch(future)
        if done is None:
            self._waiting.appendleft(flight.task)
            return None
        if isinstance(done.outcome, Unfit):
            self._cluster.exclude(done.worker, done.outcome.reason, self._progress)
        elif isinstance(done.outcome, EngineCrash):
            first = not self._crashed[flight.task]
            self._crashed[flight.task].add(done.worker)
            if not first or not (self._cluster.fit.keys() - self._crashed[flight.task]):
                raise type(done.outcome)(f"{done.outcome} (worker {done.worker})")
            self._progress.note(f"worker {done.worker}: {done.outcome}; trying it once on another worker")
        elif isinstance(done.outcome, QuantkitError):
            raise done.outcome
        else:
            return _checked(flight.task, done)
        self._waiting.appendleft(flight.task)
        return None


    def _fetch(self, future: Any) -> Done | None:
        """What a task returned; None where it went with its worker and has not come again."""
        from distributed import CancelledError

        try:
            done: Done = future.result(timeout=_FETCH_S)
        except (TimeoutError, CancelledError, OSError):
            return None
        return done


def _itself(group: Group) -> Group:
    """Task: gives every other task its group; Dask makes it again where its holder died."""
    return group


def _checked(task: Task, done: Done) -> tuple[Rows, ...]:
    """Raises EngineError where a worker sent other chunks than it was asked for."""
    assert isinstance(done.outcome, tuple)
    for rows in done.outcome:
        n_rows, rest = divmod(len(rows), len(task.chunks))
        if rest or not n_rows or [int(chunk) for chunk in rows["chunk"][::n_rows]] != list(task.chunks):
            raise EngineError(f"{task.step}: expected the rows of chunks {task.chunks} from worker {done.worker}, got others: "
                          "run again, and if it comes back, report it")
    return done.outcome


def _death(step: str, task: Task, error: BaseException | None) -> QuantkitError:
    """A task that took several workers with it, or that Dask could not run, in one sentence."""
    from distributed.scheduler import KilledWorker

    which = f"chunks {task.chunks[0]} to {task.chunks[-1]}"
    if isinstance(error, KilledWorker):
        return EngineCrash(f"{step}: every Dask worker that took {which} died, {error.allowed_failures + 1} of them, the last "
                           f"{error.last_worker.address}: see that worker's log; memory is the usual reason")
    return EngineError(f"{step}: a Dask worker could not run {which}: {type(error).__name__}: {error}; see that worker's log")
