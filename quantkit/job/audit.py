"""The audit: base and tiers over the chunks of a text, token by token, into rows and a summary for each tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quantkit.core.errors import EngineCrash, EngineError, InputError, QuantkitError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.core.units import format_bytes
from quantkit.engine.lockstep import close_group, open_audit, open_panel, score, score_panel
from quantkit.engine.pool import WorkerPool
from quantkit.job.deal import deal
from quantkit.job.evaluation import Evaluation, Subject, check_same_text
from quantkit.job.memory import AuditLayout, free_disk_bytes, plan_layout
from quantkit.job.parts import PartFile, Rows, merge_rows, read_parquet, write_parquet
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.records import TierSummary
from quantkit.spec.refpack_records import PackReference

Writer = Callable[[Subject, Mapping[int, Rows]], None]


class Elsewhere(Protocol):
    """Workers of other machines, whose rows are the same bits."""

    def plan(self, pool: WorkerPool, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject], memory_bytes: int | None,
             max_group: int, progress: Progress) -> AuditLayout:
        """Groups and panels that fit each of the machines."""

    def rows(self, step: str, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject], chunks: Sequence[int],
             layout: AuditLayout, progress: Progress) -> Iterator[tuple[int, Rows]]:
        """Rows of one chunk and one tier at a time, the tier by its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What may differ from run to run without moving a row.

    Attributes:
        elsewhere: where base and tiers run, if not in the pool.
    """

    memory_bytes: int | None = None
    max_group: int = 1 << 20
    elsewhere: Elsewhere | None = None


def audit(run: RunFolder, pool: WorkerPool, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject], progress: Progress,
          options: AuditOptions = AuditOptions()) -> dict[str, QuantkitError]:
    """Measure every tier that is not measured yet; a tier that fails leaves the others whole.

    Returns:
        The tiers that failed, each with its error.
    """
    failed: dict[str, QuantkitError] = {}
    waiting = []
    for tier in tiers:
        if read_summary(run, evaluation, base.sha256, tier.name, tier.sha256, packs=False) is not None:
            progress.note(f"audit {tier.name}: measured already")
            continue
        try:
            check_same_text(pool, evaluation, base, tier)
            waiting.append(tier)
        except (InputError, EngineCrash, EngineError) as error:
            failed[tier.name] = error
    def write(tier: Subject, chunks: Mapping[int, Rows]) -> None:
        write_tier(run, evaluation, base.sha256, tier, chunks)
        run.shortfall(tier.name).unlink(missing_ok=True)  # of a pack that it was measured against before

    return failed | measure_rows(run, pool, evaluation, base, waiting, progress, options, write)


def measure_rows(run: RunFolder, pool: WorkerPool, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject],
                 progress: Progress, options: AuditOptions, write: Writer, *, step: str = "audit",
                 keep_parts: bool = False) -> dict[str, QuantkitError]:
    """Run base and tiers over the evaluation's chunks; what a killed run left in part files is not run again.

    Args:
        write: gets each tier with the rows of every chunk, once they are all there.
        step: what the progress is called.
        keep_parts: leave the part files for a later call with more chunks.

    Returns:
        The tiers that failed, each with its error.
    """
    return _Audit(run, pool, evaluation, base, progress, write, step, keep_parts).measure(tiers, options) if tiers else {}


def part_path(run: RunFolder, evaluation: Evaluation, base: Subject, tier: Subject) -> Path:
    """Where a tier's rows gather while they are measured."""
    audit_id = evaluation.audit_id(base.sha256, tier.sha256)
    if tier.settings is not None:
        audit_id = sha256_json({"audit_id": audit_id, "settings": dataclasses.asdict(tier.settings)})
    return run.parts / "audit" / f"{audit_id}.rows"


def read_summary(run: RunFolder, evaluation: Evaluation, base_sha256: str, tier: str, q_sha256: str, *,
                 packs: bool = True) -> TierSummary | None:
    """A tier's summary where it stands and its rows are those that it was made of; None where it must be (re)made.

    Args:
        packs: whether a tier that was measured against a reference pack counts as measured.
    """
    held = read_json(run.summary(tier))
    try:
        ref = held["ref"]["sha256"] if packs and "ref" in held else None
        if (held["audit_id"] != evaluation.audit_id(base_sha256, q_sha256, ref)
                or held["rows_sha256"] != sha256_file(run.rows(tier))):
            return None
        return TierSummary.from_json(held["summary"])
    except (TypeError, KeyError, ValueError, OSError):
        return None


