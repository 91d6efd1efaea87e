"""Noise floors: base and each tier against themselves in other arithmetic, on a spread part of the evaluation's chunks.

    audit/<tier>/floor.json               Floor; base's own under the name `base`
    audit/<tier>/floor/<kernel>.parquet   its rows: the file in the evaluation's arithmetic as base, itself in the other as tier

Before anything else base runs beside itself in the same arithmetic on one chunk, and every row must be exactly 0: if it is not,
no number of this run says anything about a tier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.core.errors import EngineError, InputError, QuantkitError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.engine.pool import WorkerPool
from quantkit.job.audit import AuditOptions, measure_rows
from quantkit.job.evaluation import Evaluation, Subject
from quantkit.job.pairs import read_floor
from quantkit.job.parts import Rows, merge_rows, read_parquet, write_parquet
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, write_json
from quantkit.measure.articles import chunk_indices
from quantkit.measure.noise import KernelSettings, summarize_floor
from quantkit.spec.json_records import record_to_json
from quantkit.spec.protocol import Protocol
from quantkit.spec.verdict_records import Floor

BASE = "base"


def active_kernels(protocol: Protocol) -> tuple[KernelSettings, ...]:
    """The protocol's perturbations, capped at its n_batch; one that equals the evaluation perturbs nothing and is left out."""
    spec = protocol.eval
    own = (spec.flash_attn, spec.use_extra_bufts, min(spec.n_ubatch, spec.n_batch))
    kernels = [KernelSettings(kernel.name, kernel.flash_attn, kernel.use_extra_bufts, min(kernel.n_ubatch, spec.n_batch))
               for kernel in protocol.floors.kernels]
    return tuple(k for k in kernels if (k.flash_attn, k.use_extra_bufts, k.n_ubatch) != own)


def measure_floors(run: RunFolder, pool: WorkerPool, protocol: Protocol, evaluation: Evaluation, base: Subject,
                   tiers: Sequence[Subject], progress: Progress, options: AuditOptions) -> dict[str, QuantkitError]:
    """Measure the floor of base and of every tier that has none yet.

    Returns:
        The files that failed, each with its error; a tier without a floor is still measured.

    Raises:
        EngineError: base is not exactly itself in its own arithmetic.
        InputError: a tier is called `base`.
    """
    if any(tier.name == BASE for tier in tiers):
        raise InputError(f"expected tiers with other names than {BASE!r} where noise floors are measured, got one: that is the "
                         "base's own folder; rename the file")
    job = _Floors(run, pool, _part(protocol, evaluation), active_kernels(protocol), progress, options)
    failed: dict[str, QuantkitError] = {}
    for subject in (dataclasses.replace(base, name=BASE), *tiers):
        if job.is_measured(subject):
            progress.note(f"floor {subject.name}: measured already")
            continue
        if subject.name == BASE:
            job.check_zero(subject)
        failed |= job.measure(subject)
    return failed


def _part(protocol: Protocol, evaluation: Evaluation) -> Evaluation:
    """The evaluation on the floors' chunks only."""
    n, total = protocol.floors.n_chunk, len(evaluation.chunks)
    if n == 0 or n >= total or total < 2:
        return evaluation
    keep = chunk_indices("spread", n, total)
    return dataclasses.replace(evaluation, chunks=evaluation.chunks[keep], articles=evaluation.articles[keep])


@dataclass(frozen=True, slots=True)
class _Floors:
    """The floors of one run under way. `evaluation` holds their chunks only."""

    run: RunFolder
    pool: WorkerPool
    evaluation: Evaluation
    kernels: tuple[KernelSettings, ...]
    progress: Progress
    options: AuditOptions

    def floor_id(self, subject: Subject) -> str:
        """Of everything that a floor depends on."""
        return sha256_json({"audit_id": self.evaluation.audit_id(subject.sha256, subject.sha256),
                            "chunks": self.evaluation.chunks.tolist(), "kernels": [list(kernel) for kernel in self.kernels]})

    def is_measured(self, subject: Subject) -> bool:
        """Whether the floor stands and its rows are those that it was made of."""
        held = read_floor(self.run, subject.name)
        if held is None or held.floor_id != self.floor_id(subject):
            return False
        paths = {kernel.rows_sha256: self.run.floor_rows(subject.name, kernel.kernel) for kernel in held.kernels}
        return all(path.exists() and sha256_file(path) == sha256 for sha256, path in paths.items())

    def check_zero(self, base: Subject) -> None:
        """Base beside itself in the same arithmetic.

        Raises:
            EngineError: a row of it is not exactly 0; or the engine failed.
        """
        one = dataclasses.replace(self.evaluation, chunks=self.evaluation.chunks[:1], articles=self.evaluation.articles[:1])

        def check(tier: Subject, chunks: Mapping[int, Rows]) -> None:
            for rows in chunks.values():
                wrong = np.flatnonzero(rows["kld"] != 0.0)
                if len(wrong):
                    row = rows[wrong[0]]
                    raise EngineError("expected base against itself in the same arithmetic to be exactly 0, got a KLD of "
                                      f"{row['kld']} at chunk {row['chunk']} position {row['pos']}: this build does not give the "
                                      "same logits twice, so its numbers cannot be compared; use another build or device")

        same = dataclasses.replace(base, name="same", settings=self.evaluation.settings)
        failed = measure_rows(self.run, self.pool, one, base, [same], self.progress, self.options, check, step="floor base:")
        for error in failed.values():
            raise error

    def measure(self, subject: Subject) -> dict[str, QuantkitError]:
        """One file in every other arithmetic beside itself."""
        members = [dataclasses.replace(subject, name=kernel.name, settings=dataclasses.replace(
            self.evaluation.settings, flash_attn=kernel.flash_attn == "on", use_extra_bufts=kernel.use_extra_bufts,
            n_ubatch=kernel.n_ubatch)) for kernel in self.kernels]

        def write(member: Subject, chunks: Mapping[int, Rows]) -> None:
            rows = merge_rows(chunks, self.evaluation.chunks, self.evaluation.articles)
            write_parquet(self.run.floor_rows(subject.name, member.name), rows, {"floor_id": self.floor_id(subject)})

        failed = measure_rows(self.run, self.pool, self.evaluation, subject, members, self.progress, self.options, write,
                              step=f"floor {subject.name}:")
        if failed:
            return {f"floor of {subject.name}, {name}": error for name, error in failed.items()}
        self._write(subject)
        return {}

    def _write(self, subject: Subject) -> None:
        kernels = []
        for kernel in self.kernels:
            path = self.run.floor_rows(subject.name, kernel.name)
            kernels.append(summarize_floor(read_parquet(path)[0], kernel, sha256_file(path)))
        articles = np.unique(self.evaluation.articles)
        n_scored = len(self.evaluation.chunks) * (self.evaluation.settings.n_ctx - 1 - self.evaluation.settings.n_ctx // 2)
        floor = Floor(floor_id=self.floor_id(subject), name=subject.name, sha256=subject.sha256, n_scored=n_scored,
                      chunks=tuple(self.evaluation.chunks.tolist()), n_article=len(articles), kernels=tuple(kernels))
        write_json(self.run.floor(subject.name), record_to_json(floor))
