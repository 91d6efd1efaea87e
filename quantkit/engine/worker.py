"""The worker process: native code lives and dies here.

The parent sends a command, a module-level function `f(state, **arguments)`, by reference. The worker answers with any number
of items (what a generator yields), then with the result or the error. Between commands the state stays: loaded models are
used again. File descriptors 1 and 2 go to the step's log, since the text of a native assert goes there and nowhere else.
A log that cannot be written, on a full disk, costs its text and nothing else.
The worker ends when its parent does, however that dies.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from quantkit.core.errors import EngineError, NoSpace, QuantkitError
from quantkit.core.files import is_full

_ORPHAN_POLL_S = 0.5


class Reply(enum.Enum):
    """What a message from the worker is."""

    ITEM = enum.auto()
    RESULT = enum.auto()
    ERROR = enum.auto()


class Closable(Protocol):
    """Something that holds native memory."""

    def close(self) -> None:
        """Free it."""


@dataclass(slots=True)
class WorkerState:
    """What a worker keeps between commands: at most one open session, closed before the next opens."""

    session: Closable | None = field(default=None)

    def open(self, make: Callable[[], Closable]) -> Any:
        """Close what is open, then make and keep a new session."""
        self.close()
        self.session = make()
        return self.session

    def close(self) -> None:
        """Free the session's native memory."""
        if self.session is not None:
            self.session.close()
            self.session = None


def worker_main(pipe: Connection, parent_pid: int, loads_library: bool = False) -> None:
    """Serve commands until the pipe closes.

    Args:
        loads_library: load llama.cpp before the first command is there; one that cannot be loaded is told by that command.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    state = WorkerState()
    if loads_library:
        with contextlib.suppress(Exception):
            from quantkit.engine.library import load_library

            load_library()
    sys.stdout = sys.stderr = io.TextIOWrapper(_Log(), encoding="utf-8", errors="replace", write_through=True)
    while True:
        try:
            command, arguments, log_path = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        _redirect_output(log_path)
        _serve(pipe, state, command, arguments)


def _serve(pipe: Connection, state: WorkerState, command: Callable[..., Any], arguments: dict[str, Any]) -> None:
    from quantkit.engine.library import tap

    tap.forget()
    try:
        result = command(state, **arguments)
        if inspect.isgenerator(result):
            for item in result:
                pipe.send((Reply.ITEM, item))
            result = None
        pipe.send((Reply.RESULT, result))
    except QuantkitError as error:
        pipe.send((Reply.ERROR, error))
    except MemoryError:
        pipe.send((Reply.ERROR, EngineError(f"{command.__name__} ran out of memory: use fewer workers or smaller groups")))
    except OSError as error:
        traceback.print_exc()
        pipe.send((Reply.ERROR, NoSpace(f"the disk is full, {_named(error)}: free some space and run again")
                   if is_full(error) else EngineError(f"{command.__name__} failed: {_named(error)}; see the step's log")))
    except Exception as error:
        traceback.print_exc()  # into the step's log
        pipe.send((Reply.ERROR, EngineError(f"{command.__name__} failed with {type(error).__name__}: {error}; see the step's log")))


class _Log(io.RawIOBase):
    """File descriptor 2 for Python's own texts; what it does not take is lost."""

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """That of the log."""
        return 2

    def write(self, data: Any) -> int:
        """All of it, or as much as there is room for."""
        with contextlib.suppress(OSError):
            os.write(2, data)
        return len(data)


def _named(error: OSError) -> str:
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"


def _redirect_output(log_path: Path) -> None:
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _end_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_ORPHAN_POLL_S)
    os._exit(1)
