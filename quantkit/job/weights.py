"""kld_weights: what a tier's weights alone do, apart from the arithmetic that its types bring with them.

llama.cpp rounds activations to 8 bits for quantized weights, and to BF16 for BF16 ones. So base and tier are both written as F32,
which holds every dequantized weight exactly (BF16 would round it again), and run in the same F32 arithmetic. The files lie in the
run's scratch folder, base's and one tier's at a time, 4 bytes a weight, and are deleted when their rows are there.

    audit/<tier>/weights.json      WeightsKld
    audit/<tier>/weights.parquet   its rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.core.errors import EngineCrash, EngineError, NoSpace, QuantkitError
from quantkit.core.files import require_space, sha256_file, sha256_json, temp_path
from quantkit.core.stats import group_by
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import dequantize
from quantkit.job.audit import AuditOptions, measure_rows
from quantkit.job.evaluation import Evaluation, Subject, n_cores, read_subject
from quantkit.job.parts import Rows, merge_rows, read_parquet, write_parquet
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.numbers import STATISTICS
from quantkit.measure.summary import estimate
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.verdict_records import WeightsKld

_VERSION = 1  # raised when the meaning of the number changes


def read_weights(run: RunFolder, tier: str) -> WeightsKld | None:
    """What is known of a tier's weights; None where it was not measured, or by another version."""
    try:
        return record_from_json(WeightsKld, read_json(run.weights(tier)))
    except (KeyError, TypeError):
        return None


def measure_weights(run: RunFolder, pool: WorkerPool, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject],
                    progress: Progress, options: AuditOptions) -> dict[str, QuantkitError]:
    """Measure kld_weights of every tier that has none yet.

    Returns:
        The tiers that failed, each with its error; a tier without kld_weights is still measured.
    """
    waiting = [tier for tier in tiers if not _is_measured(run, evaluation, base, tier)]
    if not waiting:
        return {}
    failed: dict[str, QuantkitError] = {}
    plain_base: Path | None = None
    try:
        plain_base = _write_plain(run, pool, base, progress)
        subject = read_subject(plain_base, base.name)
        for tier in waiting:
            failed |= _measure(run, pool, evaluation, base, subject, tier, progress, options)
    except (EngineError, EngineCrash, NoSpace) as error:
        failed |= {f"weights of {tier.name}": error for tier in waiting}
    finally:
        if plain_base is not None:
            plain_base.unlink(missing_ok=True)
    return failed


def _weights_id(evaluation: Evaluation, base: Subject, tier: Subject) -> str:
    return sha256_json({"version": _VERSION, "audit_id": evaluation.audit_id(base.sha256, tier.sha256),
                        "chunks": evaluation.chunks.tolist()})


def _is_measured(run: RunFolder, evaluation: Evaluation, base: Subject, tier: Subject) -> bool:
    held = read_weights(run, tier.name)
    path = run.weights_rows(tier.name)
    return (held is not None and held.weights_id == _weights_id(evaluation, base, tier) and path.exists()
            and sha256_file(path) == held.rows_sha256)


def _write_plain(run: RunFolder, pool: WorkerPool, subject: Subject, progress: Progress) -> Path:
    """The file as F32 in the scratch folder.

    Raises:
        NoSpace: it does not fit.
        EngineError, EngineCrash: the library failed.
    """
    run.parts.mkdir(parents=True, exist_ok=True)
    target = temp_path(run.parts / f"{subject.name}-F32.gguf")
    require_space(run.parts, 4 * subject.model.n_params + subject.model.header.file_bytes // 8, f"writing {subject.name} as F32")
    progress.note(f"weights {subject.name}: writing it as F32")
    try:
        pool.call(f"dequantize {subject.name}", dequantize, source=subject.path, target=target, n_threads=n_cores())
    except QuantkitError:
        target.unlink(missing_ok=True)
        raise
    return target


def _measure(run: RunFolder, pool: WorkerPool, evaluation: Evaluation, base: Subject, plain_base: Subject, tier: Subject,
             progress: Progress, options: AuditOptions) -> dict[str, QuantkitError]:
    weights_id = _weights_id(evaluation, base, tier)

    def write(_: Subject, chunks: Mapping[int, Rows]) -> None:
        rows = merge_rows(chunks, evaluation.chunks, evaluation.articles)
        write_parquet(run.weights_rows(tier.name), rows, {"weights_id": weights_id})

    plain: Path | None = None
    try:
        plain = _write_plain(run, pool, tier, progress)
        subject = read_subject(plain, tier.name)
        failed = measure_rows(run, pool, evaluation, plain_base, [subject], progress, options, write, step="weights")
    except (EngineError, EngineCrash, NoSpace) as error:
        failed = {tier.name: error}
    finally:
        if plain is not None:
            plain.unlink(missing_ok=True)
    if failed:
        return {f"weights of {name}": error for name, error in failed.items()}
    rows, _ = read_parquet(run.weights_rows(tier.name))
    chunk_groups, articles = group_by(rows["chunk"]), group_by(rows["article"])
    write_json(run.weights(tier.name), record_to_json(WeightsKld(
        weights_id=weights_id, rows_sha256=sha256_file(run.weights_rows(tier.name)), tier=tier.name, sha256=tier.sha256,
        n_scored=len(rows), n_article=articles.n_group, kld=estimate(rows, STATISTICS["kld"], chunk_groups, articles),
        same_top_p=estimate(rows, STATISTICS["same_top_p"], chunk_groups, articles))))
    return {}
