"""Base and tiers on the workers of a Dask cluster: the same bytes, whoever dies, and one sentence where it cannot be."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.main import run as run_command
from quantkit.core.errors import EngineCrash
from quantkit.job.audit import AuditOptions
from quantkit.job.dask_cluster import connect
from quantkit.job.dask_options import read_dask
from quantkit.job.ladder import RunOptions, RunResult, audit_files
from quantkit.job.progress import Silent
from quantkit.job.standalone import quantize_to_file
from quantkit.spec.protocol import Protocol, load_protocol
from tests.gguf_factory import tiny_model
from tests.job import dask_commands

pytestmark = pytest.mark.engine

SETTINGS = ["eval.chunks=spread", "eval.n_chunk=12", "plan.tiers[Q4_K_M].rules=[]"]


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", SETTINGS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, protocol: Protocol) -> tuple[Path, list[Path]]:
    """A random base and two quantized files of it."""
    folder = tmp_path_factory.mktemp("shared models")
    base = tiny_model(folder / "base-BF16.gguf", n_embd=256, n_ff=256)[0]
    tiers = [folder / f"{tier}.gguf" for tier in ("Q8_0", "Q4_K_M")]
    for path in tiers:
        quantize_to_file(base, protocol, path.stem, path, Silent())
    return base, tiers


@pytest.fixture(scope="module")
def bundle(models: tuple[Path, list[Path]], protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a run without Dask, by hash."""
    base, tiers = models
    return bundle_of(audit_files(base, protocol, tmp_path_factory.mktemp("reference") / "run", tiers, Silent()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three worker processes on loopback, each with one thread and the resource GPU=1, which is a name only."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=3, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None,
                      resources={"GPU": 1}) as cluster:
        yield cluster


@pytest.fixture
def on_workers(cluster: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a function in every worker; what was patched there is put back."""
    from distributed import Client

    with Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(3)
        yield client.run
        client.run(dask_commands.patch)


class Listener(Silent):
    """Keeps notes, and does something after the first rows of an audit."""

    def __init__(self, at_first_rows: Callable[[], None] | None = None) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.n_done = 0
        self._at_first_rows = at_first_rows

    def start(self, step: str, total: int) -> None:
        self.steps.append((step, total))

    def advance(self, n: int = 1) -> None:
        self.n_done += n
        if n and self._at_first_rows is not None:
            act, self._at_first_rows = self._at_first_rows, None
            act()

    def note(self, text: str) -> None:
        self.lines.append(text)

    def lines_with(self, part: str) -> list[str]:
        return [line for line in self.lines if part in line]


def bundle_of(result: RunResult) -> dict[str, str]:
    """Every file but logs, parts, times and the lock."""
    assert result.failed == {}
    run = result.folder.path
    return {path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(run.rglob("*"))
            if path.is_file() and path.relative_to(run).parts[0] not in {"logs", "parts", "run.json", ".lock"}}


def audited(cluster: Any, models: tuple[Path, list[Path]], protocol: Protocol, run: Path, progress: Silent, *, resources: str = "",
            **options: Any) -> RunResult:
    base, tiers = models
    with connect(read_dask(cluster.scheduler_address, resources)) as elsewhere:
        return audit_files(base, protocol, run, tiers, progress,
                           RunOptions(n_workers=1, audit=AuditOptions(elsewhere=elsewhere, **options)))


def kill_a_busy_worker(cluster: Any) -> None:
    busy = max(cluster.scheduler.workers.values(), key=lambda state: len(state.processing))
    assert busy.processing
    os.kill(next(nanny.pid for nanny in cluster.workers.values() if nanny.worker_address == busy.address), signal.SIGKILL)


def test_rows_are_the_same_with_a_worker_killed_in_the_middle(
        cluster: Any, on_workers: Any, models: tuple[Path, list[Path]], protocol: Protocol, bundle: dict[str, str],
        tmp_path: Path) -> None:
    on_workers(dask_commands.patch, score="take_time")  # so that there are tasks in hand
    progress = Listener(lambda: kill_a_busy_worker(cluster))
    assert bundle_of(audited(cluster, models, protocol, tmp_path / "run", progress)) == bundle
    assert progress.steps == [("audit Q8_0 Q4_K_M", 24)]
    assert progress.n_done == 24
    assert len(progress.lines_with("dask: 3 workers, 3 engine processes at tcp://127.0.0.1:")) == 1


def test_panels_give_the_same_rows_and_no_engine_is_left(cluster: Any, on_workers: Any, models: tuple[Path, list[Path]],
                                                          protocol: Protocol, bundle: dict[str, str], tmp_path: Path) -> None:
    progress = Listener()
    assert bundle_of(audited(cluster, models, protocol, tmp_path / "a", progress, memory_bytes=1, resources="GPU=1")) == bundle
    assert len(progress.lines_with("base first, its rows of 4 chunks a worker on disk")) == 1
    assert [pids for pids in on_workers(dask_commands.engine_pids).values() if pids] == []  # no caller, no memory held


def test_what_an_interrupt_leaves_is_resumed_here(cluster: Any, on_workers: Any, models: tuple[Path, list[Path]],
                                                  protocol: Protocol, bundle: dict[str, str], tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audited(cluster, models, protocol, tmp_path / "run", Listener(interrupt))
    deadline = time.monotonic() + 20
    while any(on_workers(dask_commands.n_busy).values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(on_workers(dask_commands.n_busy).values()) == 0
    assert not any(state.processing for state in cluster.scheduler.workers.values())
    base, tiers = models
    assert len(list((tmp_path / "run" / "parts").rglob("*.rows"))) == 2
    assert bundle_of(audit_files(base, protocol, tmp_path / "run", tiers, Silent(), RunOptions(n_workers=1))) == bundle


def test_a_task_that_kills_its_engine_is_tried_once_more_and_then_at_fault(
        cluster: Any, on_workers: Any, models: tuple[Path, list[Path]], protocol: Protocol, tmp_path: Path) -> None:
    on_workers(dask_commands.patch, score="die")
    progress = Listener()
    result = audited(cluster, (models[0], models[1][:1]), protocol, tmp_path / "run", progress)
    assert list(result.failed) == ["Q8_0"]
    assert isinstance(result.failed["Q8_0"], EngineCrash)
    assert "audit Q8_0" in str(result.failed["Q8_0"])
    assert "(worker tcp://127.0.0.1:" in str(result.failed["Q8_0"])
    assert len(progress.lines_with("trying it once on another worker")) >= 1


def test_workers_of_another_kind_and_without_the_files_take_no_part(
        cluster: Any, on_workers: Any, models: tuple[Path, list[Path]], protocol: Protocol, bundle: dict[str, str],
        tmp_path: Path) -> None:
    first, second, _ = sorted(on_workers(dask_commands.n_busy))
    on_workers(dask_commands.patch, read_kind="other_kind", workers=[first])
    on_workers(dask_commands.patch, find_model="find_nothing", workers=[second])
    progress = Listener()
    assert bundle_of(audited(cluster, models, protocol, tmp_path / "run", progress)) == bundle
    assert len(progress.lines_with(f"worker {first} takes no part: its rows may be other bits than this machine's (numpy: ")) == 1
    assert progress.lines_with(f"worker {second} takes no part") in (
        [f"dask: worker {second} takes no part: expected a.gguf, found nothing"], [])


def test_the_command_line_speaks_with_the_scheduler(cluster: Any, on_workers: Any, models: tuple[Path, list[Path]],
                                                    bundle: dict[str, str], tmp_path: Path,
                                                    capfd: pytest.CaptureFixture[str]) -> None:
    base, tiers = models
    common = ["audit", str(tiers[0]), "-b", str(base), "-p", "demo-v1", *(part for s in SETTINGS for part in ("--set", s)),
              "--dask", cluster.scheduler_address]
    assert run_command([*common, "-o", str(tmp_path / "run")]) == 0
    rows = tmp_path / "run" / "audit" / "Q8_0" / "rows.parquet"
    assert hashlib.sha256(rows.read_bytes()).hexdigest() == bundle["audit/Q8_0/rows.parquet"]
    assert run_command([*common, "-o", str(tmp_path / "no"), "--dask-resources", "TPU=1"]) == 3
    assert "expected the resource TPU=1: start it with `dask worker --resources`" in capfd.readouterr().err
