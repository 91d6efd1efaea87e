"""Runs commands as whole processes, and reads the system's own account of them; alternates ways of doing one job.

A way is a list of commands, one after the other. `wall_s` and `cpu_s` are sums over them. `peak_bytes` is the most that all
processes of a command held together, sampled five times a second: the private memory of each, and of mapped files what the process
with most of them has, since they map the same ones (PSS would be exact, and costs a quarter of a core to read). `others` is how
many cores other programs kept busy meanwhile, from /proc/stat: a round is discarded when that is above `MAX_OTHERS` in any way, for
then the machine's load exceeded its cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_OTHERS = 0.1
_SAMPLE_S = 0.2


class Measured(NamedTuple):
    """Wall and CPU time in seconds; memory and what was written in bytes; cores that other programs kept busy."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    written_bytes: int
    others: float


Way = Callable[[Path], Measured]


def run(commands: Sequence[Sequence[str | Path]], log: Path, written: Callable[[], int] = lambda: 0) -> Measured:
    """Run commands to their ends, their output appended to a log; a benchmark of a failed command is none.

    Args:
        written: asked at the end for the bytes that the job left or passed through the disk.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}  # the same in every way
    wall = cpu = others = 0.0
    peak = 0
    for command in commands:
        busy, mine = busy_s(), time.process_time()
        with log.open("ab") as out:
            start = time.perf_counter()
            child = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                     env=environment)
            with Sampler(child.pid) as sampler:
                _, status, usage = os.wait4(child.pid, 0)
            took = time.perf_counter() - start
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"expected exit code 0, got {child.returncode} from {command[0]}; the end of its log:\n"
                     f"{log.read_text(errors='replace')[-2000:]}")
        own = usage.ru_utime + usage.ru_stime
        others += max(0.0, busy_s() - busy - own - (time.process_time() - mine))
        wall, cpu, peak = wall + took, cpu + own, max(peak, sampler.peak_bytes, usage.ru_maxrss * 1024)
    return Measured(wall, cpu, peak, written(), others / wall)


def alternate(ways: Mapping[str, Way], n_pair: int, max_tries: int) -> dict[str, list[Measured]]:
    """Run all ways after one another until n_pair rounds count, every other round in reverse order."""
    kept: dict[str, list[Measured]] = {name: [] for name in ways}
    for i in range(max_tries):
        done = {}
        for name in list(ways) if i % 2 == 0 else list(ways)[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                done[name] = ways[name](Path(folder))
        counts = all(one.others <= MAX_OTHERS for one in done.values())
        shown = ", ".join(f"{name} {one.wall_s:.2f} s wall {one.cpu_s:.2f} s CPU" for name, one in done.items())
        print(f"round {i + 1}: {shown}{'' if counts else '; discarded: other programs were running'}", file=sys.stderr, flush=True)
        if counts:
            for name, one in done.items():
                kept[name].append(one)
        if len(kept[next(iter(ways))]) == n_pair:
            break
    return kept


def table(title: str, kept: Mapping[str, Sequence[Measured]], ours: str, theirs: str) -> str:
    """Medians of each way, and the ratios of two of them round by round."""
    n = len(kept[ours])
    lines = [f"{title}, median of {n}", ""]
    if not n:
        return "\n".join([*lines, "no round counted: other programs were running in all of them"])
    lines.append(f"| {'way':22s} | {'wall s':>8s} | {'CPU s':>8s} | {'peak MiB':>8s} | {'written MiB':>11s} |")
    lines.append(f"| {'-' * 22} | {'-' * 7}: | {'-' * 7}: | {'-' * 7}: | {'-' * 10}: |")
    for name, runs in kept.items():
        wall, cpu, peak, written, _ = (statistics.median(values) for values in zip(*runs, strict=True))
        lines.append(f"| {name:22s} | {wall:8.2f} | {cpu:8.2f} | {peak / 2**20:8.0f} | {written / 2**20:11.1f} |")
    lines.append("")
    if theirs in kept:
        for i, what in enumerate(("wall", "CPU")):
            ratios = [a[i] / b[i] for a, b in zip(kept[ours], kept[theirs], strict=True)]
            lines.append(f"{what} {ours} / {theirs}: {' '.join(f'{ratio:.2f}' for ratio in ratios)}; "
                         f"median {statistics.median(ratios):.2f}")
    return "\n".join(lines)


def busy_s() -> float:
    """Seconds of CPU time that the machine has spent on all programs since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Sampler:
    """Samples the memory of a process and its descendants while a block runs."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.peak_bytes = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, held_bytes([self._pid, *descendants(self._pid)]))


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue  # gone since
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


def held_bytes(pids: Sequence[int]) -> int:
    """Private memory of some processes, and the mapped files of the one that has most."""
    private, mapped = 0, 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue  # gone since
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssFile:"))}
        private, mapped = private + sizes.get("RssAnon", 0), max(mapped, sizes.get("RssFile", 0))
    return private + mapped


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
