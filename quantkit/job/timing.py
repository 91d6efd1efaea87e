"""Times and hardware of a run, kept apart from its results: run.json is not part of the bundle."""

from __future__ import annotations

import datetime
import platform
import time
from pathlib import Path
from typing import Any

from quantkit.job.evaluation import n_cores
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json


class TimedProgress:
    """Passes everything on to a listener and remembers how long each step took."""

    def __init__(self, listener: Progress) -> None:
        self._listener = listener
        self._step, self._total, self._started = "", 0, 0.0
        self._begin = datetime.datetime.now(datetime.UTC)
        self.steps: list[dict[str, Any]] = []

    def start(self, step: str, total: int) -> None:
        """Begin a step."""
        self._step, self._total, self._started = step, total, time.monotonic()
        self._listener.start(step, total)

    def advance(self, n: int = 1) -> None:
        """Pass it on."""
        self._listener.advance(n)

    def finish(self) -> None:
        """End a step and keep its time."""
        self.steps.append({"step": self._step, "n": self._total, "wall_s": round(time.monotonic() - self._started, 3)})
        self._listener.finish()

    def note(self, text: str) -> None:
        """Pass it on."""
        self._listener.note(text)

    def write(self, run: RunFolder, n_workers: int) -> None:
        """Add this start of the run to run.json."""
        held = read_json(run.facts)
        starts = held.get("starts", []) if isinstance(held, dict) else []
        starts.append({"began": self._begin.isoformat(timespec="seconds"), "n_workers": n_workers, "steps": self.steps})
        write_json(run.facts, {"host": host_facts(), "starts": starts})


def host_facts() -> dict[str, Any]:
    """The machine in a few words; no name of it or of its user."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model or platform.processor(), "machine": platform.machine(), "system": platform.system(),
            "n_cores": n_cores(), "python": platform.python_version()}
