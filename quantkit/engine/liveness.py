"""Whether a worker that says nothing may still be at work, or hangs.

A worker gives a sign of life with every answer and every line in its log; it is *quiet* while it neither computes nor reads from a
disk, and *silent* while it computes but says nothing. A step of a large model may be silent for hours, and is never quiet for
minutes: what waits for a lock that nobody frees, or for a disk that does not answer, is.

Time is what this process itself saw go by, on a clock that nobody sets: a machine that slept and a job that was stopped and went on
count for nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

POLL_S = 1.0
QUIET_S = 600.0
SILENT_S = 86_400.0
_BUSY_SHARE = 0.002  # of the quiet time spent on the CPU is work; a worker that only looks for its parent spends 0.0001
_FAULT_S = 0.001  # a page that came from a disk counts as so much work


class Watch:
    """The time since a worker's last sign of life.

    Args:
        pid: the worker's process.
        log_path: where its current step logs.
    """

    def __init__(self, pid: int, log_path: Path) -> None:
        self._pid, self._log_path = pid, log_path
        self._seen_at = time.monotonic()
        self._quiet_s = self._silent_s = 0.0
        self._work_s, self._log_bytes = work_s(pid), _size(log_path)

    def hang(self) -> str:
        """In words, what a worker has not done for how long, where that is too long; "" otherwise. Called every POLL_S or so."""
        now = time.monotonic()
        if now - self._seen_at < POLL_S / 2:
            return ""
        step = min(now - self._seen_at, 2 * POLL_S)
        self._seen_at = now
        self._quiet_s, self._silent_s = self._quiet_s + step, self._silent_s + step
        log_bytes = _size(self._log_path)
        if log_bytes != self._log_bytes:
            self._log_bytes, self._quiet_s, self._silent_s = log_bytes, 0.0, 0.0
        work = work_s(self._pid)
        if work is None or self._work_s is None or work - self._work_s >= _BUSY_SHARE * QUIET_S:
            self._work_s, self._quiet_s = work, 0.0
        if self._quiet_s >= QUIET_S:
            return f"did nothing and said nothing for {_words(self._quiet_s)}"
        return f"gave no answer for {_words(self._silent_s)}" if self._silent_s >= SILENT_S else ""


def work_s(pid: int) -> float | None:
    """CPU seconds of a process so far, and a millisecond for each page that it waited for; None where the system does not tell.

    Source: proc(5), /proc/pid/stat: majflt, utime, stime.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + int(fields[9]) * _FAULT_S


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
