"""An open run: its lock, its workers, its inputs known by their bytes, and what is measured in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.core.errors import QuantkitError
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.audit import AuditOptions, read_summary
from quantkit.job.evaluation import (
    Evaluation,
    Subject,
    choose_offload,
    context_settings,
    default_workers,
    read_subject,
)
from quantkit.job.fit import record_base
from quantkit.job.manifest import claim_run, write_manifest
from quantkit.job.measuring import EvaluatedText, Measures, measure_tiers, prepare_texts, read_texts
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, open_run, read_json
from quantkit.job.sequential import Until
from quantkit.job.timing import TimedProgress
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What may differ between two runs without moving a number."""

    n_workers: int = 0
    drop_files: bool = False
    corpus: Path | None = None
    calibration: Path | None = None
    imatrix: Path | None = None
    offload: Offload = field(default_factory=Offload)
    audit: AuditOptions = field(default_factory=AuditOptions)
    floors: bool = False
    weights: bool = False
    until: Until | None = None

    def measures(self) -> Measures:
        """What is measured of each tier."""
        return Measures(floors=self.floors, weights=self.weights, until=self.until, audit=self.audit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to."""

    folder: RunFolder
    result_id: str | None
    failed: Mapping[str, QuantkitError]


@dataclass(slots=True, kw_only=True)
class Session:
    """An open run: the lock is held, workers are at hand, the inputs are known by their bytes."""

    run: RunFolder
    pool: WorkerPool
    protocol: Protocol
    base: Subject
    texts: list[EvaluatedText]
    progress: Progress
    options: RunOptions
    tiers: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, QuantkitError] = field(default_factory=dict)
    failed_checks: dict[str, QuantkitError] = field(default_factory=dict)
    head: Subject | None = None
    imatrix: dict[str, Any] | None = None

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation on the protocol's first text."""
        return self.texts[0].evaluation

    def measure(self, tiers: Sequence[Subject]) -> None:
        """Measure some tiers on every text."""
        self.texts, failed = measure_tiers(self.texts, self.pool, self.protocol, self.base, tiers, self.progress,
                                           self.options.measures())
        self.failed.update(failed)

    def is_measured(self, tier: str, sha256: str) -> bool:
        """Whether a tier's rows on every text stand."""
        return all(read_summary(run, evaluation, self.base.sha256, tier, sha256) is not None for run, evaluation in self.texts)

    def finish(self) -> RunResult:
        """Write the manifest of all that is measured."""
        measured = {}
        for name, record in self.tiers.items():
            if name in self.failed or not self.run.summary(name).exists():
                continue
            if not self.is_measured(name, record["sha256"]):
                self.progress.note(f"tier {name} was measured with another build or device: left out until it is measured again")
                continue
            measured[name] = record
        result_id = None
        if measured:
            result_id = write_manifest(self.run, self.protocol, self.base, self.evaluation, measured, self.imatrix,
                                       further=self.texts[1:])
        return RunResult(folder=self.run, result_id=result_id, failed={**self.failed_checks, **self.failed})


@contextmanager
def open_session(base_path: Path, protocol: Protocol, run_path: Path, progress: Progress, options: RunOptions) -> Iterator[Session]:
    """Lock the run, read and check the inputs, tokenize.

    Raises:
        InputError, GgufError, CorpusError, RunLocked: see the parts.
    """
    offload = choose_offload(protocol, options.offload)
    describe_model(read_header(base_path))  # before any hashing
    texts = read_texts(protocol, options.corpus)
    n_workers = options.n_workers or default_workers(context_settings(protocol.eval), offload)
    with open_run(run_path, protocol) as run, WorkerPool(n_workers, run.logs) as pool:
        base = read_subject(base_path, "base")
        claim_run(run, protocol, base)
        evaluated = prepare_texts(run, pool, protocol, base, texts, offload)
        timed = TimedProgress(progress)
        record_base(run, base.model, pool, timed)
        session = Session(run=run, pool=pool, protocol=protocol, base=base, texts=evaluated, progress=timed, options=options)
        held = read_json(run.manifest)
        session.tiers.update({name: _file_record(record) for name, record in (held.get("tiers") or {}).items()})
        session.imatrix = held.get("imatrix")
        try:
            yield session
        except BaseException:
            with suppress(QuantkitError, OSError):  # the first fault is the one to tell
                timed.write(run, n_workers)
            raise
        timed.write(run, n_workers)


def tier_file_name(base: Path, tier: str) -> str:
    """What a tier's file is called: the base's name without its type, and the tier's."""
    return f"{base_stem(base)}-{tier}.gguf"


def base_stem(path: Path) -> str:
    """The base's name without its type: model-BF16.gguf gives `model`."""
    stem = path.stem.split("-00001-of-")[0]
    for suffix in ("-BF16", "-bf16", ".BF16", ".bf16", "_BF16", "-F16", "-f16", ".F16", "-F32", "-f32", ".F32"):
        stem = stem.removesuffix(suffix)
    return stem.encode()[:200].decode(errors="ignore")


def _file_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record.get(key) for key in ("file", "size_bytes", "sha256", "bpw", "bpw_core", "imatrix_sha256")}
