"""Workers that hang, and those that only take long: what counts as a sign of life, and what follows where none comes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from quantkit.core.errors import EngineCrash, EngineError, EngineKilled, EnvironmentFault, NoSpace
from quantkit.engine import liveness
from quantkit.engine.liveness import Watch, work_s
from quantkit.engine.pool import WorkerPool
from tests.engine.commands import add, count, kill_self, pid
from tests.faults import commands

pytestmark = pytest.mark.system

QUIET = r"did nothing and said nothing for \d s, so it was ended"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second without a sign of life is too long."""
    monkeypatch.setattr(liveness, "POLL_S", 0.1)
    monkeypatch.setattr(liveness, "QUIET_S", 1.0)


@pytest.fixture
def pool(tmp_path: Path) -> WorkerPool:
    """Two workers, started before anybody is impatient."""
    pool = WorkerPool(2, tmp_path)
    pool.broadcast("start", pid)
    return pool


@pytest.mark.usefixtures("impatient")
class TestHang:
    def test_a_command_that_hangs_is_ended_and_named(self, pool: WorkerPool) -> None:
        with pool:
            before = pool.call("pid", pid)
            with pytest.raises(EngineKilled, match=rf"^load the tier: the worker process {QUIET}\. Last lines of its log: none"):
                pool.call("load the tier", commands.hang)
            assert not Path(f"/proc/{before}").exists()

    def test_one_that_computes_and_one_that_logs_may_go_on(self, pool: WorkerPool) -> None:
        with pool:
            assert pool.call("compute", commands.work, seconds=2.0) == "done"
            assert pool.call("log", commands.mutter, seconds=2.0) == "done"

    def test_one_that_hangs_is_found_beside_one_that_works(self, pool: WorkerPool) -> None:
        with pool:
            stream = pool.stream("count", commands.hang_or_count, [{"n": 2}, {"n": 100}])
            assert sorted(next(stream) for _ in range(4)) == [0, 0, 1, 1]
            with pytest.raises(EngineKilled, match=QUIET):
                list(stream)

    def test_one_that_does_not_take_its_command(self, pool: WorkerPool) -> None:
        with pool:
            pool.call("stop", commands.stop_self)
            time.sleep(0.6)
            with pytest.raises(EngineKilled, match=f"swallow: the worker process {QUIET}"):
                pool.call("swallow", commands.swallow, data=bytes(16 << 20))

    def test_one_that_computes_for_ever_in_silence(self, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(liveness, "SILENT_S", 1.5)
        with pool, pytest.raises(EngineKilled, match=r"spin: the worker process gave no answer for \d s, so it was ended"):
            pool.call("spin", commands.work, seconds=30.0)


class TestWatch:
    def test_time_that_this_process_did_not_see_does_not_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine that slept for a day, or a stopped job."""
        now = [0.0]
        monkeypatch.setattr("quantkit.engine.liveness.time.monotonic", lambda: now[0])
        monkeypatch.setattr(liveness, "work_s", lambda _: 1.0)
        watch = Watch(os.getpid(), tmp_path / "log")
        for _ in range(3):
            now[0] += 86_400.0
            assert watch.hang() == ""
        for _ in range(700):
            now[0] += 1.0
            said = watch.hang()
        assert said.startswith("did nothing and said nothing for 1")

    def test_ten_minutes_are_given_and_pages_from_a_slow_disk_are_work(self, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
        now, work = [0.0], [0.0]
        monkeypatch.setattr("quantkit.engine.liveness.time.monotonic", lambda: now[0])
        monkeypatch.setattr(liveness, "work_s", lambda _: work[0])
        watch = Watch(1, tmp_path / "log")
        for _ in range(3600):  # ten pages a second
            now[0], work[0] = now[0] + 1.0, work[0] + 0.01
            assert watch.hang() == ""
        said = [watch.hang() for now[0] in range(int(now[0]) + 1, int(now[0]) + 602)]
        assert said.count("") >= 450
        assert said[-1].startswith("did nothing and said nothing for 1")

    def test_where_the_system_tells_no_work_only_a_day_of_silence_is_a_hang(self, tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("quantkit.engine.liveness.time.monotonic", lambda: now[0])
        monkeypatch.setattr(liveness, "work_s", lambda _: None)
        watch = Watch(1, tmp_path / "log")
        for _ in range(86_399):
            now[0] += 1.0
            assert watch.hang() == ""
        now[0] += 1.0
        assert watch.hang() == "gave no answer for 1440 min"

    def test_the_work_of_a_process_grows_while_it_computes(self) -> None:
        before = work_s(os.getpid())
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        after = work_s(os.getpid())
        assert before is not None
        assert after is not None
        assert after - before >= 0.05
        assert work_s(1 << 30) is None


class TestDeath:
    def test_in_the_middle_of_an_answer(self, pool: WorkerPool) -> None:
        """What was read of the answer is no answer, and no error of the disk's."""
        with pool:
            victim = pool.call("pid", pid)
            pool.workers[0].send("send", commands.die_while_sending, {})
            time.sleep(1.0)  # it is killed while it waits for us to read
            with pytest.raises(EngineKilled, match=r"send: the worker process was killed \(signal 9\): probably out of memory"):
                pool.workers[0].receive()
            assert not Path(f"/proc/{victim}").exists()

    def test_of_one_worker_is_told_while_the_others_are_busy(self, pool: WorkerPool) -> None:
        with pool:
            began = time.monotonic()
            with pytest.raises(EngineKilled, match="load: the worker process was killed"):
                pool.each("load", commands.die_or_wait, [{"dies": False}, {"dies": True}])
            assert time.monotonic() - began < 20

    def test_while_nothing_was_asked_of_it(self, pool: WorkerPool) -> None:
        with pool:
            os.kill(pool.call("pid", pid), 9)
            with pytest.raises(EngineKilled, match="next step: the worker process was killed"):
                pool.call("next step", add, a=1, b=2)
            assert pool.call("next step", add, a=1, b=2) == 3

    def test_leaves_no_answer_of_another_worker_for_the_next_command(self, pool: WorkerPool) -> None:
        with pool:
            os.kill(pool.workers[1]._process.pid, 9)
            with pytest.raises(EngineCrash):
                list(pool.stream("count", count, [{"n": 3}, {"n": 3}]))
            assert pool.broadcast("add", add, a=1, b=2) == [3, 3]

    def test_a_listener_that_fails_leaves_no_answer_behind(self, pool: WorkerPool) -> None:
        def full(item: int) -> None:
            raise NoSpace("no room for it")

        with pool:
            with pytest.raises(NoSpace):
                pool.call("count", count, n=3, on_item=full)
            assert pool.call("add", add, a=1, b=2) == 3

    def test_what_kills_says_what_to_do(self, pool: WorkerPool) -> None:
        with pool, pytest.raises(EngineKilled, match="use fewer --workers or less --memory, or end other programs"):
            pool.call("step", kill_self)


class TestLog:
    def test_on_a_full_disk_costs_its_text_and_nothing_else(self, tmp_path: Path) -> None:
        for step in ("talk", "read"):
            (tmp_path / f"{step}.w0.log").symlink_to("/dev/full")
        with WorkerPool(1, tmp_path) as pool:
            assert pool.call("talk", commands.talk) == "done"
            assert pool.call("read", commands.read_log) == ["[   1/  1] token_embd.weight"]

    def test_that_cannot_be_made_costs_nothing_either(self, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("a file, where the folder should be")
        with WorkerPool(1, tmp_path / "logs") as pool:
            assert pool.call("talk", commands.talk) == "done"
            with pytest.raises(EngineCrash, match="Last lines of its log: none"):
                pool.call("die", kill_self)

    def test_takes_what_python_prints(self, tmp_path: Path) -> None:
        with WorkerPool(1, tmp_path) as pool:
            pool.call("talk", commands.talk)
        assert (tmp_path / "talk.w0.log").read_text().split("\n")[-4:] == ["to stdout", "to stderr", "native", ""]


def test_a_full_disk_under_a_command_is_told_as_one(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool, pytest.raises(NoSpace, match=r"the disk is full, No space left on device \(/x/y\): free"):
        pool.call("panel", commands.fill_disk, path=Path("/x/y"))


def test_an_answer_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(1, tmp_path) as pool:
        pool.call("pid", pid)
        pool.workers[0].send("add", add, {"a": 1, "b": 2})
        monkeypatch.setattr(pool.workers[0].pipe, "recv", lambda: (_ for _ in ()).throw(ValueError("no pickle")))
        with pytest.raises(EngineCrash, match=r"add: the worker process sent what cannot be read \(ValueError: no pickle\)"):
            pool.workers[0].receive()


def test_no_folder_for_temporary_files_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: str) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.TemporaryDirectory", nowhere)
    with pytest.raises(EnvironmentFault, match=r"expected a folder for temporary files, found none .*: set TMPDIR to one that can"):
        WorkerPool()


def test_too_many_processes_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    with WorkerPool(1, tmp_path) as pool, pytest.raises(EnvironmentFault, match="cannot start a worker process: Resource"):
        pool.call("pid", pid)


def test_an_error_that_is_ours_is_no_death(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool, pytest.raises(EngineError, match="fill_disk failed with TypeError"):
        pool.call("step", commands.fill_disk, wrong=1)
