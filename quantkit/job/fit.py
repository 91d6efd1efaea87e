"""Memory estimates: llama.cpp's own simulation, the header's formulas where it cannot, and what a run keeps of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.core.errors import EngineKilled, EnvironmentFault, InputError
from quantkit.engine.fit import simulate
from quantkit.engine.pool import WorkerPool
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.base_facts import BaseFacts, describe_base
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import N_UBATCH, ContextMemory, context_memory, table_n_ctx
from quantkit.spec.model import ModelInfo, describe_model


def estimate_contexts(model: ModelInfo, n_ctx: Sequence[int], kv_type: str, progress: Progress,
                      pool: WorkerPool | None = None) -> list[ContextMemory]:
    """Memory of contexts of some lengths; simulated, or by formula where the library cannot.

    Args:
        pool: workers that are there already; none: one is started, or only the formulas are used if it cannot be.

    Raises:
        InputError: neither way can tell.
        EngineKilled: the simulation was ended; a later one may tell.
    """
    path = model.header.parts[0]
    try:
        if pool is not None:
            return _simulate(pool, path, n_ctx, kv_type)
        with WorkerPool(1) as own:
            return _simulate(own, path, n_ctx, kv_type)
    except EngineKilled:
        raise
    except EnvironmentFault as error:
        progress.note(f"{error}; estimating from the header instead")
        return [context_memory(model, n, kv_type) for n in n_ctx]


def _simulate(pool: WorkerPool, path: Path, n_ctx: Sequence[int], kv_type: str) -> list[ContextMemory]:
    found: list[ContextMemory] = pool.call("memory", simulate, path=path, n_ctx=tuple(n_ctx), kv_type=kv_type, n_ubatch=N_UBATCH)
    return found


def record_base(run: RunFolder, base: ModelInfo, pool: WorkerPool, progress: Progress) -> None:
    """Write base.json, unless it is there: what reports say about the base, with the memory that its contexts need."""
    if _read(run) is not None:
        return
    try:
        memory = estimate_contexts(base, table_n_ctx(base), "F16", progress, pool)
    except InputError as error:
        progress.note(f"no memory estimate: {error}")
        memory = []
    write_json(base_path(run), describe_base(base, memory).to_json())


def keep_base(run: RunFolder) -> None:
    """Write base.json where it is missing and a tier's header tells what goes into it: tiers come and go, reports stay."""
    if _read(run) is None and (facts := read_base(run)) is not None:
        write_json(base_path(run), facts.to_json())


def read_base(run: RunFolder) -> BaseFacts | None:
    """What base.json holds; of a run without one, what the header of any of its tiers tells; None where there is neither."""
    held = _read(run)
    if held is not None:
        return held
    file = next(iter(sorted(run.quants.glob("*.gguf"))), None)
    if file is None:
        return None
    model = describe_model(read_header(file))
    try:
        memory = [context_memory(model, n) for n in table_n_ctx(model)]
    except InputError:
        memory = []
    return describe_base(model, memory)


def base_path(run: RunFolder) -> Path:
    """Where the facts lie."""
    return run.path / "base.json"


def _read(run: RunFolder) -> BaseFacts | None:
    try:
        return BaseFacts.from_json(read_json(base_path(run)))
    except (KeyError, TypeError, AttributeError):
        return None
