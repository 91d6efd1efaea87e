"""Workers: results, items, errors, deaths, and orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantkit.core.errors import EngineCrash, EngineError, InputError
from quantkit.engine.pool import WorkerPool
from tests.engine import commands

pytestmark = pytest.mark.system


def test_a_worker_lives_on_between_commands(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool:
        assert pool.call("add", commands.add, a=2, b=3) == 5
        assert pool.call("pid", commands.pid) == pool.call("pid", commands.pid)
        assert pool.call("pid", commands.pid) != os.getpid()


@pytest.mark.engine
def test_a_worker_that_was_started_early_has_the_library_loaded(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path) as pool:
        pool.start(1)
        early, late = pool.broadcast("modules", commands.modules)
        assert "llama_cpp" in early
        assert "llama_cpp" not in late


def test_items_reach_the_caller_in_order(tmp_path: Path) -> None:
    seen: list[int] = []
    with WorkerPool(1, tmp_path) as pool:
        assert pool.call("count", commands.count, n=3, on_item=seen.append) is None
        assert seen == [0, 1, 2]
        assert sorted(pool.stream("count", commands.count, [{"n": 2}, {"n": 3}])) == [0, 0, 1, 1, 2]


def test_every_task_is_done_once_by_whichever_worker_is_free(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path) as pool:
        assert sorted(pool.stream("count", commands.count, [{"n": 1}] * 7)) == [0] * 7
        assert len(set(pool.broadcast("pid", commands.pid))) == 2


def test_a_stream_that_is_left_early_leaves_no_answer_behind(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path) as pool:
        stream = pool.stream("count", commands.count, [{"n": 5}] * 4)
        assert next(stream) == 0
        del stream
        assert pool.call("add", commands.add, a=2, b=3) == 5
        assert sorted(pool.stream("count", commands.count, [{"n": 2}])) == [0, 1]


def test_an_error_of_ours_arrives_as_it_was_raised(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool:
        with pytest.raises(InputError, match="expected nothing, got a call"):
            pool.call("refuse", commands.refuse)
        assert pool.call("add", commands.add, a=1, b=1) == 2


def test_an_unforeseen_error_names_the_command_and_leaves_its_trace_in_the_log(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool, pytest.raises(EngineError, match="stumble failed with ZeroDivisionError: by accident"):
        pool.call("the step", commands.stumble)
    assert "in stumble" in (tmp_path / "the_step.w0.log").read_text()


@pytest.mark.parametrize(("command", "how"), [
    ("abort", "ended by SIGABRT"), ("kill_self", r"was killed \(signal 9\): probably out of memory"),
    ("leave", "ended by exit status 0"),
])
def test_a_death_names_the_step_and_how_and_the_next_command_has_a_new_worker(tmp_path: Path, command: str, how: str) -> None:
    with WorkerPool(1, tmp_path) as pool:
        with pytest.raises(EngineCrash, match=f"step one: the worker process {how}"):
            pool.call("step one", getattr(commands, command))
        assert pool.call("add", commands.add, a=1, b=2) == 3


def test_a_death_tells_the_last_lines_of_its_own_log(tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path) as pool, pytest.raises(EngineCrash, match="Last lines of its log: these are my last words"):
        pool.call("step", commands.abort)


def test_a_death_in_a_stream_ends_the_other_workers_too(tmp_path: Path) -> None:
    with WorkerPool(2, tmp_path) as pool:
        before = pool.broadcast("pid", commands.pid)
        with pytest.raises(EngineCrash):
            list(pool.stream("die", commands.abort, [{}]))
        assert not set(before) & set(pool.broadcast("pid", commands.pid))


def test_the_parents_environment_stays_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    with WorkerPool(1, tmp_path) as pool:
        pool.call("pid", commands.pid)
    assert dict(os.environ) == before


def test_no_worker_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = ("import sys\nfrom pathlib import Path\n"
              "from quantkit.engine.pool import WorkerPool\nfrom tests.engine import commands\n"
              "pool = WorkerPool(1, Path(sys.argv[1]))\nprint(pool.call('pid', commands.pid), flush=True)\n"
              "pool.call('sleep', commands.sleep, seconds=60)\n")
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+[^ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    except FileNotFoundError:
        return False


@pytest.mark.engine
def test_a_native_abort_tells_the_asserts_text_and_the_parent_lives(tmp_path: Path, tiny_model: Path) -> None:
    with WorkerPool(1, tmp_path) as pool:
        with pytest.raises(EngineCrash, match=r"mtp context: the worker process ended by SIGABRT.*GGML_ASSERT"):
            pool.call("mtp context", commands.abort_natively, path=tiny_model)
        assert pool.call("add", commands.add, a=1, b=2) == 3
