"""Audit files against a reference pack: no file of the base, no pass of it, the same run directory and the same tables."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineCrash, EngineError, InputError, QuantkitError
from quantkit.core.files import sha256_file
from quantkit.core.units import format_bytes
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import close_group, read_build
from quantkit.engine.pool import WorkerPool
from quantkit.engine.refpack import PackedRows, open_pack_audit, score_pack
from quantkit.engine.settings import Offload
from quantkit.job.audit import read_summary, write_tier
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import (
    Evaluation,
    Subject,
    check_same_text,
    choose_offload,
    context_settings,
    default_workers,
    only_corpus,
    read_subject,
)
from quantkit.job.manifest import claim_run, write_manifest
from quantkit.job.memory import bound_of_one
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.progress import Progress
from quantkit.job.refpack_parts import ChunkFolder
from quantkit.job.rundir import RunFolder, open_run, read_json, write_json
from quantkit.job.session import RunOptions, RunResult
from quantkit.job.timing import TimedProgress
from quantkit.measure.articles import chunk_indices
from quantkit.measure.refpack import Shortfall, estimate_shortfall
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Corpus, Protocol
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.refpack_file import Refpack
from quantkit.spec.refpack_records import PackReference

_CHUNKS_A_TASK = 4
_RECORD = ("file", "size_bytes", "sha256", "bpw", "bpw_core", "imatrix_sha256")
Floats = npt.NDArray[np.float64]


def audit_with_pack(pack_path: Path, protocol: Protocol, run_path: Path, files: Sequence[Path], progress: Progress,
                    options: RunOptions = RunOptions(), *, base: Path | None = None) -> RunResult:  # noqa: B008 - frozen
    """Measure files against a reference pack, into a run directory of its base and protocol, new or old.

    A tier that is measured there already, against the base itself or this pack, is left as it is.

    Args:
        base: the base's file, where it is at hand: the pack must be of it.

    Returns:
        The run's folder, its result id, and the files that failed with their errors.

    Raises:
        InputError: the pack is damaged, or of another protocol, base or text; names what differs.
    """
    models = [describe_model(read_header(file)) for file in files]
    pack = open_for(pack_path, protocol)
    if base is not None and (found := read_subject(base, "base").sha256) != pack.facts.base.sha256:
        raise InputError(f"{pack_path} is the reference pack of another base: expected sha256 {found} for {base}, found "
                         f"{pack.facts.base.sha256} ({pack.facts.base.file}): use the pack of this base, or leave -b away")
    corpus = only_corpus(protocol)
    text = read_corpus(corpus, options.corpus)
    offload = choose_offload(protocol, options.offload)
    n_workers = options.n_workers or default_workers(context_settings(protocol.eval), offload)
    with open_run(run_path, protocol) as run, WorkerPool(n_workers, run.logs) as pool:
        claim_run(run, protocol, pack.facts.base)
        build = pool.call("build", read_build, n_gpu_layers=offload.n_gpu_layers)
        evaluation = evaluation_of(pack, protocol, corpus, text, offload, build)
        bound = max(bound_of_one(model, evaluation.settings, n_workers=n_workers) for model in models)
        progress.note(f"{n_workers} workers, one file after another, memory at most {format_bytes(bound)}")
        timed = TimedProgress(progress)
        job = _PackAudit(run, pool, evaluation, pack, timed)
        try:
            for file in files:
                job.measure(read_subject(file, file.stem))
        finally:
            timed.write(run, n_workers)
        return job.finish(protocol)


def open_for(path: Path, protocol: Protocol) -> Refpack:
    """Open a pack that a protocol can use.

    Raises:
        InputError: it is damaged, or its eval_id or its chunks are not the protocol's.
    """
    pack = Refpack(path)
    facts = pack.facts
    if facts.eval_id != protocol.eval_id:
        raise InputError(f"{path} is a reference pack of another evaluation: expected eval_id {protocol.eval_id} of protocol "
                         f"{protocol.name}, found {facts.eval_id} of {facts.protocol_name}: use the protocol that it was made with")
    chunks = chunk_indices(protocol.eval.chunks, protocol.eval.n_chunk, facts.n_chunk_total)
    if facts.n_ctx != protocol.eval.n_ctx or not np.array_equal(chunks, pack.content.chunks):
        raise InputError(f"{path} does not hold the chunks that protocol {protocol.name} names, though it says so: make it anew")
    return pack


def shortfall_of(whole: Mapping[str, Any]) -> Shortfall:
    """The shortfall from what a tier's shortfall.json holds."""
    return estimate_shortfall(whole["mean_tail_mass"], np.array(whole["tail_mass"], np.float64),
                              np.array(whole["tail_kld"], np.float64))


