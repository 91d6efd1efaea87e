"""Commands that misbehave, for workers to run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quantkit.core.errors import InputError
from quantkit.engine.model import Context, Model
from quantkit.engine.settings import ContextSettings
from quantkit.engine.worker import WorkerState

SETTINGS = ContextSettings(n_ctx=64, n_batch=64, n_ubatch=64, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=1)


def add(state: WorkerState, *, a: int, b: int) -> int:
    return a + b


def count(state: WorkerState, *, n: int) -> Iterator[int]:
    yield from range(n)


def pid(state: WorkerState) -> int:
    return os.getpid()


def refuse(state: WorkerState) -> None:
    raise InputError("expected nothing, got a call")


def stumble(state: WorkerState) -> None:
    raise ZeroDivisionError("by accident")


def abort(state: WorkerState) -> None:
    os.write(2, b"these are my last words\n")
    os.abort()


def leave(state: WorkerState) -> None:
    os._exit(0)


def kill_self(state: WorkerState) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(state: WorkerState, *, seconds: float) -> None:
    time.sleep(seconds)


def abort_natively(state: WorkerState, *, path: Path) -> None:
    """An MTP context on a model that was loaded without its MTP block: llama.cpp asserts."""
    model = Model(path)
    trunk = Context(model, SETTINGS, n_outputs_max=1)
    Context(model, SETTINGS, n_outputs_max=1, mtp_of=trunk)


def modules(state: WorkerState) -> list[str]:
    """Command: what is imported before it came."""
    return sorted(sys.modules)
