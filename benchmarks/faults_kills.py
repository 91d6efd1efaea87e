"""SIGKILL at random points of `quantkit run`, several in a row, and resumes: is the bundle the one of a run that nobody killed?

A model of 250 kB, some tiers, a few chunks. Each kill hits the whole process group, the parent alone or one worker, at a random
time. After the last kill of a row the same command runs to its end, and every file that its manifest lists, with the manifest, is
compared byte by byte with those of the undisturbed run.

usage: python benchmarks/faults.py kills [--n 200] [--seed 1] [--tiers Q8_0,Q4_K_M] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gguf_factory import tiny_model

Victim = Literal["group", "parent", "worker"]

SETTINGS = ("eval.chunks=spread", "eval.n_chunk=12", "imatrix.chunks=first", "imatrix.n_chunk=2")
NOT_PUBLISHED = {"logs", "parts", "run.json", ".lock"}
MARK = "QUANTKIT_FAULTS_KILLS"
_ORPHAN_S = 15.0
_MOST_IN_A_ROW = 6
_RUN_S = 600.0
_KILL_WITHIN = 0.7  # of the undisturbed run's time: a resumed one is shorter, and one that has ended cannot be killed


@dataclass(slots=True)
class Count:
    """What was done and what came of it."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    stages: collections.Counter[str] = field(default_factory=collections.Counter)
    resumes: int = 0
    identical: int = 0
    left: list[str] = field(default_factory=list)
    orphans: int = 0
    tracebacks: int = 0
    faults: list[str] = field(default_factory=list)


