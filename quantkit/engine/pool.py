"""The parent's side of the workers: start, ask, hear, and turn a death or a hang into one clear error."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from quantkit.core.errors import EngineCrash, EngineKilled, EnvironmentFault
from quantkit.core.files import temporary_folder
from quantkit.engine import liveness
from quantkit.engine.library import environment_for_workers
from quantkit.engine.liveness import Watch
from quantkit.engine.worker import Reply, worker_main

Command = Callable[..., Any]
_T = TypeVar("_T")
_N_LAST_LINES = 8
_STARTING = threading.Lock()  # a start changes this process's environment for a moment
_END_S = 5.0  # what a process gets to end by itself, or to be gone once it is killed


class Worker:
    """One worker process. Starts on its first command; a dead one starts anew on the next."""

    def __init__(self, index: int, log_folder: Path) -> None:
        self._index = index
        self._log_folder = log_folder
        self._process: Any = None
        self._step = ""
        self._log_from = 0
        self._watch: Watch | None = None
        self._talk: threading.Thread | None = None
        self.pipe: Any = None

    def send(self, step: str, command: Command, arguments: dict[str, Any]) -> None:
        """Start a command; its replies are read with `receive`.

        Raises:
            EngineCrash: the process is dead, or does not take the command.
        """
        if self._process is None:
            self._start()
        self._step = step
        log_path = self._log_path()
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        self._watch, pipe = Watch(self._process.pid, log_path), self.pipe
        self._watched(lambda: pipe.send((command, arguments, log_path)))

    def receive(self) -> tuple[Reply, Any]:
        """The next reply.

        Raises:
            EngineCrash: the process died or hangs; names the step, the signal or the time, and the last lines of its log.
        """
        process, pipe, log_path = self._process, self.pipe, self._log_path()
        try:
            kind, value = self._watched(pipe.recv)
        except EngineCrash:
            raise
        except Exception as error:
            raise self._crash(f"the worker process sent what cannot be read ({type(error).__name__}: {error})") from error
        self._watch = Watch(process.pid, log_path)
        return kind, value

    def check(self) -> None:
        """Ask whether the process may still be at work; costs nothing if it is asked more than once a second.

        Raises:
            EngineCrash: it hangs; it is ended.
        """
        watch = self._watch
        if watch is not None and (hang := watch.hang()):
            raise self._crash(f"the worker process {hang}, so it was ended", EngineKilled)

    def start(self) -> None:
        """Start the process before its first command, and let it load the library meanwhile."""
        if self._process is None:
            self._start(loads_library=True)

    def kill(self) -> None:
        """End the process at once; from any thread, also while another one talks to it."""
        process, pipe, talk = self._process, self.pipe, self._talk
        self._process = self.pipe = self._watch = self._talk = None
        if process is None:
            return
        process.kill()
        process.join(_END_S)  # one that waits for a dead disk cannot be killed, and is left to the system
        if talk is not None:
            talk.join(_END_S)  # a dead worker's pipe has an end
        pipe.close()

    def close(self) -> None:
        """Let the process end by itself, or end it if it does not."""
        if self._process is None:
            return
        self.pipe.close()
        self._process.join(_END_S)
        self.kill()

    def _watched(self, talk: Callable[[], _T]) -> _T:
        """Send or receive in a thread, so that a worker that stops in the middle of a message does not stop this process."""
        outcome: list[_T] = []
        faults: list[Exception] = []

        def run() -> None:
            try:
                outcome.append(talk())
            except Exception as error:
                faults.append(error)

        self._talk = thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(liveness.POLL_S)
            if thread.is_alive():
                self.check()
        if not faults:
            return outcome[0]
        if isinstance(faults[0], EOFError | OSError):
            raise self._crash() from faults[0]
        raise faults[0]

    def _start(self, *, loads_library: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(theirs, os.getpid(), loads_library), daemon=True,
                                        name=f"quantkit-worker-{self._index}")
        with _STARTING:
            before, main = dict(os.environ), sys.modules["__main__"]
            os.environ.update(environment_for_workers(before))
            sys.modules["__main__"] = ModuleType("__main__")  # a worker has no use for the caller's script, and must not run it
            try:
                self._process.start()
            except OSError as error:
                self._process = None
                raise EnvironmentFault(f"cannot start a worker process: {error.strerror or error}; end other programs, or use "
                                       "fewer workers") from error
            finally:
                sys.modules["__main__"] = main
                for name in set(os.environ) - set(before):
                    del os.environ[name]
                theirs.close()

    def _log_path(self) -> Path:
        return self._log_folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', self._step)[:100]}.w{self._index}.log"

    def _crash(self, how: str = "", kind: type[EngineCrash] = EngineCrash) -> EngineCrash:
        """The error of a process that died by itself, or that has to be ended now, as `how` says."""
        process = self._process
        if not how and process is None:
            how = "the worker process was ended by another step's failure"
        elif not how:
            process.join(_END_S)
            code = process.exitcode
            if code is None:
                how = "the worker process closed its pipe and did not end"
            elif code == -signal.SIGKILL:
                kind = EngineKilled
                how = ("the worker process was killed (signal 9): probably out of memory; use fewer --workers or less --memory, or "
                       "end other programs")
            else:
                how = f"the worker process ended by {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
        self.kill()
        return kind(f"{self._step}: {how}. Last lines of its log: {self._last_lines()}")

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

    Raises:
        EnvironmentFault: no folder for temporary files can be written to.
    """

    def __init__(self, n_workers: int = 1, log_folder: Path | None = None) -> None:
        self._scratch = None
        if log_folder is None:
            self._scratch = temporary_folder()
            log_folder = Path(self._scratch.name)
        self.workers = [Worker(i, log_folder) for i in range(n_workers)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.close() if kind is None else worker.kill()
        if self._scratch is not None:
            self._scratch.cleanup()

    def start(self, n_workers: int | None = None) -> None:
        """Start the first n_workers now: they are ready when this process has read what it needs for the first command."""
        for worker in self.workers[:n_workers]:
            worker.start()

    def call(self, step: str, command: Command, *, on_item: Callable[[Any], None] | None = None, **arguments: Any) -> Any:
        """Run one command in the first worker and return its result; what it yields goes to `on_item`."""
        worker = self.workers[0]
        with self._whole():
            worker.send(step, command, arguments)
            while True:
                kind, value = _hear(worker)
                if kind is Reply.RESULT:
                    return value
                if on_item is not None:
                    on_item(value)

    def broadcast(self, step: str, command: Command, **arguments: Any) -> list[Any]:
        """Run one command in every worker at the same time; results in the workers' order."""
        return self.each(step, command, [arguments] * len(self.workers))

    def each(self, step: str, command: Command, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Run one command in the first workers at the same time, each with its own arguments; results in order."""
        busy: dict[Any, int] = {}
        results: list[Any] = [None] * len(arguments)
        with self._whole():
            for i, own in enumerate(arguments):
                self.workers[i].send(step, command, own)
                busy[self.workers[i].pipe] = i
            while busy:
                for pipe in _ready([self.workers[i] for i in busy.values()]):
                    kind, value = _hear(self.workers[busy[pipe]])
                    if kind is Reply.RESULT:
                        results[busy.pop(pipe)] = value
        return results

    def stream(self, step: str, command: Command, tasks: Sequence[dict[str, Any]], *,
               n_workers: int | None = None) -> Iterator[Any]:
        """Run one command once per task, each by whichever of the first n_workers is free; yields every item as it comes."""
        waiting = deque(tasks)
        busy: dict[Any, Worker] = {}
        with self._whole():  # a caller that stops listening too: what is still to come must not answer the next command
            for worker in self.workers[:n_workers]:
                if waiting:
                    worker.send(step, command, waiting.popleft())
                    busy[worker.pipe] = worker
            while busy:
                for pipe in _ready(list(busy.values())):
                    worker = busy[pipe]
                    kind, value = _hear(worker)
                    if kind is Reply.ITEM:
                        yield value
                    elif waiting:
                        worker.send(step, command, waiting.popleft())
                    else:
                        del busy[pipe]

    def kill(self) -> None:
        """End every process; the next command starts new ones."""
        for worker in self.workers:
            worker.kill()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Whatever stops a step in the middle ends all workers, so that none goes on with half a session or an old answer."""
        try:
            yield
        except BaseException:
            self.kill()
            raise


def _ready(busy: Sequence[Worker]) -> list[Any]:
    """The pipes of some workers at work that have something to say; waits for the first.

    Raises:
        EngineCrash: one of them hangs.
    """
    while True:
        ready = multiprocessing.connection.wait([worker.pipe for worker in busy], liveness.POLL_S)
        for worker in busy:
            if worker.pipe not in ready:
                worker.check()
        if ready:
            return ready


def _hear(worker: Worker) -> tuple[Reply, Any]:
    """One reply; raises the one that is an error."""
    kind, value = worker.receive()
    if kind is Reply.ERROR:
        raise value
    return kind, value
