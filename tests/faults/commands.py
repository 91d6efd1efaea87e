"""Commands that go wrong in ways of their own, for workers to run."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quantkit.engine.worker import WorkerState


def hang(state: WorkerState) -> None:
    """Wait for what never comes, in the manner of native code: with no thread at work."""
    here, there = socket.socketpair()
    here.recv(1)
    there.close()


def work(state: WorkerState, *, seconds: float) -> str:
    """Compute and say nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


def mutter(state: WorkerState, *, seconds: float) -> str:
    """Do nothing but write a line now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.write(2, b"still here\n")
        time.sleep(0.1)
    return "done"


def hang_or_count(state: WorkerState, *, n: int) -> Iterator[int]:
    """Some items soon and then nothing, or items for a long while."""
    for i in range(n):
        yield i
        time.sleep(0.05)
    if n < 5:
        hang(state)


def swallow(state: WorkerState, *, data: bytes) -> int:
    return len(data)


def stop_self(state: WorkerState) -> int:
    """Answer, and be stopped a moment later, before the next command is read."""
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(0)
    return os.getpid()


def die_while_sending(state: WorkerState) -> bytes:
    """Be killed while an answer of 64 MiB is on its way: a pipe takes far less at once."""
    if os.fork() == 0:
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    return bytes(64 << 20)


def die_or_wait(state: WorkerState, *, dies: bool) -> None:
    """Of two workers one dies at once and the other takes its time."""
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def fill_disk(state: WorkerState, *, path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def talk(state: WorkerState) -> str:
    """Write to every stream that a library might write to."""
    print("to stdout")
    print("to stderr", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # C's own printf does not raise
        os.write(2, b"native\n")
    return "done"


def read_log(state: WorkerState) -> list[str]:
    """What llama.cpp's log gives, whether or not the log's file takes it."""
    from quantkit.engine.library import LogTap

    own = LogTap()
    own.all_lines = []
    own.receive(2, b"[   1/  1] token_embd.weight\n")
    return own.all_lines