class Job:
    """One command on one run directory, as often as it takes."""

    def __init__(self, base: Path, run: Path, tiers: str, temp: Path) -> None:
        self.run = run
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        arguments = ["run", "-b", base, "-p", "demo-v1", "-o", run, "--tiers", tiers, "--workers", "2", *settings]
        self._command = [sys.executable, "-c", "from quantkit.cli.main import main; main()", *map(str, arguments)]
        self._env = {**os.environ, MARK: str(run), "TMPDIR": str(temp), "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1",
                     "PYTHONPATH": str(Path(__file__).parents[1])}
        self.words = run.with_suffix(".err")

    def start(self) -> subprocess.Popen[bytes]:
        """Begin; in a process group of its own."""
        with self.words.open("wb") as err:
            return subprocess.Popen(self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                                    start_new_session=True)

    def processes(self) -> list[int]:
        """Every process of the run that is still there, workers that lost their parent included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.run}\0".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def stage(self) -> str:
        """The last step that has left something."""
        made = "start"
        for stage, pattern in (("plan", "plan/*.json"), ("imatrix", "imatrix.gguf"), ("quantize", "quants/*.gguf"),
                               ("audit", "audit/*/summary.json"), ("checks", "smoke/*.json"), ("report", "report/retention.md")):
            if any(self.run.glob(pattern)):
                made = stage
        return made


def main(argv: list[str]) -> int:
    """Kill, resume, compare; prints the figures. 0 if every resume gave the same bundle and left nothing behind."""
    parser = argparse.ArgumentParser(prog="faults.py kills", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="kills, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiers", default="Q8_0,Q4_K_M")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; one that is removed at the end if none is given")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults-kills-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return _report(_kill_and_resume(folder, options.n, random.Random(options.seed), options.tiers), options.seed)


def _kill_and_resume(folder: Path, n: int, rng: random.Random, tiers: str) -> Count:
    base = tiny_model(folder / "tiny model-BF16.gguf", n_embd=256, n_ff=256)[0]
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    reference = Job(base, folder / "reference", tiers, temp)
    began = time.monotonic()
    if reference.start().wait(_RUN_S) != 0:
        sys.exit(f"the undisturbed run failed:\n{reference.words.read_text(errors='replace')}")
    run_s = time.monotonic() - began
    expected = bundle_of(reference.run)
    print(f"the undisturbed run: {run_s:.1f} s, {len(expected)} files in the bundle", flush=True)
    count = Count()
    while sum(count.kills.values()) < n:
        job = Job(base, folder / f"run {count.resumes:03d}", tiers, temp)
        wanted = rng.randint(1, _MOST_IN_A_ROW)
        while wanted and _kill_once(job, rng, run_s, count):
            wanted -= 1
        _finish(job, expected, count)
        print(f"{sum(count.kills.values())} kills, {count.identical} of {count.resumes} resumes identical", flush=True)
    return count


def _kill_once(job: Job, rng: random.Random, run_s: float, count: Count) -> bool:
    """Start or resume the run and kill something of it; whether that was before its end."""
    process = job.start()
    victim: Victim = rng.choice(("group", "parent", "worker"))
    try:
        process.wait(rng.uniform(0.05, _KILL_WITHIN * run_s))
    except subprocess.TimeoutExpired:
        stage = job.stage()
        if _kill(job, process, victim, rng):
            count.kills[victim] += 1
            count.stages[stage] += 1
        code = process.wait(_RUN_S)
        if victim == "worker" and code not in (0, 3, -signal.SIGKILL):
            count.faults.append(f"exit code {code} after a worker was killed: {_last_words(job)}")
        if victim != "worker" and rng.random() < 0.5:  # else the next start meets what has not noticed yet that its parent is gone
            count.orphans += _wait_for_orphans(job)
        count.tracebacks += _has_traceback(job)
        return True
    count.tracebacks += _has_traceback(job)
    return False


def _kill(job: Job, process: subprocess.Popen[bytes], victim: Victim, rng: random.Random) -> bool:
    try:
        if victim == "group":
            os.killpg(process.pid, signal.SIGKILL)
        elif victim == "parent":
            process.kill()
        else:
            deadline = time.monotonic() + _RUN_S
            while process.poll() is None and time.monotonic() < deadline:
                if workers := [pid for pid in job.processes() if _is_worker(pid)]:
                    os.kill(rng.choice(workers), signal.SIGKILL)
                    return True
                time.sleep(0.02)
            return False
    except ProcessLookupError:
        return False
    return True


def _finish(job: Job, expected: dict[str, str], count: Count) -> None:
    """Run to the end and compare."""
    code = job.start().wait(_RUN_S)
    count.resumes += 1
    count.tracebacks += _has_traceback(job)
    count.orphans += _wait_for_orphans(job)
    if code != 0:
        count.faults.append(f"{job.run.name}: the resume ended with exit code {code}: {_last_words(job)}")
        return
    found = bundle_of(job.run)
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    count.identical += not differ
    if differ:
        count.faults.append(f"{job.run.name}: {len(differ)} files differ: {', '.join(differ[:8])}")
    count.left += [f"{job.run.name}/{path.relative_to(job.run)}" for path in job.run.rglob("*")
                   if path.name.endswith((".tmp", ".rows", ".sums", ".whole.gguf"))]


def bundle_of(run: Path) -> dict[str, str]:
    """The sha256 of the manifest and of every file that it lists, and the names alone of what else lies there to be published."""
    listed = [*json.loads((run / "manifest.json").read_bytes())["files"], "manifest.json"]
    there = {path.relative_to(run).as_posix(): "not in the manifest" for path in run.rglob("*")
             if path.is_file() and path.relative_to(run).parts[0] not in NOT_PUBLISHED}
    return there | {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in listed}


def _is_worker(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_for_orphans(job: Job) -> int:
    """How many processes of the run are still there a good while after its end; they are ended."""
    deadline = time.monotonic() + _ORPHAN_S
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def _last_words(job: Job) -> str:
    return job.words.read_text(errors="replace")[-500:]


def _has_traceback(job: Job) -> bool:
    return b"Traceback" in job.words.read_bytes()


def _report(count: Count, seed: int) -> int:
    kills = ", ".join(f"{count.kills[victim]} {victim}" for victim in ("group", "parent", "worker"))
    stages = ", ".join(f"{n} after {stage}" for stage, n in sorted(count.stages.items()))
    print(f"seed                      {seed}\n"
          f"kills                     {sum(count.kills.values())} ({kills})\n"
          f"when                      {stages}\n"
          f"resumes identical         {count.identical} of {count.resumes}\n"
          f"temporary files left      {len(count.left)}\n"
          f"orphan processes          {count.orphans}\n"
          f"tracebacks                {count.tracebacks}")
    for fault in [*count.faults, *count.left]:
        print(f"  {fault}")
    good = count.identical == count.resumes and not (count.left or count.orphans or count.tracebacks or count.faults)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
