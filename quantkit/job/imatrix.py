"""The calibration step: importances of every matrix that a plan may quantize, collected over a text, resumable.

Sums are added in float64, group by group of chunks in the text's order, and rounded to float32 once, when the file is written:
a run that was killed and resumed writes the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, ImatrixError, InputError, QuantkitError
from quantkit.core.files import atomic_path, sha256_json
from quantkit.engine.collect import Sums, collect, open_collect
from quantkit.engine.lockstep import Tokenized, close_group, read_build, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.answers import check_sums, check_tokens
from quantkit.job.evaluation import Subject, context_settings, n_cores
from quantkit.job.imatrix_state import EMPTY, STATE_VERSION, CollectState, load_state, save_state, state_path
from quantkit.job.memory import bound_of_one, free_memory_bytes
from quantkit.job.progress import Progress
from quantkit.measure.articles import chunk_indices
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, write_imatrix
from quantkit.spec.model import ModelInfo
from quantkit.spec.plan_coverage import is_lookup
from quantkit.spec.protocol import Protocol
from quantkit.spec.quantizable import is_quantizable, n_dims

_CHUNKS_A_GROUP = 4
_SAVE_EVERY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The matrices to collect for, by the pass that sees them; those that have no input to square; those that must be seen."""

    trunk: frozenset[str]
    mtp: frozenset[str]
    lookups: tuple[str, ...]
    required: frozenset[str]


def collection_targets(model: ModelInfo, *, output: bool, mtp: bool) -> Targets:
    """Every matrix, but lookups: an untied embedding multiplies nothing. Required are those that the library may quantize;
    of the others (expert gates), llama-imatrix collects what it sees, and so do we.

    Args:
        output: collect for the output matrix too (with tied embeddings, for `token_embd.weight` in its place).
        mtp: collect for the MTP block too.
    """
    trunk: set[str] = set()
    head: set[str] = set()
    lookups = []
    for tensor in model.header.tensors:
        name, role = tensor.name, model.roles[tensor.name]
        if n_dims(tensor.shape) < 2:
            continue
        if is_lookup(name, role, tied=model.tied_embeddings):
            lookups.append(name)
        elif role == "mtp":
            head.add(name)
        elif role not in ("output", "embedding") or output:
            trunk.add(name)
    if not mtp:
        head.clear()
    required = {t.name for t in model.header.tensors if is_quantizable(t.name, t.shape, model.architecture)}
    return Targets(trunk=frozenset(trunk), mtp=frozenset(head), lookups=tuple(lookups),
                   required=frozenset((trunk | head) & required))


