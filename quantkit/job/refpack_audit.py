"""Audit files against a reference pack: no file of the base, no pass of it, the same run directory and the same tables."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineCrash, EngineError, InputError, QuantkitError
from quantkit.core.units import format_bytes
from quantkit.engine.chat_text import render_chat
from quantkit.engine.lockstep import close_group, read_build
from quantkit.engine.pool import WorkerPool
from quantkit.engine.refpack import PackedRows, open_pack_audit, score_pack
from quantkit.job.answers import check_packed
from quantkit.job.audit import read_summary, write_tier
from quantkit.job.deal import deal
from quantkit.job.evaluation import (
    Evaluation,
    Subject,
    check_same_text,
    choose_offload,
    context_settings,
    default_workers,
    read_subject,
)
from quantkit.job.manifest import claim_run, write_manifest
from quantkit.job.measuring import read_texts
from quantkit.job.memory import bound_of_one
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.progress import Progress
from quantkit.job.refpack_parts import ChunkFolder
from quantkit.job.refpack_texts import TextPack, check_base, check_one_base, evaluated_chunks, evaluation_of, open_packs
from quantkit.job.rundir import RunFolder, open_run, read_json, write_json
from quantkit.job.session import RunOptions, RunResult
from quantkit.job.source import keep_source
from quantkit.job.timing import TimedProgress
from quantkit.measure.refpack import Shortfall, estimate_shortfall
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Protocol
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.refpack_records import PackReference

_RECORD = ("file", "size_bytes", "sha256", "bpw", "bpw_core", "imatrix_sha256")
Floats = npt.NDArray[np.float64]


def audit_with_packs(packs: Sequence[Path], protocol: Protocol, run_path: Path, files: Sequence[Path], progress: Progress,
                     options: RunOptions = RunOptions(), *, base: Path | None = None) -> RunResult:  # noqa: B008 - frozen
    """Measure files against reference packs, into a run directory of their base and protocol, new or old.

    A tier that is measured there already, against the base itself or these packs, is left as it is.

    Args:
        packs: one for each text of the protocol, in any order.
        base: the base's file, where it is at hand: the packs must be of it.

    Returns:
        The run's folder, its result id, and the files that failed with their errors.

    Raises:
        InputError: a pack is damaged, or of another protocol, base or text; names what differs.
    """
    models = [describe_model(read_header(file)) for file in files]
    opened = open_packs(packs, protocol, protocol.eval.corpora)
    check_one_base(opened)
    chunks = [evaluated_chunks(text, protocol) for text in opened]
    if base is not None:
        check_base(opened, base, read_subject(base, "base").sha256)
    texts = read_texts(protocol, options.corpus)
    offload = choose_offload(protocol, options.offload)
    n_workers = options.n_workers or default_workers(context_settings(protocol.eval), offload)
    with open_run(run_path, protocol) as run, WorkerPool(n_workers, run.logs) as pool:
        claim_run(run, protocol, opened[0].pack.facts.base)
        build = pool.call("build", read_build, n_gpu_layers=offload.n_gpu_layers)
        audited = [AuditedText(run=dataclasses.replace(run, corpus=text.corpus.name if i else ""), text=text,
                               evaluation=evaluation_of(text, protocol, data, offload, build, own))
                   for i, (text, data, own) in enumerate(zip(opened, texts, chunks, strict=True))]
        bound = max(bound_of_one(model, audited[0].evaluation.settings, n_workers=n_workers) for model in models)
        progress.note(f"{n_workers} workers, one file after another, memory at most {format_bytes(bound)}")
        timed = TimedProgress(progress)
        job = _PackAudit(audited, pool, timed)
        try:
            for file in files:
                job.measure(read_subject(file, file.stem))
        finally:
            timed.write(run, n_workers)
        return job.finish(protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedText:
    """One text of an audit against packs: where its results lie, its pack, and its chunks as base saw them."""

    run: RunFolder
    text: TextPack
    evaluation: Evaluation

    @property
    def base_rows(self) -> npt.NDArray[np.void]:
        """What the pack has of base in the evaluation's chunks, (n_chunk, n_scored) of PACK_ROW_DTYPE."""
        return self.text.pack.content.rows[self.text.places(self.evaluation.chunks, "the evaluation")]

    def parts(self, tier: Subject) -> Path:
        """Where a tier's chunks gather while they are scored."""
        audit_id = self.evaluation.audit_id(self.text.pack.facts.base.sha256, tier.sha256, self.text.sha256)
        return self.run.parts / "refpack" / audit_id

    def reference(self, whole: Mapping[str, Any]) -> PackReference:
        """What a tier's summary says of the pack, and of how far its KLD falls short."""
        facts, evaluation = self.text.pack.facts, self.evaluation
        shortfall = shortfall_of(whole)
        return PackReference(
            kind="pack", file=self.text.pack.path.name, sha256=self.text.sha256, mass=facts.mass, max_ids=facts.max_ids,
            tail_mass=whole["mean_tail_mass"], backend=facts.arithmetic.backend,
            same_arithmetic=self.text.same_arithmetic(evaluation.build, evaluation.offload), n_full=shortfall.n_full,
            shortfall=shortfall.value, shortfall_se=shortfall.se)

    def whole_rows(self, tail_kld: Floats) -> dict[str, Any]:
        """What the shortfall is estimated from: column by column, rows that the pack keeps whole."""
        n_ctx, tail_mass = self.evaluation.settings.n_ctx, self.base_rows["tail_mass"]
        i, j = np.nonzero(np.isfinite(tail_kld))
        return {"mean_tail_mass": float(tail_mass.mean()), "chunk": self.evaluation.chunks[i].tolist(),
                "pos": (j + n_ctx // 2).tolist(), "tail_mass": tail_mass[i, j].tolist(), "tail_kld": tail_kld[i, j].tolist()}


def shortfall_of(whole: Mapping[str, Any]) -> Shortfall:
    """The shortfall from what a tier's shortfall.json holds."""
    return estimate_shortfall(whole["mean_tail_mass"], np.array(whole["tail_mass"], np.float64),
                              np.array(whole["tail_kld"], np.float64))


def packed_rows(pool: WorkerPool, evaluation: Evaluation, pack: Path, tier: Subject, chunks: Sequence[int]) -> Iterator[PackedRows]:
    """A tier's rows of some chunks against a pack, as workers finish them: for whatever needs rows and has no base.

    Raises:
        InputError: the pack's rows are damaged, or its vocabulary is not the tier's.
        EngineError, EngineCrash: the tier cannot be run.
    """
    if not chunks:
        return
    pool.broadcast(f"load {tier.name}", open_pack_audit, path=tier.path, settings=evaluation.settings, offload=evaluation.offload,
                   pack=pack)
    tasks = [{"chunks": task} for task in deal(chunks, len(pool.workers))]
    yield from pool.stream(f"audit {tier.name}", score_pack, tasks)
    pool.broadcast("close", close_group)


def score_tier(pool: WorkerPool, audited: AuditedText, tier: Subject, progress: Progress) -> tuple[dict[int, Rows], Floats]:
    """A tier's rows of every chunk of a text, and what kld falls short by, (n_chunk, n_scored) with NaN in rows not kept whole.

    Part files let a killed audit go on; they are left to be removed when the rows are written.
    """
    evaluation, text = audited.evaluation, audited.text
    parts = ChunkFolder(audited.parts(tier), 2)
    chunks = [int(chunk) for chunk in evaluation.chunks]
    missing = parts.missing(chunks)
    progress.start(f"audit {tier.name}", len(chunks))
    progress.advance(len(chunks) - len(missing))
    for item in packed_rows(pool, evaluation, text.pack.path, tier, missing):
        check_packed(f"audit {tier.name}", item.rows, item.tail_kld, missing)
        parts.save(item.chunk, (item.rows.tobytes(), item.tail_kld.tobytes()))
        progress.advance()
    progress.finish()
    held = {chunk: parts.load(chunk) or [] for chunk in chunks}
    rows: dict[int, Rows] = {chunk: np.frombuffer(data[0], ROW_DTYPE) for chunk, data in held.items()}
    tail_kld = np.stack([np.frombuffer(held[chunk][1], np.float64) for chunk in chunks])
    return rows, tail_kld


def check_tokens(pool: WorkerPool, evaluation: Evaluation, tier: Subject) -> None:
    """Tokenize the text with a tier's own vocabulary and compare; conversations through the tier's own chat template.

    Raises:
        InputError: the tier's tokens differ; says where.
    """
    if evaluation.corpus.format == "chat":
        text, _ = pool.call(f"chat template {tier.name}", render_chat, path=tier.path, text=evaluation.text)
        evaluation = dataclasses.replace(evaluation, text=text)
    check_same_text(pool, evaluation, None, tier)


class _PackAudit:
    """An audit against packs under way, tier by tier and text by text."""

    def __init__(self, texts: Sequence[AuditedText], pool: WorkerPool, progress: Progress) -> None:
        self._texts, self._pool, self._progress = texts, pool, progress
        self._run, self._base = texts[0].run, texts[0].text.pack.facts.base
        held: Mapping[str, Any] = read_json(self._run.manifest)
        self._imatrix = held.get("imatrix")
        self._tiers = {name: {key: record.get(key) for key in _RECORD} for name, record in (held.get("tiers") or {}).items()}
        self._failed: dict[str, QuantkitError] = {}
        for audited in texts:
            self._check_same_base(audited)

    def _check_same_base(self, audited: AuditedText) -> None:
        """Base's columns are the same in every tier of a run, so a pack from other arithmetic does not go beside them."""
        for name, record in self._tiers.items():
            if read_summary(audited.run, audited.evaluation, self._base.sha256, name, record["sha256"]) is None:
                continue
            rows, _ = read_parquet(audited.run.rows(name))
            if not np.array_equal(rows["nll_base"], audited.base_rows["nll"].ravel()):
                raise InputError(f"{audited.text.pack.path} holds other answers of the base than the run {self._run.path}, in "
                                 f"which tier {name} was measured: base ran on another build or device; choose another run "
                                 "directory")
            return

    def measure(self, subject: Subject) -> None:
        """Measure one file; a failure is kept and leaves the others whole."""
        tier = dataclasses.replace(subject, name=self._free_name(subject))
        known = self._tiers.setdefault(tier.name, dict.fromkeys(_RECORD))
        known.update(file=tier.path.name, size_bytes=tier.model.header.file_bytes, sha256=tier.sha256, bpw=tier.model.bpw,
                     bpw_core=tier.model.bpw_core)
        keep_source(self._run, tier)
        missing = [audited for audited in self._texts if not self._is_measured(audited, tier)]
        if not missing:
            self._progress.note(f"audit {tier.name}: measured already")
        try:
            for audited in missing:
                check_tokens(self._pool, audited.evaluation, tier)
            for audited in missing:
                rows, tail_kld = score_tier(self._pool, audited, tier, self._progress)
                whole = audited.whole_rows(tail_kld)
                write_json(audited.run.shortfall(tier.name), whole)
                write_tier(audited.run, audited.evaluation, self._base.sha256, tier, rows, audited.reference(whole))
                shutil.rmtree(audited.parts(tier))
        except (InputError, EngineCrash, EngineError) as error:
            self._failed[tier.name] = error

    def finish(self, protocol: Protocol) -> RunResult:
        """Write the manifest of all that is measured in the run, this way or the other."""
        measured = {name: record for name, record in self._tiers.items() if name not in self._failed
                    and all(read_summary(audited.run, audited.evaluation, self._base.sha256, name, record["sha256"]) is not None
                            for audited in self._texts)}
        for name in sorted(set(self._tiers) - set(measured) - set(self._failed)):
            self._progress.note(f"tier {name} was measured with another build or device: left out until it is measured again")
        result_id = None
        if measured:
            result_id = write_manifest(self._run, protocol, self._base, self._texts[0].evaluation, measured, self._imatrix,
                                       further=[(audited.run, audited.evaluation) for audited in self._texts[1:]])
        return RunResult(folder=self._run, result_id=result_id, failed=self._failed)

    def _free_name(self, subject: Subject) -> str:
        """The file's stem; with a piece of its hash where another file of that name is in the run already."""
        held = self._tiers.get(subject.name)
        return subject.name if held is None or held["sha256"] == subject.sha256 else f"{subject.name}-{subject.sha256[:8]}"

    def _is_measured(self, audited: AuditedText, tier: Subject) -> bool:
        if read_summary(audited.run, audited.evaluation, self._base.sha256, tier.name, tier.sha256) is None:
            return False
        ref = read_json(audited.run.summary(tier.name)).get("ref")
        return ref is None or ref["sha256"] == audited.text.sha256