class _Audit:
    """One audit under way: which chunks of which tier are there, and the loop that fills the gaps."""

    def __init__(self, run: RunFolder, pool: WorkerPool, evaluation: Evaluation, base: Subject, progress: Progress,
                 write: Writer, step: str, keep_parts: bool) -> None:
        self._run, self._pool, self._evaluation, self._base, self._progress = run, pool, evaluation, base, progress
        self._write, self._step, self._keep_parts = write, step, keep_parts
        self._elsewhere: Elsewhere | None = None

    def measure(self, tiers: Sequence[Subject], options: AuditOptions) -> dict[str, QuantkitError]:
        """Measure group by group; a group that dies is tried again tier by tier, so that the culprit is found."""
        self._elsewhere = options.elsewhere
        layout = self._layout(tiers, options)
        self._progress.note(layout.describe())
        failed: dict[str, QuantkitError] = {}
        for group in layout.groups:
            members = [tiers[i] for i in group]
            try:
                self._measure_group(members, layout)
            except (EngineCrash, EngineError, InputError) as error:
                if len(members) == 1:
                    failed[members[0].name] = error
                    continue
                self._progress.note(f"{error}; trying these tiers one by one")
                for tier in members:
                    try:
                        self._measure_group([tier], layout)
                    except (EngineCrash, EngineError, InputError) as own:
                        failed[tier.name] = own
        return failed

    def _layout(self, tiers: Sequence[Subject], options: AuditOptions) -> AuditLayout:
        if self._elsewhere is not None:
            return self._elsewhere.plan(self._pool, self._evaluation, self._base, tiers, options.memory_bytes, options.max_group,
                                        self._progress)
        return plan_layout(self._base.model, [tier.model for tier in tiers], self._evaluation.settings,
                           n_workers=len(self._pool.workers), n_chunk=len(self._evaluation.chunks),
                           memory_bytes=options.memory_bytes, scratch_bytes=free_disk_bytes(self._run.path),
                           max_group=options.max_group)

    def _measure_group(self, tiers: Sequence[Subject], layout: AuditLayout) -> None:
        """Fill the gaps of some tiers, then write their rows and summaries."""
        evaluation = self._evaluation
        with ExitStack() as stack:
            files = [stack.enter_context(self._part_file(tier)) for tier in tiers]
            missing = [int(c) for c in evaluation.chunks if any(int(c) not in file.chunks for file in files)]
            self._progress.start(self._name(tiers), len(evaluation.chunks) * len(tiers))
            self._progress.advance((len(evaluation.chunks) - len(missing)) * len(tiers))
            for i, rows in self._rows(tiers, missing, layout):
                files[i].append(rows)
                self._progress.advance()
            self._progress.finish()
        for file in files:
            if absent := [int(c) for c in evaluation.chunks if int(c) not in file.chunks]:
                raise EngineError(f"{self._name(tiers)}: expected the rows of {len(evaluation.chunks)} chunks, the workers gave "
                                  f"none of {len(absent)}, the first {absent[0]}: run again, and if it comes back, report it")
        for tier, file in zip(tiers, files, strict=True):
            self._write(tier, file.chunks)
            if not self._keep_parts:
                self._part_path(tier).unlink()

    def _rows(self, tiers: Sequence[Subject], chunks: list[int], layout: AuditLayout) -> Iterator[tuple[int, Rows]]:
        if self._elsewhere is not None:
            return self._elsewhere.rows(self._name(tiers), self._evaluation, self._base, tiers, chunks, layout, self._progress)
        return self._panels(tiers, chunks, layout) if layout.uses_panels else self._lockstep(tiers, chunks)

    def _name(self, tiers: Sequence[Subject]) -> str:
        return " ".join([self._step, *(tier.name for tier in tiers)])

    def _part_path(self, tier: Subject) -> Path:
        return part_path(self._run, self._evaluation, self._base, tier)

    def _part_file(self, tier: Subject) -> PartFile:
        return PartFile(self._part_path(tier), self._evaluation.settings.n_ctx, self._evaluation.tokens,
                        f"{self._step} {tier.name}")

    def _lockstep(self, tiers: Sequence[Subject], chunks: list[int]) -> Iterator[tuple[int, Rows]]:
        """Rows of one chunk and one tier at a time, the tier by its index."""
        if not chunks:
            return
        name, settings = self._name(tiers), self._evaluation.settings
        buffers = self._pool.broadcast(f"load {name}", open_audit, base=self._base.path, tiers=tuple(t.path for t in tiers),
                                       tier_settings=tuple(t.settings or settings for t in tiers), **self._common())
        allocated = sum(b.size_bytes for own in buffers for b in own if "Mapped" not in b.device)
        self._progress.note(f"llama.cpp allocated {format_bytes(allocated)} besides the mapped files")
        tasks = [{"chunks": task} for task in deal(chunks, len(self._pool.workers))]
        for item in self._pool.stream(name, score, tasks):
            if len(item.tiers) != len(tiers):
                raise EngineError(f"{name}: expected the rows of {len(tiers)} tiers, got those of {len(item.tiers)} from a worker "
                                  "process: run again, and if it comes back, report it")
            yield from enumerate(item.tiers)
        self._pool.broadcast("close", close_group)

    def _panels(self, tiers: Sequence[Subject], chunks: list[int], layout: AuditLayout) -> Iterator[tuple[int, Rows]]:
        n_workers = len(self._pool.workers)
        step = layout.panel_n_chunk * n_workers
        for start in range(0, len(chunks), step):
            panel = chunks[start:start + step]
            shards = [shard for i in range(n_workers) if (shard := tuple(panel[i::n_workers]))]
            self._pool.each("base rows", open_panel, [{"base": self._base.path, "chunks": shard, "folder": self._run.parts,
                                                       **self._common()} for shard in shards])
            for i, tier in enumerate(tiers):  # as many tasks as panels: each worker gets one
                task = {"path": tier.path, "settings": tier.settings}
                for item in self._pool.stream(self._name([tier]), score_panel, [task] * len(shards)):
                    yield i, item.tiers[0]
            self._pool.broadcast("close", close_group)

    def _common(self) -> dict[str, Any]:
        evaluation = self._evaluation
        return {"settings": evaluation.settings, "offload": evaluation.offload, "tokens": evaluation.tokens}


