"""A Dask cluster as the place where base and tiers run: who takes part, how much fits, and the rows that come back.

The caller keeps the run directory, the text, the part files and everything that is computed from rows; workers get model files by
hash and chunks by number. A worker takes part if its rows would be ours, bit for bit: one build on one kind of CPU.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from quantkit.core.errors import EnvironmentFault, InputError
from quantkit.engine.pool import WorkerPool
from quantkit.job.dask_files import model_file
from quantkit.job.dask_kind import Kind, differences, read_kind
from quantkit.job.dask_options import DaskOptions, is_trusted, task_resources
from quantkit.job.dask_tasks import TaskStream
from quantkit.job.dask_worker import Group, Task, WorkerFacts, stop_engines, survey
from quantkit.job.evaluation import Evaluation, Subject
from quantkit.job.memory import AuditLayout, plan_layout
from quantkit.job.parts import Rows
from quantkit.job.progress import Progress

_CONNECT_S = 10.0
_SURVEY_S = 120.0
_NOBODY_S = 60.0  # nannies start dead workers again within seconds
_SHARE_OF_FREE = 0.9
_MOST_CHUNKS_A_TASK = 4
_TASKS_AN_ENGINE = 4


@contextmanager
def connect(options: DaskOptions | None) -> Iterator[DaskCluster | None]:
    """The cluster of a scheduler; None where none was asked for.

    Raises:
        EnvironmentFault: the package distributed is missing, certificates are, or nobody answers.
    """
    if options is None:
        yield None
        return
    client = _open_client(options.scheduler)
    cluster = DaskCluster(client, options)
    try:
        yield cluster
    finally:
        cluster.stop_engines()
        with suppress(Exception):  # what matters is written; a scheduler that is gone changes nothing
            client.close(timeout=_CONNECT_S)


def _open_client(scheduler: str) -> Any:
    try:
        import dask
        import distributed
    except ImportError as error:
        raise EnvironmentFault("expected the package distributed for --dask, found none: install gguf-quantkit[dask]") from error
    encrypted = scheduler.startswith("tls://")
    if encrypted and not dask.config.get("distributed.comm.tls.ca-file", None):
        raise EnvironmentFault(f"expected certificates for {scheduler}, found none: set distributed.comm.tls.ca-file, client.cert "
                               "and client.key in Dask's configuration (docs/SCALING.md)")
    try:
        security = distributed.Security(require_encryption=encrypted)
        return distributed.Client(scheduler, security=security, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=False)
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise EnvironmentFault(f"expected a Dask scheduler at {scheduler}, none answers ({error}): start one there, or mend the "
                               "address") from error


class DaskCluster:
    """An `Elsewhere` of an audit.

    Attributes:
        fit: the workers that take part, by address.
    """

    def __init__(self, client: Any, options: DaskOptions) -> None:
        self.client = client
        self.fit: dict[str, WorkerFacts] = {}
        self._options = options
        self._owner = uuid.uuid4().hex
        self._unfit: dict[str, str] = {}
        self._alive: Mapping[str, Any] = {}
        self._surveys: dict[str, Any] = {}
        self._kind: Kind | None = None
        self._n_gpu_layers = 0
        self._resources: dict[str, float] = {}
        self._nobody_since = time.monotonic()
        self._lost = False  # the last one that took part is gone, and may come again

    def plan(self, pool: WorkerPool, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject], memory_bytes: int | None,
             max_group: int, progress: Progress) -> AuditLayout:
        """Meet the workers; groups and panels that fit each of them.

        Args:
            pool: a worker of this machine: its kind is the one that all must be of.

        Raises:
            EnvironmentFault: no worker can take part; says why not.
        """
        self._meet(pool, evaluation, progress)
        n_slots = self.n_slots
        progress.note(f"dask: {len(self.fit)} workers, {n_slots} engine processes at {self._options.scheduler}; of each worker:")
        on_host = Counter(facts.host for facts in self.fit.values())
        memory = min(int(facts.free_memory * _SHARE_OF_FREE) // on_host[facts.host] for facts in self.fit.values())
        disk = min(facts.free_disk // on_host[facts.host] for facts in self.fit.values())
        return plan_layout(base.model, [tier.model for tier in tiers], evaluation.settings,
                           n_workers=max(self._slots_of(address) for address in self.fit),
                           n_chunk=-(-len(evaluation.chunks) // len(self.fit)),
                           memory_bytes=memory if memory_bytes is None else memory_bytes, scratch_bytes=disk, max_group=max_group)

    def rows(self, step: str, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject], chunks: Sequence[int],
             layout: AuditLayout, progress: Progress) -> Iterator[tuple[int, Rows]]:
        """Rows of one chunk and one tier at a time, the tier by its index.

        Raises:
            EngineCrash, EngineError, InputError: a task failed by itself.
            EnvironmentFault: the cluster did.
        """
        settings = evaluation.settings
        group = Group(id=uuid.uuid4().hex, owner=self._owner, base=model_file(base), tiers=tuple(map(model_file, tiers)),
                      settings=settings, tier_settings=tuple(tier.settings or settings for tier in tiers),
                      offload=evaluation.offload, tokens=evaluation.tokens, fetch_from=self._options.fetch_from)
        n_slots = self.n_slots
        most = layout.panel_n_chunk if layout.uses_panels else _MOST_CHUNKS_A_TASK
        share = n_slots if layout.uses_panels else _TASKS_AN_ENGINE * n_slots  # a panel loads every model: one for each engine
        size = max(1, min(most, -(-len(chunks) // max(1, share))))
        tasks = [Task(step, tuple(chunks[i:i + size]), layout.uses_panels) for i in range(0, len(chunks), size)]
        for task, tables in TaskStream(self, group, tasks, self._resources, progress):
            for i, table in enumerate(tables):
                for own in np.split(table, len(task.chunks)):
                    yield i, own

    def refresh(self, progress: Progress) -> None:
        """See who came and who went.

        Raises:
            EnvironmentFault: nobody takes part any more, or the scheduler is gone.
        """
        self._alive = self._workers()
        for address in [a for a in self.fit if a not in self._alive]:
            progress.note(f"dask: worker {address} is gone; what it had in hand goes to others")
            del self.fit[address]
            self._lost = True
        for address in [a for a in self._surveys if a not in self._alive]:
            del self._surveys[address]
        for address in self._alive.keys() - self.fit.keys() - self._unfit.keys() - self._surveys.keys():
            self._meet_one(address, progress)
        for address, future in list(self._surveys.items()):
            if future.status != "pending":
                del self._surveys[address]
                self._judge(address, future, progress)
        if self.fit or self._surveys:
            self._nobody_since = time.monotonic()
            self._lost = self._lost and not self.fit
        elif (self._alive and not self._lost) or time.monotonic() - self._nobody_since > _NOBODY_S:
            raise EnvironmentFault(f"no worker at {self._options.scheduler} can take part: {self._reasons()}; start one that can")

    def exclude(self, address: str, reason: str, progress: Progress) -> None:
        """Give a worker no more tasks."""
        self.fit.pop(address, None)
        if address not in self._unfit:
            self._unfit[address] = reason
            progress.note(f"dask: worker {address} takes no part: {reason}")

    @property
    def n_slots(self) -> int:
        """Engine processes that can be busy at the same time."""
        return sum(self._slots_of(address) for address in self.fit)

    def stop_engines(self, group: str = "") -> None:
        """End what this caller's tasks hold on all workers, or those of one group, running tasks too."""
        with suppress(Exception):
            if self.fit:
                self.client.run(stop_engines, group or self._owner, workers=sorted(self.fit), on_error="ignore")

    def _workers(self) -> Mapping[str, Any]:
        try:
            if self.client.status == "running":
                workers: Mapping[str, Any] = self.client.scheduler_info(n_workers=-1)["workers"]
                return workers
        except (OSError, TimeoutError, RuntimeError):
            pass
        raise EnvironmentFault(f"lost the Dask scheduler at {self._options.scheduler}: start it again, and the same command goes "
                               "on from here")

    def _meet(self, pool: WorkerPool, evaluation: Evaluation, progress: Progress) -> None:
        """Survey every worker that is there, and wait for the answers."""
        n_gpu_layers = evaluation.offload.n_gpu_layers
        if self._kind is None:
            self._n_gpu_layers = n_gpu_layers
            self._kind = pool.call("kind", read_kind, n_gpu_layers=n_gpu_layers)
            self._resources = task_resources(self._options, evaluation.offload)
            strangers = [a for a in self._workers() if not is_trusted(a)]
            if strangers:
                raise InputError(f"worker {strangers[0]} of {self._options.scheduler} is spoken with in the clear: Dask executes "
                                 "what it is sent, so all workers must be tls:// or on this machine; start it so")
        self._nobody_since = time.monotonic()
        deadline = time.monotonic() + _SURVEY_S
        while True:
            self.refresh(progress)
            if self.fit and not self._surveys:
                return
            if time.monotonic() > deadline:
                for address in list(self._surveys):
                    del self._surveys[address]
                    self.exclude(address, f"it did not answer within {_SURVEY_S:.0f} s", progress)
            time.sleep(0.05)

    def _meet_one(self, address: str, progress: Progress) -> None:
        lacking = [f"{name}={amount:g}" for name, amount in self._resources.items()
                   if self._alive[address].get("resources", {}).get(name, 0) < amount]
        if not is_trusted(address):
            self.exclude(address, "it is spoken with in the clear", progress)
        elif lacking:
            self.exclude(address, f"expected the resource {', '.join(lacking)}: start it with `dask worker --resources`", progress)
        else:
            self._surveys[address] = self.client.submit(survey, self._owner, self._n_gpu_layers, workers=[address], pure=False,
                                                        key=f"quantkit-survey-{uuid.uuid4().hex}")

    def _judge(self, address: str, future: Any, progress: Progress) -> None:
        """A worker's answer: fit, or a reason why not."""
        if future.status != "finished":
            error = future.exception() if future.status == "error" else None
            self.exclude(address, f"it cannot be asked what it is ({type(error).__name__}: {error}): install this version of "
                                  "quantkit there", progress)
            return
        facts: WorkerFacts = future.result()
        assert self._kind is not None
        if different := differences(self._kind, facts.kind):
            self.exclude(address, f"its rows may be other bits than this machine's ({'; '.join(different)})", progress)
        else:
            self.fit[address] = facts

    def _slots_of(self, address: str) -> int:
        """Tasks that a worker runs at a time: its threads, and what its resources allow."""
        info = self._alive[address]
        allowed = [int(info["resources"][name] // amount) for name, amount in self._resources.items()]
        return max(1, min([int(info["nthreads"]), *allowed]))

    def _reasons(self) -> str:
        if not self._unfit:
            return "none is there; start some with `dask worker`"
        return "; ".join(f"{address}: {reason}" for address, reason in list(self._unfit.items())[:5])
