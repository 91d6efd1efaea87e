"""Who takes part in a cluster and how much of it, with a scheduler that is a script."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EnvironmentFault, InputError
from quantkit.core.units import GIB
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job import dask_cluster
from quantkit.job.dask_cluster import DaskCluster, connect
from quantkit.job.dask_options import read_dask
from quantkit.job.dask_worker import WorkerFacts
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.memory import AuditLayout
from quantkit.job.progress import Silent
from tests.gguf_factory import tiny_model
from tests.job.test_dask_options import KIND

SETTINGS = ContextSettings(n_ctx=64, n_batch=64, n_ubatch=64, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=1)
FACTS = WorkerFacts(host="a", kind=KIND, free_memory=8 * GIB, free_disk=10 * GIB)
POOL: Any = SimpleNamespace(call=lambda *_, **__: KIND)


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Scheduler:
    """Knows workers by address, with the facts that each tells of itself; an exception where it cannot tell."""

    def __init__(self, **facts: WorkerFacts | Exception) -> None:
        self.status = "running"
        self.workers: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, WorkerFacts | Exception] = {}
        self.asked: list[str] = []
        for name, own in facts.items():
            self.join(f"tcp://127.0.0.1:{len(facts)}{name[-1]}", own)

    def join(self, address: str, facts: WorkerFacts | Exception = FACTS, n_threads: int = 1, **resources: float) -> str:
        self.workers[address] = {"nthreads": n_threads, "resources": resources}
        self.facts[address] = facts
        return address

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        assert n_workers == -1  # all of them
        return {"workers": self.workers}

    def submit(self, function: Any, *_: Any, workers: list[str], **__: Any) -> Any:
        self.asked += workers
        facts = self.facts[workers[0]]
        return SimpleNamespace(status="error" if isinstance(facts, Exception) else "finished", result=lambda: facts,
                               exception=lambda: facts)

    def run(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def base(tmp_path: Path) -> Subject:
    return read_subject(tiny_model(tmp_path / "base.gguf")[0], "base")


def plan(scheduler: Scheduler, base: Subject, progress: Silent, resources: str = "", memory: int | None = None,
         offload: Offload = Offload()) -> tuple[DaskCluster, AuditLayout]:  # noqa: B008 - frozen
    cluster = DaskCluster(scheduler, read_dask("127.0.0.1", resources))
    evaluation: Any = SimpleNamespace(settings=SETTINGS, offload=offload, chunks=np.arange(20))
    return cluster, cluster.plan(POOL, evaluation, base, [base, base], memory, 99, progress)


def test_the_weakest_worker_is_planned_for_and_machines_are_shared(base: Subject) -> None:
    scheduler, progress = Scheduler(), Notes()
    scheduler.join("tcp://127.0.0.1:1", n_threads=2)
    scheduler.join("tcp://127.0.0.1:2")
    cluster, layout = plan(scheduler, base, progress)
    assert (layout.n_workers, layout.uses_panels, layout.groups) == (2, False, ((0, 1),))
    assert (cluster.n_slots, sorted(cluster.fit)) == (3, ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
    assert progress.lines == ["dask: 2 workers, 3 engine processes at tcp://127.0.0.1:8786; of each worker:"]
    assert plan(scheduler, base, progress, memory=1)[1].panel_n_chunk == 5  # 20 chunks, 2 workers, 2 engines each
    scheduler.join("tcp://127.0.0.1:3", FACTS._replace(host="b", free_memory=1))
    assert plan(scheduler, base, progress)[1].uses_panels


def test_workers_of_another_kind_are_named_and_left_out(base: Subject) -> None:
    scheduler, progress = Scheduler(), Notes()
    good = scheduler.join("tcp://127.0.0.1:1")
    scheduler.join("tcp://127.0.0.1:2", FACTS._replace(kind=dataclasses.replace(KIND, cpu="GenuineIntel 6 85")))
    scheduler.join("tcp://127.0.0.1:3", ModuleNotFoundError("No module named 'quantkit'"))
    cluster, _ = plan(scheduler, base, progress)
    assert list(cluster.fit) == [good]
    assert sorted(progress.lines)[1:] == [
        "dask: worker tcp://127.0.0.1:2 takes no part: its rows may be other bits than this machine's (cpu: expected AuthenticAMD "
        "25 17, found GenuineIntel 6 85)",
        "dask: worker tcp://127.0.0.1:3 takes no part: it cannot be asked what it is (ModuleNotFoundError: No module named "
        "'quantkit'): install this version of quantkit there"]
    cluster.refresh(progress)
    assert len(scheduler.asked) == 3  # each once


def test_where_nobody_takes_part_every_reason_is_told(base: Subject) -> None:
    scheduler = Scheduler(w1=FACTS._replace(kind=dataclasses.replace(KIND, system="Linux x86_64 musl")))
    with pytest.raises(EnvironmentFault, match=r"no worker at .*:8786 can take part: tcp://127\.0\.0\.1:11: its rows may be"):
        plan(scheduler, base, Silent())


def test_a_task_needs_its_resources(base: Subject) -> None:
    scheduler, progress = Scheduler(), Notes()
    bare = scheduler.join("tcp://127.0.0.1:1", n_threads=4)
    one, two = (scheduler.join(f"tcp://127.0.0.1:{n + 1}", n_threads=4, GPU=n) for n in (1, 2))
    cluster, layout = plan(scheduler, base, progress, offload=Offload(n_gpu_layers=9))
    assert (sorted(cluster.fit), cluster.n_slots, layout.n_workers) == ([one, two], 3, 2)
    assert progress.lines[0] == (
        f"dask: worker {bare} takes no part: expected the resource GPU=1: start it with `dask worker --resources`")
    assert plan(scheduler, base, progress, resources="GPU=2")[0].n_slots == 1
    assert plan(scheduler, base, progress)[0].n_slots == 12


def test_no_worker_is_spoken_with_in_the_clear(base: Subject) -> None:
    scheduler = Scheduler()
    scheduler.join("tcp://10.0.0.5:1")
    with pytest.raises(InputError, match=r"worker tcp://10\.0\.0\.5:1 of tcp://127\.0\.0\.1:8786 is spoken with in the clear"):
        plan(scheduler, base, Silent())
    assert scheduler.asked == []
    late, progress = Scheduler(w1=FACTS), Notes()
    cluster, _ = plan(late, base, progress)
    late.join("tcp://10.0.0.5:1")
    cluster.refresh(progress)
    assert progress.lines[-1] == "dask: worker tcp://10.0.0.5:1 takes no part: it is spoken with in the clear"
    assert list(cluster.fit) == late.asked == ["tcp://127.0.0.1:11"]


def test_workers_come_and_go(base: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, progress = Scheduler(w1=FACTS), Notes()
    cluster, _ = plan(scheduler, base, progress)
    scheduler.workers.clear()
    scheduler.join("tcp://127.0.0.1:9")
    cluster.refresh(progress)
    assert list(cluster.fit) == ["tcp://127.0.0.1:9"]
    assert progress.lines[-1] == "dask: worker tcp://127.0.0.1:11 is gone; what it had in hand goes to others"
    scheduler.workers.clear()
    cluster.refresh(progress)  # a nanny may start it again
    scheduler.join("tcp://127.0.0.1:8", ModuleNotFoundError("quantkit"))
    cluster.refresh(progress)  # beside one that takes no part, too
    monkeypatch.setattr(dask_cluster, "_NOBODY_S", -1.0)
    with pytest.raises(EnvironmentFault, match=r"can take part: tcp://127\.0\.0\.1:8: it cannot be asked"):
        cluster.refresh(progress)


def test_a_cluster_without_workers_is_waited_for_and_one_whose_workers_lack_a_file_is_not(
        base: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = DaskCluster(Scheduler(), read_dask("127.0.0.1"))
    cluster.refresh(Silent())
    monkeypatch.setattr(dask_cluster, "_NOBODY_S", -1.0)
    with pytest.raises(EnvironmentFault, match="none is there; start some with `dask worker`"):
        cluster.refresh(Silent())
    monkeypatch.undo()
    cluster, _ = plan(Scheduler(w1=FACTS), base, Silent())
    cluster.exclude("tcp://127.0.0.1:11", "expected a.gguf, found nothing", Silent())
    with pytest.raises(EnvironmentFault, match=r"can take part: .* expected a\.gguf, found nothing"):
        cluster.refresh(Silent())


def test_a_lost_scheduler_is_an_interruption(base: Subject) -> None:
    scheduler = Scheduler(w1=FACTS)
    cluster, _ = plan(scheduler, base, Silent())
    scheduler.status = "connecting"
    with pytest.raises(EnvironmentFault, match=r"lost the Dask scheduler at .*: start it again, and the same command goes on"):
        cluster.refresh(Silent())


@pytest.mark.parametrize(("scheduler", "message"), [
    ("tls://127.0.0.1:1", "expected certificates for tls://127.0.0.1:1, found none: set distributed.comm.tls.ca-file"),
    ("127.0.0.1:1", "expected a Dask scheduler at tcp://127.0.0.1:1, none answers (no route): start one there"),
])
def test_what_is_missing_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch, scheduler: str, message: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setitem(sys.modules, "dask", SimpleNamespace(config=SimpleNamespace(get=lambda *_: None)))
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=refuse, Security=lambda **_: None))
    with pytest.raises(EnvironmentFault) as caught, connect(read_dask(scheduler)):
        pass
    assert message in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = r"expected the package distributed for --dask, found none: install gguf-quantkit\[dask\]"
    with pytest.raises(EnvironmentFault, match=message), connect(read_dask("127.0.0.1:1")):
        pass