def evaluation_of(pack: Refpack, protocol: Protocol, corpus: Corpus, text: bytes, offload: Offload,
                  build: BuildFacts) -> Evaluation:
    """The text as the pack's base saw it, for tiers that run here.

    Raises:
        InputError: the pack was made of another text.
    """
    facts, content = pack.facts, pack.content
    if facts.corpus_sha256 != hashlib.sha256(text).hexdigest():
        raise InputError(f"{pack.path} is a reference pack of another text: expected sha256 {corpus.sha256} ({corpus.name}), found "
                         f"{facts.corpus_sha256} ({facts.corpus_name})")
    return Evaluation(
        eval_id=protocol.eval_id, corpus=corpus, text=text, settings=context_settings(protocol.eval), offload=offload,
        tokens=content.tokens, token_ids_sha256=facts.token_ids_sha256, add_bos=facts.add_bos, n_chunk_total=facts.n_chunk_total,
        chunks=content.chunks.astype(np.int64), articles=content.articles, build=build)


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
    tasks = [{"chunks": tuple(chunks[i:i + _CHUNKS_A_TASK])} for i in range(0, len(chunks), _CHUNKS_A_TASK)]
    yield from pool.stream(f"audit {tier.name}", score_pack, tasks)
    pool.broadcast("close", close_group)


