"""Runs a command as a whole process and reads the system's own account of it, its children included."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Measured(NamedTuple):
    """Wall and CPU time in seconds; peak memory in bytes, of the largest single process; exit code."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    exit_code: int


def measure(command: Sequence[str | Path], log: Path) -> Measured:
    """Run a command to its end, its output appended to a log; waiting threads sleep instead of spinning, in every arm."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}
    with log.open("ab") as out:
        start = time.perf_counter()
        child = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                 env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, child.returncode)