def collect_imatrix(target: Path, pool: WorkerPool, protocol: Protocol, base: Subject, text: bytes, progress: Progress,
                    *, parts: Path, offload: Offload = Offload()) -> Imatrix:  # noqa: B008 - frozen
    """Collect over the protocol's calibration text and write llama.cpp's format.

    Args:
        target: where the matrix goes; appears whole.
        parts: a folder for the state from which a killed collection goes on.

    Raises:
        InputError: the text is shorter than the protocol's chunks.
        EngineError: an activation was not finite; names tensor and chunk.
        ImatrixError: a matrix of the trunk was never multiplied: this architecture is not understood.
    """
    spec = protocol.imatrix
    corpus = protocol.corpus(spec.corpus)
    settings = context_settings(spec)
    n_workers = min(len(pool.workers), _most_workers(base.model, settings, offload, spec.n_threads))
    if spec.n_chunk:
        n_workers = min(n_workers, -(-spec.n_chunk // _CHUNKS_A_GROUP))
    # asked of all of them, so that they start side by side
    build, *_ = pool.each("build", read_build, [{"n_gpu_layers": offload.n_gpu_layers}] * n_workers)
    seen: Tokenized = pool.call("tokenize calibration", tokenize, path=base.path, text=text)
    check_tokens("tokenize calibration", seen)
    n_total = len(seen.ids) // spec.n_ctx
    if not max(2, spec.n_chunk) <= n_total:
        raise InputError(f"expected {max(2, spec.n_chunk)} chunks of {spec.n_ctx} tokens in the calibration text {corpus.name}, "
                         f"found {n_total}: use a longer text or fewer chunks")
    chunks = chunk_indices(spec.chunks, spec.n_chunk, n_total).tolist()
    n_chunk = len(chunks)
    wanted = collection_targets(base.model, output=spec.output, mtp=spec.mtp and base.model.n_nextn > 0)
    path = state_path(parts, sha256_json({
        "version": [STATE_VERSION, _CHUNKS_A_GROUP], "imatrix_id": protocol.imatrix_id, "base": base.sha256,
        "build": dataclasses.asdict(build), "offload": dataclasses.asdict(offload)}))
    state = load_state(path) or EMPTY
    progress.start("imatrix", n_chunk)
    progress.advance(state.n_done)
    if state.n_done < n_chunk:
        n_workers = min(n_workers, -(-(n_chunk - state.n_done) // _CHUNKS_A_GROUP))
        shared = dataclasses.replace(settings, n_threads=max(1, settings.n_threads // n_workers))
        pool.each("load imatrix", open_collect, [{"path": base.path, "settings": shared, "offload": offload,
                                                  "trunk": wanted.trunk, "mtp": wanted.mtp}] * n_workers)
        row_lengths = {tensor.name: tensor.shape[0] for tensor in base.model.header.tensors}
        state = _collect_rest(pool, n_workers, seen.ids, chunks, state, path, progress,
                              lambda sums: check_sums("imatrix", sums, row_lengths, wanted.trunk | wanted.mtp))
        pool.each("close", close_group, [{}] * n_workers)
    progress.finish()
    _check_complete(base, wanted, state.sums)
    imatrix = Imatrix(entries={name: _rounded(name, sums) for name, sums in sorted(state.sums.items())},
                      datasets=(corpus.file,), chunk_count=n_chunk, chunk_size=spec.n_ctx, legacy=False)
    with atomic_path(target) as temp:
        write_imatrix(temp, imatrix, _devices(offload))
    path.unlink(missing_ok=True)
    return imatrix


def _devices(offload: Offload) -> dict[str, str]:
    """What a matrix says of where it was collected; nothing on the CPU alone: llama-imatrix writes no such keys."""
    if offload == Offload():
        return {}
    return {"n_gpu_layers": str(offload.n_gpu_layers), "main_gpu": str(offload.main_gpu),
            "tensor_split": ",".join(f"{share:g}" for share in offload.tensor_split)}


def _most_workers(model: ModelInfo, settings: ContextSettings, offload: Offload, n_threads: int) -> int:
    """How many processes may share the cores: small models gain, as threads of one context wait for each other at every node.

    No number depends on it. Each holds the contexts of trunk and head, whose buffers must fit a quarter of the free memory.
    """
    if offload.n_gpu_layers:
        return 1
    private = 4 * (bound_of_one(model, settings, n_workers=1) - model.header.file_bytes)  # every row's logits, two contexts
    return max(1, min(n_cores() // max(1, n_threads), free_memory_bytes() // 4 // max(1, private)))


def _collect_rest(pool: WorkerPool, n_workers: int, tokens: npt.NDArray[np.int32], chunks: Sequence[int], state: CollectState,
                  path: Path, progress: Progress, check: Callable[[Mapping[str, Sums]], None]) -> CollectState:
    """Go on from a state; what is done is written down every now and then, and when the work ends before its time.

    Groups of chunks are added in the text's order, whichever worker is done first.
    """
    starts = range(state.n_done, len(chunks), _CHUNKS_A_GROUP)
    groups = {start: tuple(chunks[start:start + _CHUNKS_A_GROUP]) for start in starts}
    tasks = [{"tokens": tokens, "chunks": group} for group in groups.values()]
    start_of = {group: start for start, group in groups.items()}
    early: dict[int, Mapping[str, Sums]] = {}
    saved, saved_at = state.n_done, time.monotonic()
    try:
        for done, sums in pool.stream("imatrix", collect, tasks, n_workers=n_workers):
            check(sums)
            early[start_of[done]] = sums
            while state.n_done in early:
                n = len(groups[state.n_done])
                state = state.plus(early.pop(state.n_done), n)
                progress.advance(n)
                if time.monotonic() - saved_at >= _SAVE_EVERY_S:
                    save_state(path, state)
                    saved, saved_at = state.n_done, time.monotonic()
    except BaseException:  # Ctrl-C too
        if state.n_done > saved:
            with contextlib.suppress(QuantkitError, OSError):  # the first fault is the one to tell
                save_state(path, state)
        raise
    if state.n_done < len(chunks):
        raise EngineError(f"imatrix: expected the sums of {len(chunks)} chunks, the workers gave those of {state.n_done}: run "
                          "again, and if it comes back, report it")
    return state


def _rounded(name: str, sums: Sums) -> ImatrixEntry:
    """Sums as the file holds them.

    Raises:
        ImatrixError: a sum that float32 cannot hold.
    """
    with np.errstate(over="ignore"):
        in_sum2 = sums.in_sum2.astype(np.float32)
    if not np.isfinite(in_sum2).all():
        raise ImatrixError(f"expected sums of squares that fit float32 for {name}, got {sums.in_sum2.max():.3g}: the "
                           "activations of this model are not sound; convert it again")
    return ImatrixEntry(in_sum2=in_sum2, counts=sums.counts.astype(np.float32))


def _check_complete(base: Subject, wanted: Targets, total: Mapping[str, Sums]) -> None:
    missing = sorted(wanted.required - total.keys())
    if missing:
        raise ImatrixError(f"expected activations for every matrix of {base.path.name}, found none for {len(missing)}, the first "
                           f"{missing[0]}: llama.cpp does not multiply by it in this architecture; plan it at a type that needs "
                           "no importances")