class _PackAudit:
    """An audit against a pack under way, tier by tier."""

    def __init__(self, run: RunFolder, pool: WorkerPool, evaluation: Evaluation, pack: Refpack, progress: Progress) -> None:
        self._run, self._pool, self._evaluation, self._pack, self._progress = run, pool, evaluation, pack, progress
        self._pack_sha256 = sha256_file(pack.path)
        held: Mapping[str, Any] = read_json(run.manifest)
        self._imatrix = held.get("imatrix")
        self._tiers = {name: {key: record.get(key) for key in _RECORD} for name, record in (held.get("tiers") or {}).items()}
        self._failed: dict[str, QuantkitError] = {}
        self._check_same_base()

    def _check_same_base(self) -> None:
        """Base's columns are the same in every tier of a run, so a pack from other arithmetic does not go beside them."""
        evaluation, base_sha256 = self._evaluation, self._pack.facts.base.sha256
        for name, record in self._tiers.items():
            if read_summary(self._run, evaluation, base_sha256, name, record["sha256"]) is None:
                continue
            rows, _ = read_parquet(self._run.rows(name))
            if not np.array_equal(rows["nll_base"], self._pack.content.rows["nll"].ravel()):
                raise InputError(f"{self._pack.path} holds other answers of the base than the run {self._run.path}, in which tier "
                                 f"{name} was measured: base ran on another build or device; choose another run directory")
            return

    def measure(self, subject: Subject) -> None:
        """Measure one file; a failure is kept and leaves the others whole."""
        tier = dataclasses.replace(subject, name=self._free_name(subject))
        known = self._tiers.setdefault(tier.name, dict.fromkeys(_RECORD))
        known.update(file=tier.path.name, size_bytes=tier.model.header.file_bytes, sha256=tier.sha256, bpw=tier.model.bpw,
                     bpw_core=tier.model.bpw_core)
        if self._is_measured(tier):
            self._progress.note(f"audit {tier.name}: measured already")
            return
        try:
            check_same_text(self._pool, self._evaluation, None, tier)
            self._score(tier)
        except (InputError, EngineCrash, EngineError) as error:
            self._failed[tier.name] = error

    def finish(self, protocol: Protocol) -> RunResult:
        """Write the manifest of all that is measured in the run, this way or the other."""
        base = self._pack.facts.base
        measured = {name: record for name, record in self._tiers.items() if name not in self._failed
                    and read_summary(self._run, self._evaluation, base.sha256, name, record["sha256"]) is not None}
        for name in sorted(set(self._tiers) - set(measured) - set(self._failed)):
            self._progress.note(f"tier {name} was measured with another build or device: left out until it is measured again")
        result_id = None
        if measured:
            result_id = write_manifest(self._run, protocol, base, self._evaluation, measured, self._imatrix)
        return RunResult(folder=self._run, result_id=result_id, failed=self._failed)

    def _free_name(self, subject: Subject) -> str:
        """The file's stem; with a piece of its hash where another file of that name is in the run already."""
        held = self._tiers.get(subject.name)
        return subject.name if held is None or held["sha256"] == subject.sha256 else f"{subject.name}-{subject.sha256[:8]}"

    def _is_measured(self, tier: Subject) -> bool:
        evaluation, base_sha256 = self._evaluation, self._pack.facts.base.sha256
        if read_summary(self._run, evaluation, base_sha256, tier.name, tier.sha256) is None:
            return False
        ref = read_json(self._run.summary(tier.name)).get("ref")
        return ref is None or ref["sha256"] == self._pack_sha256

    def _score(self, tier: Subject) -> None:
        """Fill the gaps of one tier, then write its rows and its summary."""
        evaluation = self._evaluation
        audit_id = evaluation.audit_id(self._pack.facts.base.sha256, tier.sha256, self._pack_sha256)
        folder = self._run.parts / "refpack" / audit_id
        parts = ChunkFolder(folder, 2)
        chunks = [int(chunk) for chunk in evaluation.chunks]
        missing = parts.missing(chunks)
        self._progress.start(f"audit {tier.name}", len(chunks))
        self._progress.advance(len(chunks) - len(missing))
        for item in packed_rows(self._pool, evaluation, self._pack.path, tier, missing):
            parts.save(item.chunk, (item.rows.tobytes(), item.tail_kld.tobytes()))
            self._progress.advance()
        self._progress.finish()
        held = {chunk: parts.load(chunk) or [] for chunk in chunks}
        rows: dict[int, Rows] = {chunk: np.frombuffer(data[0], ROW_DTYPE) for chunk, data in held.items()}
        tail_kld = np.stack([np.frombuffer(held[chunk][1], np.float64) for chunk in chunks])
        whole = self._whole_rows(tail_kld)
        write_json(self._run.shortfall(tier.name), whole)
        write_tier(self._run, evaluation, self._pack.facts.base.sha256, tier, rows, self._reference(whole))
        shutil.rmtree(folder)

    def _reference(self, whole: Mapping[str, Any]) -> PackReference:
        """What the tier's summary says of the pack, and of how far its KLD falls short."""
        facts, evaluation = self._pack.facts, self._evaluation
        shortfall = shortfall_of(whole)
        here = dataclasses.asdict(evaluation.build) | dataclasses.asdict(evaluation.offload)
        return PackReference(
            kind="pack", file=self._pack.path.name, sha256=self._pack_sha256, mass=facts.mass, max_ids=facts.max_ids,
            tail_mass=whole["mean_tail_mass"], backend=facts.arithmetic.backend,
            same_arithmetic=here == dataclasses.asdict(facts.arithmetic), n_full=shortfall.n_full, shortfall=shortfall.value,
            shortfall_se=shortfall.se)

    def _whole_rows(self, tail_kld: Floats) -> dict[str, Any]:
        """What the shortfall is estimated from: column by column, rows that the pack keeps whole."""
        n_ctx, content = self._evaluation.settings.n_ctx, self._pack.content
        i, j = np.nonzero(np.isfinite(tail_kld))
        return {"mean_tail_mass": float(content.rows["tail_mass"].mean()), "chunk": content.chunks[i].tolist(),
                "pos": (j + n_ctx // 2).tolist(), "tail_mass": content.rows["tail_mass"][i, j].tolist(),
                "tail_kld": tail_kld[i, j].tolist()}
