"""Damaged GGUFs through `show`, `plan`, `doctor`, `audit` and `verify`, as a user starts them.

usage: python benchmarks/faults.py inputs [--n 1000] [--seed 1] [--keep FOLDER]

Each file is a sound model of some 100 kB (a llama, one with experts, one in two shards) that was damaged: cut, bits changed, fields
that lie, pieces moved, values of the metadata changed, tensor data changed. The command line runs in a process that lives on from
one file to the next; where it dies or does not answer, it is started anew, and that is counted. Engine workers are new ones for
every call, forked from a process that has the libraries loaded; reports are written without pictures.

    refused        exit 1, 2 or 3 and a sentence
    accepted       exit 0; a sound header over changed tensor data can only be noticed by a hash
    traceback      an exception that nobody turned into a sentence
    hang           no answer within 120 s
    death          the process itself died; a native crash in a worker of it is contained, and counted apart
    wrong success  exit 0 on a file whose tensors are not all there, a bundle verified with a changed file in it, a run resumed that
                   kept one, or a result that names another file's hash than the one that was measured

`audit` measures each file as a tier of the sound one, over two chunks of the bundled text. `verify` and every 25th time `run` get a
finished run in which the tier's file was replaced by a damaged one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.damage import Damage, damage_gguf
from tests.gguf_factory import tiny_model

_TIMEOUT_S = 120
_SMALL = ("--set", "eval.chunks=\"first\"", "--set", "eval.n_chunk=2", "--workers", "1")
_TIER = "Q8_0"


class Answer(NamedTuple):
    """What one call of the command line came to; `code` is None where it did not end by itself."""

    code: int | None
    out: str
    error: str
    fault: str  # "", "traceback", "hang" or "death"
    seconds: float
    peak_bytes: int


class CommandLine:
    """`quantkit` in a process of its own, as often as is asked, started anew where it dies."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def run(self, *arguments: str | Path) -> Answer:
        """One call."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()
        start = time.monotonic()
        self._pipe.send([str(argument) for argument in arguments])
        try:
            if self._pipe.poll(_TIMEOUT_S):
                code, out, error, fault, peak = self._pipe.recv()
                return Answer(code, out, error, fault, time.monotonic() - start, peak)
            fault = "hang"
        except (EOFError, OSError):
            fault = "death"
        self.close()
        return Answer(None, "", "", fault, time.monotonic() - start, 0)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    from quantkit.cli.main import run
    from quantkit.engine import pool
    from quantkit.engine.library import environment_for_workers
    from quantkit.report import run_report

    os.environ.update(environment_for_workers(os.environ))
    importlib.import_module("llama_cpp")
    warm = multiprocessing.get_context("fork")  # every call has new workers; that they start quickly is all that differs
    setattr(multiprocessing, "get_context", lambda method: warm)  # noqa: B010 - mypy knows it as a method
    pool._END_S = 0.1  # a forked worker holds this process' end of its own pipe, so it has to be ended
    setattr(run_report, "draw_run", lambda data: {})  # noqa: B010 - the pictures of a report would take most of the time
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        out, error, code, fault = io.StringIO(), io.StringIO(), None, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = run(arguments)
            except BaseException:
                traceback.print_exc()
                fault = "traceback"
        fault = "traceback" if "Traceback (most recent call last)" in error.getvalue() else fault
        pipe.send((code, out.getvalue(), error.getvalue(), fault, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


@dataclass
class Count:
    """What became of one verb."""

    n: int = 0
    refused: int = 0
    accepted: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    crashes: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0


class Trial:
    """The sound files, and one damaged one after another."""

    def __init__(self, folder: Path, keep: Path | None) -> None:
        self._folder, self._keep = folder, keep
        self._line = CommandLine()
        self.counts: dict[str, Count] = collections.defaultdict(Count)
        self.kinds: collections.Counter[str] = collections.Counter()
        (folder / "sound").mkdir()
        self.sources = [tiny_model(folder / "sound" / "llama.gguf"), tiny_model(folder / "sound" / "moe.gguf", n_expert=4),
                        tiny_model(folder / "sound" / "split.gguf", n_part=2)]
        self._run = folder / "run"
        made = self._line.run("run", "-b", self.sources[0][0], "-p", "demo-v1", "-o", self._run, "--tiers", _TIER, *_SMALL)
        if made.code not in (0, 1):  # 1: random weights answer nothing sensible, so the smoke test fails
            raise SystemExit(f"the sound run failed: {made.error}")
        _drop_report(self._run)
        if (sound := self._line.run("verify", self._run)).code != 0:
            raise SystemExit(f"the sound run does not verify: {sound.out}{sound.error}")
        self._tier = next((self._run / "quants").glob("*.gguf"))
        self._whole = self._tier.read_bytes()

    def close(self) -> None:
        """End the command line."""
        self._line.close()

    def check(self, i: int, rng: random.Random) -> None:
        """One damaged file through every verb."""
        source = rng.choice((self.sources[0], self.sources[0], *self.sources))
        damaged = rng.randrange(len(source))
        case = self._folder / "case"
        case.mkdir()
        paths = [Path(shutil.copy(path, case)) for path in source]
        damage = damage_gguf(source[damaged].read_bytes(), rng)
        paths[damaged].write_bytes(damage.data)
        self.kinds[damage.kind] += 1
        whole = damage.kind != "cut"
        self._ask("show", damage, whole, "show", paths[0])
        self._ask("plan", damage, whole, "plan", "-b", paths[0], "-p", "demo-v1")
        if i % 10 == 0:
            self._ask("plan, llama.cpp's own", damage, whole, "plan", "-b", paths[0], "-p", "wikitext2-stock-v1", "-t", "Q4_K_M")
        self._ask("doctor", damage, whole, "doctor", "-b", paths[0], "-p", "demo-v1", "--tiers", _TIER, "--no-measure")
        answer = self._ask("audit", damage, whole, "audit", paths[0], "-b", source[0], "-p", "demo-v1", "-o", case / "run", *_SMALL)
        if answer.code == 0:
            held = json.loads((case / "run" / "manifest.json").read_bytes())["tiers"]
            if [tier["sha256"] for tier in held.values()] != [_sha256(paths)]:
                self._fault("audit", "wrong success", damage, "the result names another hash")
        shutil.rmtree(case)
        self._check_known(i, rng)

    def _check_known(self, i: int, rng: random.Random) -> None:
        """A file whose hash is known: no verb may take another in its place."""
        damage = damage_gguf(self._whole, rng)
        if damage.data == self._whole:
            return
        self._tier.write_bytes(damage.data)
        self._ask("verify", damage, False, "verify", self._run)
        if i % 25 == 0:
            resumed = shutil.copytree(self._run, self._folder / "resumed")
            self._ask("run, resumed", damage, True, "run", "-b", self.sources[0][0], "-p", "demo-v1", "-o", resumed,
                      "--tiers", _TIER, *_SMALL)
            if (resumed / "quants" / self._tier.name).read_bytes() != self._whole:
                self._fault("run, resumed", "wrong success", damage, "the damaged file was kept")
            shutil.rmtree(resumed)
        self._tier.write_bytes(self._whole)

    def _ask(self, name: str, damage: Damage, may_succeed: bool, *arguments: str | Path) -> Answer:
        answer, count = self._line.run(*arguments), self.counts[name]
        count.n += 1
        count.slowest_s = max(count.slowest_s, answer.seconds)
        count.peak_bytes = max(count.peak_bytes, answer.peak_bytes)
        if answer.fault:
            self._fault(name, answer.fault, damage, answer.error)
        elif answer.code == 0:
            count.accepted += 1
            if not may_succeed:
                self._fault(name, "wrong success", damage, answer.out)
        else:
            count.refused += 1
            count.crashes += "worker process ended by" in answer.error + answer.out
            if not (answer.error.strip() or answer.out.strip()):
                self._fault(name, "no sentence", damage, "")
        return answer

    def _fault(self, name: str, fault: str, damage: Damage, words: str) -> None:
        self.counts[name].faults[fault] += 1
        print(f"{fault} in {name} of a file damaged by {damage.kind}: {words[-1500:]}", file=sys.stderr)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(damage.data).hexdigest()[:12]
            (self._keep / f"{name.split(',')[0]}-{fault.replace(' ', '-')}-{digest}.gguf").write_bytes(damage.data)


def _sha256(paths: Sequence[Path]) -> str:
    """As the audit names a file: a split one by all its parts."""
    from quantkit.core.files import sha256_file
    from quantkit.job.evaluation import join_hashes

    return join_hashes([sha256_file(path) for path in paths])


def _drop_report(run: Path) -> None:
    """Leave out what takes `verify` seconds a time, and seal the bundle again."""
    from quantkit.job.manifest import refresh_files
    from quantkit.job.rundir import RunFolder

    shutil.rmtree(run / "report", ignore_errors=True)
    refresh_files(RunFolder(path=run))


def _table(trial: Trial) -> Iterator[str]:
    faults = ("traceback", "hang", "death", "wrong success", "no sentence")
    yield "| verb | files | refused | accepted | " + " | ".join(f"{fault}" for fault in faults) + " | worker crashes, contained |"
    yield "| :--- |" + " ---: |" * (len(faults) + 4)
    for name, count in trial.counts.items():
        yield (f"| {name} | {count.n} | {count.refused} | {count.accepted} | "
               + " | ".join(str(count.faults[fault]) for fault in faults) + f" | {count.crashes} |")
    yield ""
    yield "kinds of damage: " + ", ".join(f"{kind} {n}" for kind, n in sorted(trial.kinds.items()))
    yield f"largest peak of the process: {max(c.peak_bytes for c in trial.counts.values()) / 2**20:.0f} MiB"
    yield f"slowest call: {max(c.slowest_s for c in trial.counts.values()):.1f} s"


def main(arguments: list[str]) -> int:
    """Print the table; 1 if there was any fault."""
    parser = argparse.ArgumentParser(prog="faults.py inputs")
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep files that showed a fault there")
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trial = Trial(Path(folder), given.keep)
        try:
            for i in range(given.n):
                trial.check(i, rng)
                if i % 50 == 49:
                    print(f"{i + 1} of {given.n}", file=sys.stderr, flush=True)
        finally:
            trial.close()
            print("\n".join(_table(trial)))
    return int(any(count.faults for count in trial.counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
