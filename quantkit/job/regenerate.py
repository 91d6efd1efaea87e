"""`verify --regenerate` and `--remeasure`: with the base at hand, make a bundle's files and rows again, and compare.

    regenerate   every tier from the base, by the recorded plan and importance matrix: equal bytes with the build that made it;
                 with another one, which tensors differ and by how much
    remeasure    some random chunks of the evaluation, decoded again: equal rows with the build that measured them; with
                 another one, the largest differences

    relative difference of a tensor = sqrt( Σ (a − b)² / Σ b² )    a made here, b published, both dequantized; 0 is equal

With the same build any difference is a failure. With another one a tensor fails that differs by more than its type may differ
from the base, and rows are told and left to the reader: KLD belongs to file and arithmetic.
Work goes on in parts/verify of the run directory, which is not part of the bundle, and is removed again.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError, QuantkitError
from quantkit.core.files import FolderLock, sha256_file
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import read_build
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.audit import AuditOptions, audit
from quantkit.job.compare_files import TensorDifference, compare_tensors
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import Subject, context_settings, default_workers, prepare_evaluation, read_subject
from quantkit.job.foreign import read_imatrix
from quantkit.job.mtp_ladder import write_tier
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.plans import resolve_tier
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances, prepare_importances, quantize_tier
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.tensor_check import ERROR_BOUNDS
from quantkit.job.verify_findings import Findings
from quantkit.spec.gguf_header import read_header
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import Protocol, load_protocol

_BUILD = ("backend", "llama_cpp_python", "llama_cpp_commit", "system_info")
BOUND_ROUNDING = 1e-4  # of √kld: a hundred times what the rounding of a pack's weights leaves
_WORST_BOUND = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckOptions:
    """What to do again. `tiers` None means all; `seed` chooses the `n_remeasure` chunks; the rest moves no number."""

    regenerate: bool
    n_remeasure: int
    seed: int
    tiers: tuple[str, ...] | None = None
    n_workers: int = 0
    memory_bytes: int | None = None
    corpus: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegeneratedTier:
    """A tier made again. `differences`: its tensors that differ from the published file's; None where the bundle lacks that."""

    tier: str
    identical: bool
    differences: tuple[TensorDifference, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemeasuredTier:
    """A tier measured again on some chunks: rows, how many are not the same bits, the largest differences (nats), mean KLDs."""

    tier: str
    chunks: tuple[int, ...]
    n_rows: int
    n_rows_differ: int
    max_nll_base_difference: float
    max_nll_q_difference: float
    max_kld_difference: float
    n_top1_q_differ: int
    kld_recorded: float
    kld_found: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rechecked:
    """What came out. `same_build` says whether equal bits were to be expected."""

    same_build: bool
    regenerated: tuple[RegeneratedTier, ...]
    remeasured: tuple[RemeasuredTier, ...]


def recheck(folder: Path, base_path: Path, options: RecheckOptions, findings: Findings, progress: Progress) -> Rechecked:
    """Make a bundle's files or rows again. The bundle has passed `verify_bundle`.

    Args:
        findings: gets the failures, and what could not be done.

    Raises:
        InputError: another base than the bundle's, or a tier that it does not have.
        EngineError, EngineCrash, NoSpace: this machine cannot do it.
    """
    run = RunFolder(path=folder)
    facts, protocol = read_json(run.manifest), load_protocol(run.protocol)
    tiers = choose_tiers(facts["tiers"], options.tiers)
    base = read_subject(base_path, "base")
    if base.sha256 != facts["base"]["sha256"]:
        raise InputError(f"expected the base of {folder}, {facts['base']['file']} with sha256 {facts['base']['sha256']}, got "
                         f"{base_path} with sha256 {base.sha256}: give the file that the bundle was made of")
    build = facts["build"]
    offload = Offload(n_gpu_layers=build["n_gpu_layers"], main_gpu=build["main_gpu"], tensor_split=tuple(build["tensor_split"]))
    n_workers = options.n_workers or default_workers(context_settings(protocol.eval), offload)
    with scratch_run(run) as scratch, WorkerPool(n_workers, run.logs) as pool:
        _, other = other_build(pool, build)
        job = _Recheck(run, scratch, pool, protocol, base, facts, tiers, findings, progress, same_build=not other)
        made, regenerated = job.regenerate(keep=options.n_remeasure > 0) if options.regenerate else ({}, ())
        remeasured = job.remeasure(made, offload, options) if options.n_remeasure else ()
    for check in ("regenerated tiers", "remeasured rows"):
        if other and findings.has_check(check):
            findings.note(check, f"another build, so other bits are to be expected: {'; '.join(other)}")
    return Rechecked(same_build=not other, regenerated=regenerated, remeasured=remeasured)


def other_build(pool: WorkerPool, build: Mapping[str, Any]) -> tuple[BuildFacts, list[str]]:
    """This machine's build, and in which facts it is not a bundle's; equal bits are to be expected where there is none."""
    facts: BuildFacts = pool.call("build", read_build, n_gpu_layers=build["n_gpu_layers"])
    here = dataclasses.asdict(facts)
    return facts, [f"{key} {here[key]} here, {build[key]} there" for key in _BUILD if here[key] != build[key]]


def choose_chunks(run: RunFolder, chunks: npt.NDArray[np.int64], tier: str, options: RecheckOptions) -> npt.NDArray[np.int64]:
    """Places of the random chunks among the evaluation's; of a screening, which stops before the end, among those measured."""
    measured = np.flatnonzero(np.isin(chunks, read_json(run.summary(tier))["chunks"]))
    n = min(options.n_remeasure, len(measured))
    return np.sort(np.random.default_rng(options.seed).choice(measured, n, replace=False))


def choose_tiers(tiers: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The records of some tiers of a bundle, or of all; raises InputError for one that it does not have."""
    if unknown := [name for name in names or () if name not in tiers]:
        raise InputError(f"expected a tier of the bundle ({', '.join(tiers)}), got {unknown[0]}: name one of them")
    return {tier: record for tier, record in tiers.items() if names is None or tier in names}


@contextmanager
def scratch_run(run: RunFolder) -> Iterator[RunFolder]:
    """A run directory inside the run's own scratch, empty; the lock keeps a run that goes on out of it."""
    folder = run.parts / "verify"
    with FolderLock(run.path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)  # its free space is asked for before anything is written
        try:
            yield RunFolder(path=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Recheck:
    """One recheck under way."""

    def __init__(self, run: RunFolder, scratch: RunFolder, pool: WorkerPool, protocol: Protocol, base: Subject,
                 facts: Mapping[str, Any], tiers: Mapping[str, Any], findings: Findings, progress: Progress, *,
                 same_build: bool) -> None:
        self._run, self._scratch, self._pool, self._protocol, self._base = run, scratch, pool, protocol, base
        self._facts, self._tiers, self._findings, self._progress = facts, tiers, findings, progress
        self._same_build = same_build

    def regenerate(self, *, keep: bool) -> tuple[dict[str, Path], tuple[RegeneratedTier, ...]]:
        """Every tier that came with a plan, made again, and how it compares; kept where it is equal and the bundle lacks it."""
        findings, made, out = self._findings, {}, []
        findings.count("regenerated tiers", 0)
        if self._protocol.plan.mtp_mode == "separate":
            findings.note("regenerated tiers", "the head's own file is held by its hash alone")
        for tier, record in self._tiers.items():
            if record["plan_sha256"] is None:
                findings.note("regenerated tiers", f"{tier} came without a plan")
                continue
            name = f"quants/{record['file']}"
            findings.count("regenerated tiers")
            target = self._scratch.path / name
            with findings.reading("regenerated tiers", name, f"tier {tier} made again from the base"):
                self._quantize(tier, record, target)
                result = self._compare(tier, record, name, target)
                out.append(result)
                if keep and result.identical and not (self._run.path / name).exists():
                    made[tier] = target
            if tier not in made:
                target.unlink(missing_ok=True)
        return made, tuple(out)

    def _quantize(self, tier: str, record: Mapping[str, Any], target: Path) -> None:
        plan = Plan.from_json(read_json(self._run.plan(tier)))
        importances, lengths = self._importances(record, plan)
        self._check_plan(plan, lengths)
        write_tier(self._scratch, self._protocol, self._base, tier, target, lambda path: quantize_tier(
            self._pool, self._base.model, plan, path, importances, self._progress, force=True))

    def _importances(self, record: Mapping[str, Any], plan: Plan) -> tuple[Importances | None, dict[str, int]]:
        if record["imatrix_sha256"] is None:
            return None, {}
        path = self._run.path / self._facts["imatrix"]["file"]
        if not path.exists():
            raise InputError(f"the bundle lacks {path.name}, the importance matrix that the tier was made with: fetch the whole "
                         "bundle")
        matrix = read_imatrix(path)
        return prepare_importances(path, matrix, sorted(plan.overrides()), self._protocol.imatrix.zero_floor), matrix.lengths()

    def _check_plan(self, plan: Plan, lengths: Mapping[str, int]) -> None:
        """The recorded plan is what the protocol comes to for this base; a stock mix may change with the library."""
        tiers = {tier.name: tier for tier in self._protocol.plan.tiers}
        if plan.tier not in tiers:
            self._findings.note("regenerated tiers", f"the protocol has no tier {plan.tier}: its plan is taken as it is")
            return
        again = resolve_tier(self._pool, self._base.model, self._protocol, tiers[plan.tier], lengths)
        if again != plan and (self._same_build or self._protocol.plan.ladder != "stock"):
            self._findings.fail("regenerated tiers", f"plan/{plan.tier}.json", "the plan that the protocol comes to for this base",
                                "another one")

    def _compare(self, tier: str, record: Mapping[str, Any], name: str, target: Path) -> RegeneratedTier:
        sha256, published = sha256_file(target), self._run.path / name
        if sha256 == record["sha256"]:
            return RegeneratedTier(tier=tier, identical=True, differences=())
        differences = tuple(compare_tensors(read_header(target), read_header(published))) if published.exists() else None
        if self._same_build:
            self._findings.fail("regenerated tiers", name, f"sha256 {record['sha256']} from this build", sha256)
        elif differences is None:
            self._findings.note("regenerated tiers", f"{tier} has other bytes here, and the bundle lacks its file to compare with")
        for difference in differences or ():
            bound = ERROR_BOUNDS.get(difference.type, _WORST_BOUND)
            if difference.relative_difference > bound:
                self._findings.fail("regenerated tiers", name, f"{difference.name} within {bound} of itself from another build",
                                    f"{difference.relative_difference:.3g}")
        return RegeneratedTier(tier=tier, identical=False, differences=differences)

    def remeasure(self, made: Mapping[str, Path], offload: Offload, options: RecheckOptions) -> tuple[RemeasuredTier, ...]:
        """Some chunks of every tier whose file is at hand, measured again."""
        findings, protocol, subjects = self._findings, self._protocol, []
        findings.count("remeasured rows", 0)
        for tier, record in self._tiers.items():
            path = made.get(tier, self._run.quants / record["file"])
            if not path.exists():
                findings.note("remeasured rows", f"{tier} is not in the bundle; --regenerate makes it")
                continue
            subjects.append(read_subject(path, tier))
        text = read_corpus(protocol.corpus(protocol.eval.corpora[0]), options.corpus)  # the text that leads speaks for the others
        evaluation = prepare_evaluation(self._pool, protocol, self._base, text, offload)
        findings.equal("remeasured rows", "manifest.json", "token_ids_sha256", evaluation.token_ids_sha256,
                       self._facts["token_ids_sha256"])
        chosen = choose_chunks(self._run, evaluation.chunks, next(iter(self._tiers)), options)
        part = dataclasses.replace(evaluation, chunks=evaluation.chunks[chosen], articles=evaluation.articles[chosen])
        failed = audit(self._scratch, self._pool, part, self._base, subjects, self._progress,
                       AuditOptions(memory_bytes=options.memory_bytes))
        for tier, error in failed.items():
            self._fail_measuring(tier, error)
        return tuple(self._compare_rows(subject.name) for subject in subjects if subject.name not in failed)

    def _fail_measuring(self, tier: str, error: QuantkitError) -> None:
        self._findings.fail("remeasured rows", f"quants/{self._tiers[tier]['file']}", "a file that can be measured", error)

    def _compare_rows(self, tier: str) -> RemeasuredTier:
        found, _ = read_parquet(self._scratch.rows(tier))
        held, _ = read_parquet(self._run.rows(tier))
        chunks = np.unique(found["chunk"])
        held = held[np.isin(held["chunk"], chunks)]
        self._findings.count("remeasured rows", len(found))
        if "ref" in (read_json(self._run.summary(tier)) or {}):
            self._check_bound(tier, held, found)
        result = compare_rows(tier, chunks.tolist(), held, found)
        if self._same_build and result.n_rows_differ:
            i = int(np.argmax(held != found))
            self._findings.fail("remeasured rows", f"audit/{tier}/rows.parquet", f"the row {found[i]} that this build measures",
                                held[i])
        return result

    def _check_bound(self, tier: str, held: Rows, found: Rows) -> None:
        """Rows against a reference pack hold a lower bound of the KLD; where it is one, the recorded bound stands for it."""
        above = held["kld"] - found["kld"] - BOUND_ROUNDING * np.sqrt(np.maximum(found["kld"], 0)) - 1e-9
        if self._same_build and above.max() > 0:
            i = int(np.argmax(above))
            self._findings.fail("remeasured rows", f"audit/{tier}/rows.parquet", f"a KLD of at most {found['kld'][i]}",
                                held["kld"][i])
        found["kld"] = held["kld"]


def compare_rows(tier: str, chunks: Sequence[int], held: Rows, found: Rows) -> RemeasuredTier:
    """How rows that were recorded and rows that were found differ."""
    largest = {name: float(np.max(np.abs(held[name] - found[name]))) for name in ("nll_base", "nll_q", "kld")}
    return RemeasuredTier(
        tier=tier, chunks=tuple(chunks), n_rows=len(found), n_rows_differ=int(np.count_nonzero(held != found)),
        max_nll_base_difference=largest["nll_base"], max_nll_q_difference=largest["nll_q"], max_kld_difference=largest["kld"],
        n_top1_q_differ=int(np.count_nonzero(held["top1_q"] != found["top1_q"])), kld_recorded=float(np.mean(held["kld"])),
        kld_found=float(np.mean(found["kld"])))
