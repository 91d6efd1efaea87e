"""Folders that cannot be written, that another process holds, or that become so in the middle; clocks that jump."""

from __future__ import annotations

import datetime
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantkit.cli.main import run as quantkit
from quantkit.core.errors import EnvironmentFault, InputError, QuantkitError, RunLocked
from quantkit.report.run_report import write_report
from tests.faults import fakes
from tests.faults.mounts import read_only

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from quantkit.core.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that works in run/ until its input ends."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def audit_command(job: fakes.Job, run: Path) -> list[str]:
    """The command line of the job."""
    settings = [part for setting in fakes.SETTINGS for part in ("--set", setting)]
    return ["audit", *map(str, job.tiers), "-b", str(job.base), "-p", "demo-v1", "-o", str(run), *settings]


class TestSecondProcess:
    def test_is_refused_by_the_pid_of_the_first(self, job: fakes.Job, tmp_path: Path, holder: subprocess.Popen[str],
                                                capsys: pytest.CaptureFixture[str]) -> None:
        assert quantkit(audit_command(job, tmp_path / "run")) == 3
        assert capsys.readouterr().err.strip() == (f"quantkit: another process (pid {holder.pid}) works in {tmp_path / 'run'}: "
                                                   "wait for it to end, or choose another run directory")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]

    def test_goes_on_once_the_first_was_killed(self, job: fakes.Job, tmp_path: Path, holder: subprocess.Popen[str],
                                               expected: dict[str, str]) -> None:
        holder.kill()
        holder.wait()
        assert (tmp_path / "run" / ".lock").read_text() == f"{holder.pid}\n"
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_a_lock_that_names_a_living_process_is_stale_all_the_same(self, job: fakes.Job, tmp_path: Path) -> None:
        """A pid that another program has got since."""
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").write_text(f"{os.getppid()}\n")
        assert job.run(tmp_path / "run").failed == {}

    def test_one_that_died_on_a_full_disk_is_named_unknown(self, tmp_path: Path, job: fakes.Job,
                                                           holder: subprocess.Popen[str]) -> None:
        (tmp_path / "run" / ".lock").write_bytes(b"")
        with pytest.raises(RunLocked, match=r"another process \(pid unknown\) works in"):
            job.run(tmp_path / "run")


class TestReadOnly:
    def test_a_new_run_is_refused_before_any_work(self, job: fakes.Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "disk").mkdir()
        with read_only(tmp_path / "disk") as disk:
            assert quantkit(audit_command(job, disk / "run")) == 3
            assert capsys.readouterr().err.strip() == (f"quantkit: cannot work in {disk / 'run'}: Read-only file system; "
                                                       "choose another run directory")

    def test_a_finished_run_can_be_read_and_not_written(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
        job.run(tmp_path / "run")
        with read_only(tmp_path / "run") as run:
            with pytest.raises(EnvironmentFault, match=r"cannot work in .*: Read-only file system; choose another run directory"):
                job.run(run)
            with pytest.raises(InputError, match=r"cannot write .*: Read-only file system; choose another output path"):
                write_report(run)
            assert quantkit(["report", str(run)]) == 2
            assert "Traceback" not in capsys.readouterr().err
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_a_disk_that_turns_read_only_in_the_middle(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
        """What a kernel does after an error of the disk's."""
        run = tmp_path / "run"
        run.mkdir()
        held = []

        def before(step: str) -> None:
            if step.startswith("audit"):
                held.append(read_only(run))
                held[0].__enter__()

        monkeypatch.setattr(fakes.Pool, "before", staticmethod(before))
        try:
            with pytest.raises((QuantkitError, OSError), match="Read-only file system"):
                job.run(run)
        finally:
            held[0].__exit__(None, None, None)
        monkeypatch.setattr(fakes.Pool, "before", staticmethod(lambda step: None))
        assert job.run(run).failed == {}
        assert fakes.bundle_of(run) == expected

    @pytest.mark.parametrize("verb", [["plan", "--from"], ["quantize", "-p", "demo-v1", "--tier", "Q8_0", "-b"],
                                      ["imatrix", "-p", "demo-v1", "-b"]], ids=lambda verb: verb[0])
    def test_an_output_on_it_is_refused_in_one_sentence(self, job: fakes.Job, tmp_path: Path, verb: list[str],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "disk").mkdir()
        with read_only(tmp_path / "disk") as disk:
            assert quantkit([*verb, str(job.base), "-o", str(disk / "out")]) in (2, 3)
            said = capsys.readouterr().err.strip().splitlines()[-1]
            assert "Read-only file system" in said
            assert "choose another output path" in said


def test_no_folder_for_temporary_files(job: fakes.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, f"No usable temporary directory found in {['/tmp']}")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert quantkit(["quantize", "-p", "demo-v1", "--tier", "Q8_0", "-b", str(job.base), "-o", str(tmp_path / "out.gguf")]) == 3
    assert capsys.readouterr().err.strip().endswith(": set TMPDIR to one that can")
    assert not (tmp_path / "out.gguf").exists()


class TestClock:
    @pytest.mark.parametrize("jump", [lambda t, n: t + n * 1e7, lambda t, n: t - n * 1e7, lambda t, n: t + (-1) ** n * 1e8],
                             ids=["forwards", "backwards", "to and fro"])
    def test_a_clock_that_jumps_changes_nothing(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                monkeypatch: pytest.MonkeyPatch, jump: Callable[[float, int], float]) -> None:
        """Each time it is asked it tells another year; files that are there get such times too."""
        real, calls = time.time, [0]

        def jumping() -> float:
            calls[0] += 1
            return max(0.0, jump(real(), calls[0]))

        class Jumping(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Jumping:
                return cls.fromtimestamp(jumping() % 4e9, tz)

        monkeypatch.setattr(time, "time", jumping)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
        monkeypatch.setattr("quantkit.job.timing.datetime.datetime", Jumping)
        run = tmp_path / "run"
        job.run(run)
        for i, path in enumerate(sorted(run.rglob("*"))):
            os.utime(path, (i * 1e8 % 4e9, i * 3e8 % 4e9))
        job.run(run)
        assert fakes.bundle_of(run) == expected
        starts = json.loads((run / "run.json").read_bytes())["starts"]
        assert len(starts) == 2
        assert all(0 <= step["wall_s"] < 60 for start in starts for step in start["steps"])
