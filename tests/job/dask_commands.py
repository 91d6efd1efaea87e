"""What tests do inside Dask workers: put something that misbehaves in a function's place, and look at the engines."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.core.errors import EnvironmentFault
from quantkit.engine.lockstep import score
from quantkit.engine.worker import WorkerState
from quantkit.job import dask_kind, dask_worker
from quantkit.job.dask_kind import Kind

HELD = {name: getattr(dask_worker, name) for name in ("score", "find_model", "read_kind")}


def patch(**names: Any) -> None:
    """Put functions of this module, by name, in the worker's; without any, put everything back."""
    for name, held in HELD.items():
        setattr(dask_worker, name, globals()[names[name]] if name in names else held)


def take_time(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[Any]:
    """Command: the same rows, later."""
    time.sleep(0.2)
    yield from score(state, chunks=chunks)


def die(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[Any]:
    """Command: the engine process is killed in the middle."""
    yield next(iter(score(state, chunks=chunks)))
    os.kill(os.getpid(), signal.SIGKILL)


def find_nothing(*_: Any) -> Path:
    raise EnvironmentFault("expected a.gguf, found nothing")


def other_kind(state: WorkerState, *, n_gpu_layers: int) -> Kind:
    """Command: a machine with another numpy."""
    return dataclasses.replace(dask_kind.read_kind(state, n_gpu_layers=n_gpu_layers), numpy="0.9 MMX")


def n_busy() -> int:
    """Engines that are in the hands of a task."""
    return len(dask_worker.engines._busy)


def engine_pids() -> list[int]:
    """Engine processes that this worker holds."""
    return [engine.pid for engine in (*dask_worker.engines._idle, *dask_worker.engines._busy)]
