"""The parent's side of the workers: start, ask, hear, and turn a death into one clear error."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.core.errors import EngineCrash
from quantkit.engine.library import environment_for_workers
from quantkit.engine.worker import Reply, worker_main

Command = Callable[..., Any]
_N_LAST_LINES = 8


class Worker:
    """One worker process. Starts on its first command; a dead one starts anew on the next."""

    def __init__(self, index: int, log_folder: Path) -> None:
        self._index = index
        self._log_folder = log_folder
        self._process: Any = None
        self._step = ""
        self._log_from = 0
        self.pipe: Any = None

    def send(self, step: str, command: Command, arguments: dict[str, Any]) -> None:
        """Start a command; its replies are read with `receive`."""
        if self._process is None:
            self._start()
        self._step = step
        log_path = self._log_path()
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        try:
            self.pipe.send((command, arguments, log_path))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._crash() from error

    def receive(self) -> tuple[Reply, Any]:
        """The next reply.

        Raises:
            EngineCrash: the process died; names the step, the signal and the last lines of its log.
        """
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._crash() from error
        return kind, value

    def kill(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._process = self.pipe = None

    def close(self) -> None:
        """Let the process end by itself, or end it if it does not."""
        if self._process is None:
            return
        self.pipe.close()
        self._process.join(timeout=5)
        self.kill_if_alive()
        self._process = self.pipe = None

    def kill_if_alive(self) -> None:
        """End a process that outlived its pipe."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(theirs, os.getpid()), daemon=True,
                                        name=f"quantkit-worker-{self._index}")
        before = dict(os.environ)
        os.environ.update(environment_for_workers(before))
        try:
            self._process.start()
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
        theirs.close()

    def _log_path(self) -> Path:
        return self._log_folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', self._step)[:100]}.w{self._index}.log"

    def _crash(self) -> EngineCrash:
        self._process.join(timeout=5)
        self.kill_if_alive()
        code = self._process.exitcode
        self._process = self.pipe = None
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            if code == -signal.SIGKILL:
                how += " (the system ends processes so when memory runs out)"
        return EngineCrash(f"{self._step}: the worker process ended by {how}. Last lines of its log: {self._last_lines()}")

    def _last_lines(self) -> str:
        with suppress(OSError), self._log_path().open("rb") as log:
            log.seek(self._log_from)
            lines = [line.strip() for line in log.read()[-20_000:].decode(errors="replace").splitlines()]
            kept = [line for line in lines if line.strip(" .")][-_N_LAST_LINES:]
            if kept:
                return " | ".join(kept)
        return "none"


class WorkerPool:
    """Some workers that share the work of one step after another.

    Args:
        n_workers: how many processes at most.
        log_folder: where the steps' native logs go; a temporary folder if none is given.
    """

    def __init__(self, n_workers: int = 1, log_folder: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="quantkit-") if log_folder is None else None
        folder = log_folder if log_folder is not None else Path(self._scratch.name)  # type: ignore[union-attr]
        self.workers = [Worker(i, folder) for i in range(n_workers)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.close() if kind is None else worker.kill()
        if self._scratch is not None:
            self._scratch.cleanup()

    def call(self, step: str, command: Command, *, on_item: Callable[[Any], None] | None = None, **arguments: Any) -> Any:
        """Run one command in the first worker and return its result; what it yields goes to `on_item`."""
        worker = self.workers[0]
        worker.send(step, command, arguments)
        while True:
            kind, value = self._hear(worker)
            if kind is Reply.RESULT:
                return value
            if on_item is not None:
                on_item(value)

    def broadcast(self, step: str, command: Command, **arguments: Any) -> list[Any]:
        """Run one command in every worker at the same time; results in the workers' order."""
        return self.each(step, command, [arguments] * len(self.workers))

    def each(self, step: str, command: Command, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Run one command in the first workers at the same time, each with its own arguments; results in order."""
        busy = self.workers[: len(arguments)]
        for worker, own in zip(busy, arguments, strict=True):
            worker.send(step, command, own)
        results = []
        for worker in busy:
            kind, value = self._hear(worker)
            while kind is not Reply.RESULT:
                kind, value = self._hear(worker)
            results.append(value)
        return results

    def stream(self, step: str, command: Command, tasks: Sequence[dict[str, Any]], *,
               n_workers: int | None = None) -> Iterator[Any]:
        """Run one command once per task, each by whichever of the first n_workers is free; yields every item as it comes."""
        waiting = deque(tasks)
        busy: dict[Any, Worker] = {}
        for worker in self.workers[:n_workers]:
            if waiting:
                worker.send(step, command, waiting.popleft())
                busy[worker.pipe] = worker
        try:
            while busy:
                for pipe in multiprocessing.connection.wait(list(busy)):
                    worker = busy[pipe]
                    kind, value = self._hear(worker)
                    if kind is Reply.ITEM:
                        yield value
                    elif waiting:
                        worker.send(step, command, waiting.popleft())
                    else:
                        del busy[pipe]
        finally:
            if busy:  # the caller stopped listening: what is still to come must not answer the next command
                self.kill()

    def kill(self) -> None:
        """End every process; the next command starts new ones."""
        for worker in self.workers:
            worker.kill()

    def _hear(self, worker: Worker) -> tuple[Reply, Any]:
        """One reply; any failure ends all workers, so that none goes on with half a session."""
        try:
            kind, value = worker.receive()
        except EngineCrash:
            self.kill()
            raise
        if kind is Reply.ERROR:
            self.kill()
            raise value
        return kind, value