def write_tier(run: RunFolder, evaluation: Evaluation, base_sha256: str, tier: Subject, chunks: Mapping[int, Rows],
               ref: PackReference | None = None) -> None:
    """Write a tier's rows, read them back from their file and write what is computed from them.

    Args:
        chunks: the rows of every chunk of the evaluation.
        ref: the reference pack, where that stood in base's place.
    """
    rows = merge_rows(chunks, evaluation.chunks, evaluation.articles)
    audit_id = evaluation.audit_id(base_sha256, tier.sha256, ref.sha256 if ref else None)
    metadata = {"audit_id": audit_id, "eval_id": evaluation.eval_id, "base_sha256": base_sha256, "q_sha256": tier.sha256,
                "token_ids_sha256": evaluation.token_ids_sha256, **({"ref_sha256": ref.sha256} if ref else {})}
    write_parquet(run.rows(tier.name), rows, metadata)
    rows, _ = read_parquet(run.rows(tier.name))
    write_json(run.summary(tier.name), {
        "audit_id": audit_id, "rows_sha256": sha256_file(run.rows(tier.name)),
        "tier": tier.name, "file": tier.path.name, "size_bytes": tier.model.header.file_bytes, "sha256": tier.sha256,
        "base_sha256": base_sha256, "token_ids_sha256": evaluation.token_ids_sha256,
        "eval_id": evaluation.eval_id, "corpus": dataclasses.asdict(evaluation.corpus), "add_bos": evaluation.add_bos,
        "n_ctx": evaluation.settings.n_ctx, "n_chunk_total": evaluation.n_chunk_total,
        "chunks": np.unique(rows["chunk"]).tolist(), "build": dataclasses.asdict(evaluation.build),
        "offload": dataclasses.asdict(evaluation.offload), "summary": summarize(rows).to_json(),
        "base_summary": summarize(base_rows(rows)).to_json(), **({"ref": ref.to_json()} if ref else {}),
    })
