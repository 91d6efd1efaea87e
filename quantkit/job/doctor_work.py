"""What the work will take: disk, memory and time, told from the plans before anything is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import NoSpace
from quantkit.core.files import require_space
from quantkit.core.units import MIB, format_bytes
from quantkit.engine.chunk_time import ChunkTime, time_chunk
from quantkit.job.calibration import may_calibrate
from quantkit.job.doctor_case import Case, Finding, Unknown, not_applicable, ok, problem, warning
from quantkit.job.doctor_texts import expected_tokens
from quantkit.job.evaluation import n_cores
from quantkit.job.memory import AuditLayout, bound_of_one, free_disk_bytes, free_memory_bytes, plan_layout
from quantkit.job.rundir import RunFolder
from quantkit.job.session import tier_file_name
from quantkit.spec.model import ModelInfo
from quantkit.spec.plan import Plan
from quantkit.spec.quantizable import n_dims
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.tensor_types import TENSOR_TYPES

_IMATRIX_FACTOR = 1.2  # what collecting takes beside a plain pass (docs/LOG.md)
_REPORT_BYTES = 64 * MIB  # tables, pictures, logs


class Need(NamedTuple):
    """Bytes that will be written below a folder."""

    folder: Path
    size_bytes: int
    what: str


def look_at_disk(case: Case) -> Iterator[Finding]:
    """Whether tiers, scratch and temporary files fit where they go; each file system by itself."""
    check = "disk"
    places: dict[int, list[Need]] = {}
    for need in needs(case):
        places.setdefault(existing_folder(need.folder).stat().st_dev, []).append(need)
    for own in places.values():
        folder, total = existing_folder(own[0].folder), sum(need.size_bytes for need in own)
        what = " + ".join(f"{format_bytes(need.size_bytes)} {need.what}" for need in own if need.size_bytes)
        try:
            require_space(own[0].folder, total, f"the run ({what})")
        except NoSpace as error:
            fix = "" if case.options.drop_files else "; --drop-files keeps one tier at a time, --tiers makes fewer"
            yield problem(check, NoSpace(f"{error}{fix}"))
            continue
        yield ok(check, f"{what} at most; {format_bytes(free_disk_bytes(folder))} free at {folder}")


def needs(case: Case) -> list[Need]:
    """What a run will write, at most, beside what stands already."""
    run, plans, model = RunFolder(path=case.folder), case.ladder.plans, case.base_model
    if not plans:
        raise Unknown("a tier that can be planned")
    header_bytes = model.header.data_offset[0] + MIB
    # of measured tiers whose files were deleted nothing is made again
    waiting = [plan for plan in plans if not (case.options.drop_files and run.summary(plan.tier).exists())]
    sizes = {plan.tier: plan.tensor_bytes + header_bytes for plan in waiting}
    missing = {tier: size - min(size, _held_bytes(run.quants / tier_file_name(model.header.parts[0], tier)))
               for tier, size in sizes.items()}
    n_tiers, largest = len(waiting), max(sizes.values(), default=0)
    tiers = max(missing.values(), default=0) if case.options.drop_files else sum(missing.values())
    head = sum(t.size_bytes for t in model.header.tensors if model.roles[t.name] != "trunk") if _leaves_head_out(case) else 0
    whole = max(largest, head) if head else 0  # written whole, then without the head
    if head and case.protocol.plan.mtp_mode == "separate":
        tiers += head
    spec = case.protocol.eval
    n_values = sum(math.prod((t.shape[0], *t.shape[2:])) for t in model.header.tensors if n_dims(t.shape) > 1)  # importances
    n_scored = spec.n_ctx - 1 - spec.n_ctx // 2
    rows = 2 * n_tiers * n_chunk_of(case) * n_scored * ROW_DTYPE.itemsize  # while they gather, and as parquet
    scratch = whole + rows + 40 * n_values  # sums in float64, old and new state, and the matrix itself
    if _layout(case).uses_panels:
        scratch += case.n_workers * n_scored * (model.n_vocab or 0) * 4  # one chunk a worker; more where there is room
    if case.options.weights:
        scratch += 8 * model.n_params + model.header.file_bytes // 4
    return [Need(run.quants, tiers, f"for {n_tiers} tiers" if not case.options.drop_files else "for one tier at a time"),
            Need(run.parts, scratch, "of scratch"), Need(run.report, _REPORT_BYTES, "of reports and logs")]


def _leaves_head_out(case: Case) -> bool:
    return case.base_model.n_nextn > 0 and case.protocol.plan.mtp_mode != "inside"


def _held_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def planned_model(base: ModelInfo, plan: Plan) -> ModelInfo:
    """The file that a plan will give, described as if it were there."""
    types = {row.name: (TENSOR_TYPES[row.type], row.size_bytes) for row in plan.rows}
    tensors = tuple(dataclasses.replace(t, type=types[t.name][0], size_bytes=types[t.name][1]) for t in base.header.tensors)
    return dataclasses.replace(base, header=dataclasses.replace(base.header, tensors=tensors,
                                                                file_bytes=base.header.data_offset[0] + plan.tensor_bytes))


def look_at_memory(case: Case) -> Iterator[Finding]:
    """How base and tiers will share memory, as the audit will choose it."""
    layout = _layout(case)
    model, check = case.base_model, "memory"
    free = case.options.audit.memory_bytes or free_memory_bytes()
    found = f"{format_bytes(free)} {'to plan for' if case.options.audit.memory_bytes else 'free'}; {layout.describe()}"
    private = bound_of_one(model, case.settings, n_workers=layout.n_workers) - model.header.file_bytes
    if case.offload.n_gpu_layers:
        yield ok(check, f"{found}; layers on a device are counted as if they stayed in RAM")
    elif private > free:
        yield warning(check, f"{found}. The workers' own buffers alone need {format_bytes(private)}",
                      "use fewer --workers, or a machine with more memory")
    elif model.header.file_bytes > free:
        yield warning(check, f"{found}. The base has {format_bytes(model.header.file_bytes)}: every pass reads it from disk again, "
                             "many times slower", "use a machine with more memory than the base has, or --n-gpu-layers")
    else:
        yield ok(check, found)


def _layout(case: Case) -> AuditLayout:
    def make() -> AuditLayout:
        plans = case.ladder.plans
        if not plans:
            raise Unknown("a tier that can be planned")
        existing = existing_folder(case.folder)
        return plan_layout(case.base_model, [planned_model(case.base_model, plan) for plan in plans], case.settings,
                           n_workers=case.n_workers, n_chunk=n_chunk_of(case), memory_bytes=case.options.audit.memory_bytes,
                           scratch_bytes=free_disk_bytes(existing), max_group=case.options.audit.max_group)
    return case.once("the layout of the audit", make)


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def n_chunk_of(case: Case) -> int:
    """Chunks of all evaluation texts together; where they are not cut yet, at most as many as a token of two bytes would give."""
    spec, total = case.protocol.eval, 0
    for name in spec.corpora:
        try:
            evaluation = case.known_evaluation(name)
        except Unknown:
            evaluation = None
        total += len(evaluation.chunks) if evaluation is not None else (
            spec.n_chunk or max(2, case.protocol.corpus(name).size_bytes // 2 // spec.n_ctx))
    return total


def look_at_time(case: Case) -> Iterator[Finding]:
    """How long the audit and the calibration will take, from one chunk of base that a worker decodes now."""
    check, spec = "time", case.protocol.eval
    if not case.measure:
        yield not_applicable(check, "not measured, as asked")
        return
    layout, model = _layout(case), case.base_model
    evaluation = case.evaluation(spec.corpora[0])
    if evaluation is None:
        yield not_applicable(check, f"not measured: the text {spec.corpora[0]} is not here")
        return
    free = free_memory_bytes()
    if model.header.file_bytes > free and not case.offload.n_gpu_layers:
        yield not_applicable(check, f"not measured: the base, {format_bytes(model.header.file_bytes)}, does not fit the "
                                    f"{format_bytes(free)} of memory that are free, so a chunk would take as long as the disk does")
        return
    case.progress.note("doctor: decoding one chunk with the base, to tell the time (--no-measure leaves it out)")
    chunk = int(evaluation.chunks[0])
    took: ChunkTime = case.pool.call("time of a chunk", time_chunk, path=model.header.parts[0], settings=case.settings,
                                     offload=case.offload, tokens=evaluation.tokens[chunk * spec.n_ctx:(chunk + 1) * spec.n_ctx])
    yield ok(check, _time_words(case, took, layout))


def _time_words(case: Case, took: ChunkTime, layout: AuditLayout) -> str:
    """An estimate and no more: tiers are counted like base, cores as if all were free."""
    n_chunk, n_tiers = n_chunk_of(case), len(case.ladder.plans)
    passes = n_tiers + (1 if layout.uses_panels else len(layout.groups))
    share = max(1.0, layout.n_workers * case.settings.n_threads / n_cores())  # more threads than cores wait for each other
    audit_s = n_chunk * passes * took.decode_s / layout.n_workers * share
    words = (f"one chunk of base took {took.decode_s:.3g} s on {case.settings.n_threads} thread(s). Estimated from it, with each "
             f"tier as slow as base: audit {_duration(audit_s)} ({n_chunk} chunks, {passes} passes)")
    n_tokens = _calibration_tokens(case)
    if n_tokens:
        core_s = took.decode_s * case.settings.n_threads * n_tokens / case.settings.n_ctx
        words += f", calibration {_duration(_IMATRIX_FACTOR * core_s / n_cores())}"
    return f"{words}; writing the tiers and checks come on top"


def _calibration_tokens(case: Case) -> int:
    """Tokens that importances will be collected over; 0 where none will be."""
    spec = case.protocol.imatrix
    if case.options.imatrix is not None or not may_calibrate(case.protocol, case.tiers):
        return 0
    return spec.n_chunk * spec.n_ctx if spec.n_chunk else expected_tokens(case, case.protocol.corpus(spec.corpus)) or 0


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.4 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
