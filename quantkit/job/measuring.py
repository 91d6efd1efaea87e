"""Everything that is measured of some tiers: rows on every text of the protocol, and noise floors and weights where asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import InputError, QuantkitError
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.audit import AuditOptions, audit
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import Evaluation, Subject, prepare_evaluation
from quantkit.job.floors import measure_floors
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder
from quantkit.job.sequential import Until, screen
from quantkit.job.weights import measure_weights
from quantkit.spec.protocol import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What is measured beside rows, and when a screening stops.

    Attributes:
        floors: noise floors of base and of every tier.
        weights: kld_weights of every tier.
        until: stop early; the protocol must be the screening's own.
    """

    floors: bool = False
    weights: bool = False
    until: Until | None = None
    audit: AuditOptions = field(default_factory=AuditOptions)


class EvaluatedText(NamedTuple):
    """One text of the protocol: where its results lie in the run, and what its rows have in common."""

    run: RunFolder
    evaluation: Evaluation


def read_texts(protocol: Protocol, explicit: Path | None) -> list[bytes]:
    """The protocol's evaluation texts, in its order, hashes checked.

    Args:
        explicit: a file, or a folder that holds them all.

    Raises:
        CorpusError: one is not found, or has other bytes.
        InputError: one file was given for several texts.
    """
    require_folder(protocol, explicit)
    return [read_corpus(protocol.corpus(name), explicit) for name in protocol.eval.corpora]


def require_folder(protocol: Protocol, explicit: Path | None) -> None:
    """Refuse one file for several texts.

    Raises:
        InputError: names the texts.
    """
    names = protocol.eval.corpora
    if explicit is not None and len(names) > 1 and not explicit.is_dir():
        raise InputError(f"expected a folder that holds the {len(names)} texts of protocol {protocol.name} ({', '.join(names)}), "
                         f"got the file {explicit}: give the folder")


def prepare_texts(run: RunFolder, pool: WorkerPool, protocol: Protocol, base: Subject, texts: Sequence[bytes],
                  offload: Offload) -> list[EvaluatedText]:
    """Tokenize every text; the first lies where a single one would, the others one folder deeper.

    Raises:
        InputError: see `prepare_evaluation`.
    """
    found = []
    for i, (name, text) in enumerate(zip(protocol.eval.corpora, texts, strict=True)):
        evaluation = prepare_evaluation(pool, protocol, base, text, offload, protocol.corpus(name))
        found.append(EvaluatedText(dataclasses.replace(run, corpus=name if i else ""), evaluation))
    return found


def measure_tiers(texts: Sequence[EvaluatedText], pool: WorkerPool, protocol: Protocol, base: Subject, tiers: Sequence[Subject],
                  progress: Progress, measures: Measures) -> tuple[list[EvaluatedText], dict[str, QuantkitError]]:
    """Measure some tiers on every text.

    Returns:
        The texts on the chunks that were used, all of them unless a screening stopped; and what failed, each with its error:
        a tier by its name, a floor or weights in words.
    """
    failed: dict[str, QuantkitError] = {}
    used = []
    for run, evaluation in texts:
        waiting = [tier for tier in tiers if tier.name not in failed]
        if measures.until is None:
            failed |= audit(run, pool, evaluation, base, waiting, progress, measures.audit)
        else:
            evaluation, own = screen(run, pool, protocol, evaluation, base, waiting, progress, measures.audit, measures.until)
            failed |= own
        waiting = [tier for tier in tiers if tier.name not in failed]
        if measures.floors and waiting:
            failed |= measure_floors(run, pool, protocol, evaluation, base, waiting, progress, measures.audit)
        if measures.weights:
            failed |= measure_weights(run, pool, evaluation, base, waiting, progress, measures.audit)
        used.append(EvaluatedText(run, evaluation))
    return used, failed
