"""Screening: an audit that looks at its rows now and then and stops when it has seen enough. Never the way of a frozen protocol.

    --until kld_rse=0.02    the published error of every tier's mean KLD is at most 2 % of it
    --until pairs           every neighbour by size is better, worse or equivalent

The evaluation's chunks come in an order that the protocol's seed fixes, every beginning of which is spread over the text. Looks are
taken after `sequential.looks` chunks, and after all. Each verdict's error is shared over all looks (Bonferroni), whether they
happen or not, so stopping at any of them keeps the promise. An interval that made the screening stop is a little too short:
95 % ones cover about 94 %, so 97 % ones of mean KLD stand in the record.

    audit/screening.json   the looks, where it stopped and why; the run's protocol is a derived one with an eval_id of its own
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from quantkit.core.errors import InputError, QuantkitError
from quantkit.core.stats import group_by
from quantkit.engine.pool import WorkerPool
from quantkit.job.audit import AuditOptions, audit, measure_rows, part_path, write_tier
from quantkit.job.evaluation import Evaluation, Subject, check_same_text
from quantkit.job.parts import Rows, merge_rows
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.articles import screening_order
from quantkit.measure.numbers import STATISTICS
from quantkit.measure.summary import estimate_mean, sorted_rows
from quantkit.measure.verdict import compare_pairs
from quantkit.spec.protocol import Protocol

_STOPPED_LEVEL = 0.97


class Until(NamedTuple):
    """When a screening has seen enough: `kld_rse` with its value, or `pairs`."""

    what: str
    value: float | None

    def __str__(self) -> str:
        return self.what if self.value is None else f"{self.what}={self.value:g}"


def parse_until(text: str) -> Until:
    """`kld_rse=0.02` or `pairs`.

    Raises:
        InputError: anything else.
    """
    what, sign, value = text.partition("=")
    if what == "pairs" and not sign:
        return Until(what, None)
    try:
        number = float(value) if what == "kld_rse" and sign else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise InputError(f"expected kld_rse=0.02 (a relative error between 0 and 1) or pairs for --until, got {text!r}: "
                         "give one of the two")
    return Until(what, number)


def screening_protocol(protocol: Protocol, until: Until) -> Protocol:
    """The derived protocol of a screening: its rows stand beside no others."""
    return dataclasses.replace(protocol, derived=(*protocol.derived, f"until={until}"))


def screen(run: RunFolder, pool: WorkerPool, protocol: Protocol, evaluation: Evaluation, base: Subject, tiers: Sequence[Subject],
           progress: Progress, options: AuditOptions, until: Until) -> tuple[Evaluation, dict[str, QuantkitError]]:
    """Measure tiers until they are known well enough. A run that has stopped before measures further tiers on its chunks.

    Returns:
        The evaluation on the chunks that were used, and the tiers that failed, each with its error.
    """
    held = read_json(run.screening)
    if isinstance(held, dict):
        progress.note(f"screening: stopped before after {held['n_chunk']} chunks; the same ones are used")
        part = _on_chunks(evaluation, np.flatnonzero(np.isin(evaluation.chunks, held["chunks"])))
        return part, audit(run, pool, part, base, tiers, progress, options)
    failed: dict[str, QuantkitError] = {}
    for tier in tiers:
        try:
            check_same_text(pool, evaluation, base, tier)
        except InputError as error:
            failed[tier.name] = error
    order = screening_order(len(evaluation.chunks), protocol.eval.seed)
    counts = [*(n for n in protocol.sequential.looks if n < len(order)), len(order)]
    looks: list[dict[str, Any]] = []
    part, chunks, rows = evaluation, dict[str, Mapping[int, Rows]](), dict[str, Rows]()
    for n in counts:
        part = _on_chunks(evaluation, np.sort(order[:n]))
        waiting = [tier for tier in _by_size(tiers) if tier.name not in failed]
        chunks, own = _rows_of_look(run, pool, part, base, waiting, progress, options, step=f"screen {n} chunks:")
        failed |= own
        rows = {name: merge_rows(found, part.chunks, part.articles) for name, found in chunks.items()}
        looks.append(_look(rows, protocol, until, n_looks=len(counts)))
        progress.note(f"screening, {n} of {len(order)} chunks: {looks[-1]['found']}")
        if looks[-1]["enough"] or not rows:
            break
    for tier in tiers:
        if tier.name in rows:
            write_tier(run, part, base.sha256, tier, chunks[tier.name])
        part_path(run, evaluation, base, tier).unlink(missing_ok=True)
    if rows:
        write_json(run.screening, {
            "until": str(until), "seed": protocol.eval.seed, "n_looks": len(counts), "looks": looks, "n_chunk": len(part.chunks),
            "n_chunk_of": len(order), "chunks": part.chunks.tolist(), "level": _STOPPED_LEVEL,
            "kld": {name: _kld_interval(own) for name, own in rows.items()}})
    return part, failed


def _rows_of_look(run: RunFolder, pool: WorkerPool, part: Evaluation, base: Subject, tiers: Sequence[Subject], progress: Progress,
                  options: AuditOptions, step: str) -> tuple[dict[str, Mapping[int, Rows]], dict[str, QuantkitError]]:
    """The rows of every tier on a look's chunks, in the tiers' order, and the tiers that failed."""
    found: dict[str, Mapping[int, Rows]] = {}

    def keep(tier: Subject, chunks: Mapping[int, Rows]) -> None:
        found[tier.name] = chunks

    failed = measure_rows(run, pool, part, base, tiers, progress, options, keep, step=step, keep_parts=True)
    return {tier.name: found[tier.name] for tier in tiers if tier.name in found}, failed


def _on_chunks(evaluation: Evaluation, places: Any) -> Evaluation:
    return dataclasses.replace(evaluation, chunks=evaluation.chunks[places], articles=evaluation.articles[places])


def _by_size(tiers: Sequence[Subject]) -> list[Subject]:
    return sorted(tiers, key=lambda tier: (-tier.model.header.file_bytes, tier.name))


def _look(rows: Mapping[str, Rows], protocol: Protocol, until: Until, n_looks: int) -> dict[str, Any]:
    """What one look finds, and whether it is enough."""
    n_chunk = len(np.unique(next(iter(rows.values()))["chunk"])) if rows else 0
    if until.what == "kld_rse":
        errors = {name: _relative_error(own) for name, own in rows.items()}
        enough = all(error is not None and until.value is not None and error <= until.value for error in errors.values())
        worst = max((error for error in errors.values() if error is not None), default=None)
        found = "too few articles for an error" if None in errors.values() else f"largest relative error {worst:.4f}"
        return {"n_chunk": n_chunk, "kld_rse": errors, "enough": enough, "found": found}
    gate = protocol.gate
    verdicts = {(v.a, v.b): v.verdict for v in compare_pairs(rows, "kld", margin=float(np.log1p(gate.equivalence_margin)),
                                                             alpha=gate.alpha, n_looks=n_looks)}
    names = list(rows)
    neighbours = {f"{a} {b}": verdicts[a, b] for a, b in pairwise(names)}
    open_ones = [pair for pair, verdict in neighbours.items() if verdict == "not resolved"]
    return {"n_chunk": n_chunk, "neighbours": neighbours, "enough": not open_ones,
            "found": f"{len(neighbours) - len(open_ones)} of {len(neighbours)} neighbours resolved"}


def _relative_error(rows: Rows) -> float | None:
    rows = sorted_rows(rows)
    got = estimate_mean(STATISTICS["kld"].observe(rows), STATISTICS["kld"], group_by(rows["chunk"]), group_by(rows["article"]))
    if got.value == 0.0:
        return 0.0  # base itself: there is nothing to learn
    return None if got.se is None or not got.value else got.se / got.value


def _kld_interval(rows: Rows) -> dict[str, float | None]:
    rows = sorted_rows(rows)
    got = estimate_mean(STATISTICS["kld"].observe(rows), STATISTICS["kld"], group_by(rows["chunk"]), group_by(rows["article"]),
                        _STOPPED_LEVEL)
    return {"lo": got.lo, "hi": got.hi}
