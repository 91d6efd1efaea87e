"""What runs inside a Dask worker: it finds the files, and drives engine processes of its own. No native code runs here.

A task has a thread of the Dask worker and an engine process, which stays between tasks with its models loaded; a Dask worker of
n threads has at most n engines. An engine that nobody asks for a while is ended, so that a caller who vanished holds no memory.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineCrash, QuantkitError
from quantkit.engine.lockstep import close_group, open_audit, open_panel, score, score_panel
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.job.dask_files import ModelFile, find_model
from quantkit.job.dask_kind import Kind, read_kind
from quantkit.job.evaluation import n_cores
from quantkit.job.memory import free_disk_bytes, free_memory_bytes
from quantkit.job.parts import Rows

_IDLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Base and the tiers that are measured together: what all tasks of one step share.

    Attributes:
        id: unique; an engine that has this group open need not load it again.
        owner: the caller, for `stop_engines`.
        tier_settings: each tier's arithmetic.
    """

    id: str
    owner: str
    base: ModelFile
    tiers: tuple[ModelFile, ...]
    settings: ContextSettings
    tier_settings: tuple[ContextSettings, ...]
    offload: Offload
    tokens: npt.NDArray[np.int32]
    fetch_from: str


class Task(NamedTuple):
    """Some chunks of a group; as a panel, base first and tiers one by one."""

    step: str
    chunks: tuple[int, ...]
    is_panel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """This worker cannot do the task, another may."""

    reason: str


class Done(NamedTuple):
    """What a task came to: the rows of each tier, all chunks in the task's order; or what went wrong."""

    worker: str
    outcome: tuple[Rows, ...] | QuantkitError | Unfit


class WorkerFacts(NamedTuple):
    """A worker's machine: its kind, and what it has to spare."""

    host: str
    kind: Kind
    free_memory: int
    free_disk: int


class Engine:
    """One engine process, the group that it has open, and its process id, so that it can be ended from outside its task."""

    def __init__(self) -> None:
        self.pool = WorkerPool(1)
        self.group, self.pid = "", 0
        self.serves: frozenset[str] = frozenset()

    def start(self) -> None:
        """See that the process runs."""
        with _starting, _children_allowed():
            self.pid = self.pool.call("start", own_pid)

    def close(self) -> None:
        """End the process at once."""
        self.pool.kill()
        self.pool.__exit__(None, None, None)


class Engines:
    """The engine processes of this Dask worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Engine] = []
        self._busy: list[Engine] = []
        self._stopped: set[str] = set()
        self._reaper: threading.Timer | None = None

    @contextmanager
    def borrow(self, owner: str, group: str = "") -> Iterator[Engine]:
        """An idle engine, one that has the group open if there is one; or a new one.

        Raises:
            EngineCrash: the owner has stopped.
        """
        with self._lock:
            if self._stopped & {owner, group}:
                raise EngineCrash("the caller of this task has stopped: run its command again")
            if self._reaper is not None:
                self._reaper.cancel()
            engine = next((e for e in self._idle if group and e.group == group), self._idle[0] if self._idle else Engine())
            self._idle = [e for e in self._idle if e is not engine]
            self._busy.append(engine)
            engine.serves = frozenset({owner, group})
        try:
            engine.start()
            yield engine
        except BaseException:
            engine.group = ""
            raise
        finally:
            with self._lock:
                self._busy.remove(engine)
                self._idle.append(engine)
                self._reaper = threading.Timer(_IDLE_S, self.close_idle)
                self._reaper.daemon = True
                self._reaper.start()

    def close_idle(self, whose: str = "") -> None:
        """End the engines that have nothing to do: all, or those that served an owner or a group."""
        with self._lock:
            ended = [engine for engine in self._idle if not whose or whose in engine.serves]
            self._idle = [engine for engine in self._idle if engine not in ended]
            for engine in ended:
                engine.close()

    def stop(self, whose: str) -> None:
        """End the engines of an owner or a group, busy ones too: their tasks end with an EngineCrash, later ones do not begin."""
        with self._lock:
            self._stopped.add(whose)
            for engine in self._busy:
                if whose in engine.serves and engine.pid:
                    with suppress(ProcessLookupError):
                        os.kill(engine.pid, signal.SIGKILL)
        self.close_idle(whose)


_starting = threading.Lock()  # starting a process changes this one's environment for a moment
engines = Engines()


def survey(owner: str, n_gpu_layers: int) -> WorkerFacts:
    """Task: what this worker's machine is."""
    with engines.borrow(owner) as engine:
        kind = engine.pool.call("kind", read_kind, n_gpu_layers=n_gpu_layers)
    return WorkerFacts(socket.gethostname(), kind, free_memory_bytes(), free_disk_bytes(_scratch()))


def measure(group: Group, task: Task) -> Done:
    """Task: the rows of some chunks. What goes wrong is returned, so that Dask does not try again by itself."""
    from distributed import get_worker

    address = get_worker().address
    try:
        base = find_model(group.base, group.fetch_from)
        tiers = [find_model(tier, group.fetch_from) for tier in group.tiers]
    except (QuantkitError, OSError) as error:
        return Done(address, Unfit(reason=str(error)))
    try:
        with engines.borrow(group.owner, group.id) as engine:
            run = _run_panel if task.is_panel else _run_lockstep
            return Done(address, run(engine, group, task, base, tiers))
    except QuantkitError as error:
        return Done(address, error)


def stop_engines(whose: str) -> None:
    """End what an owner or a group left; runs outside tasks."""
    engines.stop(whose)


def _run_lockstep(engine: Engine, group: Group, task: Task, base: Path, tiers: list[Path]) -> tuple[Rows, ...]:
    if engine.group != group.id:
        engine.group = ""
        engine.pool.call(f"load {task.step}", open_audit, base=base, tiers=tuple(tiers), **_common(group),
                         tier_settings=tuple(map(_on_these_cores, group.tier_settings)))
        engine.group = group.id
    found = {item.chunk: item.tiers for item in engine.pool.stream(task.step, score, [{"chunks": task.chunks}])}
    return tuple(np.concatenate([found[chunk][i] for chunk in task.chunks]) for i in range(len(tiers)))


def _run_panel(engine: Engine, group: Group, task: Task, base: Path, tiers: list[Path]) -> tuple[Rows, ...]:
    engine.group = ""
    engine.pool.call("base rows", open_panel, base=base, chunks=task.chunks, folder=_scratch(), **_common(group))
    rows = []
    for path, settings in zip(tiers, group.tier_settings, strict=True):
        arguments = {"path": path, "settings": _on_these_cores(settings)}
        found = {item.chunk: item.tiers[0] for item in engine.pool.stream(task.step, score_panel, [arguments])}
        rows.append(np.concatenate([found[chunk] for chunk in task.chunks]))
    engine.pool.call("close", close_group)
    return tuple(rows)


def _scratch() -> Path:
    """The worker's own folder, as `dask worker --local-directory` says."""
    from distributed import get_worker

    return Path(get_worker().local_directory)


def _common(group: Group) -> dict[str, Any]:
    return {"settings": _on_these_cores(group.settings), "offload": group.offload, "tokens": group.tokens}


def _on_these_cores(settings: ContextSettings) -> ContextSettings:
    """Never more threads than cores; rows do not depend on their number."""
    return dataclasses.replace(settings, n_threads=min(settings.n_threads, n_cores()))


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Let this process have children though Dask started it as a daemon; an engine ends by itself when its parent does."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    held = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = held


def own_pid(state: WorkerState) -> int:
    """Command: the process id."""
    return os.getpid()
