"""`verify --remeasure --ref`: random chunks of a bundle's tiers measured again without the base, against a reference pack.

What a tier gives by itself (nll_q, top1_q) is held always. Base's columns, and KLD, are held as far as the pack can say:

    a tier measured against this pack    every column, to the bit with the same build
    against base itself                  base's columns where the pack's base ran in the bundle's arithmetic; the pack's KLD is a
                                         lower bound, and may not be above the recorded one
    against another pack                 as against base, but for KLD, which is another bound
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.core.errors import EngineCrash, EngineError, InputError
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import context_settings, default_workers, read_subject
from quantkit.job.parts import Rows, merge_rows, read_parquet
from quantkit.job.progress import Progress
from quantkit.job.refpack_audit import AuditedText, check_tokens, score_tier
from quantkit.job.refpack_texts import TextPack, check_base, evaluated_chunks, evaluation_of, open_packs
from quantkit.job.regenerate import (
    BOUND_ROUNDING,
    Rechecked,
    RecheckOptions,
    RemeasuredTier,
    choose_chunks,
    choose_tiers,
    compare_rows,
    other_build,
    scratch_run,
)
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.verify_findings import Findings
from quantkit.spec.protocol import load_protocol

_CHECK = "remeasured rows"
_BASE_COLUMNS = ("nll_base", "entropy_base", "top1_base", "margin_base")


def remeasure_with_pack(folder: Path, pack: Path, options: RecheckOptions, findings: Findings, progress: Progress) -> Rechecked:
    """Measure some chunks of a bundle's tiers again. The bundle has passed `verify_bundle`.

    Args:
        pack: of the text that leads, which speaks for the others.
        findings: gets the failures, and what could not be done.

    Raises:
        InputError: the pack is damaged, or of another base, text or evaluation; or a tier that the bundle does not have.
        EngineError, EngineCrash: this machine cannot do it.
    """
    run = RunFolder(path=folder)
    facts, protocol = read_json(run.manifest), load_protocol(run.protocol)
    tiers = choose_tiers(facts["tiers"], options.tiers)
    (text,) = open_packs([pack], protocol, protocol.eval.corpora[:1])
    check_base([text], folder, facts["base"]["sha256"])
    data = read_corpus(text.corpus, options.corpus)
    build = facts["build"]
    offload = Offload(n_gpu_layers=build["n_gpu_layers"], main_gpu=build["main_gpu"], tensor_split=tuple(build["tensor_split"]))
    n_workers = options.n_workers or default_workers(context_settings(protocol.eval), offload)
    findings.count(_CHECK, 0)
    findings.equal(_CHECK, "manifest.json", "token_ids_sha256", text.pack.facts.token_ids_sha256, facts["token_ids_sha256"])
    with scratch_run(run) as scratch, WorkerPool(n_workers, run.logs) as pool:
        here, other = other_build(pool, build)
        chunks = evaluated_chunks(text, protocol)
        chunks = chunks[choose_chunks(run, chunks, next(iter(tiers)), options)]
        evaluation = evaluation_of(text, protocol, data, offload, here, chunks)
        job = _Remeasure(run, AuditedText(run=scratch, text=text, evaluation=evaluation), pool, build, findings, progress,
                         same_build=not other)
        remeasured = [found for tier, record in tiers.items() if (found := job.measure(tier, record)) is not None]
    if other:
        findings.note(_CHECK, f"another build, so other bits are to be expected: {'; '.join(other)}")
    return Rechecked(same_build=not other, regenerated=(), remeasured=tuple(remeasured))


@dataclass(frozen=True, slots=True)
class _Remeasure:
    """One check under way."""

    run: RunFolder
    audited: AuditedText
    pool: WorkerPool
    build: Mapping[str, Any]
    findings: Findings
    progress: Progress
    _: dataclasses.KW_ONLY
    same_build: bool

    def measure(self, tier: str, record: Mapping[str, Any]) -> RemeasuredTier | None:
        """A tier's rows anew beside the recorded ones; None where its file is not at hand or cannot be run."""
        name = f"quants/{record['file']}"
        if not (self.run.path / name).exists():
            self.findings.note(_CHECK, f"{tier} is not in the bundle")
            return None
        subject = read_subject(self.run.path / name, tier)
        evaluation = self.audited.evaluation
        try:
            check_tokens(self.pool, evaluation, subject)
            chunks, _ = score_tier(self.pool, self.audited, subject, self.progress)
        except (InputError, EngineCrash, EngineError) as error:
            self.findings.fail(_CHECK, name, "a file that can be measured", error)
            return None
        found = merge_rows(chunks, evaluation.chunks, evaluation.articles)
        held, _ = read_parquet(self.run.rows(tier))
        held = held[np.isin(held["chunk"], evaluation.chunks)]
        self.findings.count(_CHECK, len(found))
        self._align(tier, held, found)
        result = compare_rows(tier, [int(chunk) for chunk in evaluation.chunks], held, found)
        if self.same_build and result.n_rows_differ:
            i = int(np.argmax(held != found))
            self.findings.fail(_CHECK, f"audit/{tier}/rows.parquet", f"the row {found[i]} that this build measures", held[i])
        return result

    def _align(self, tier: str, held: Rows, found: Rows) -> None:
        """Where the pack cannot say what was recorded, hold what it can, and let the recorded numbers stand."""
        ref = (read_json(self.run.summary(tier)) or {}).get("ref")
        if ref is not None and ref["sha256"] == self.audited.text.sha256:
            return
        if not _same_arithmetic(self.audited.text, self.build):
            self.findings.note(_CHECK, f"{tier}: the pack's base ran on another build or device than the bundle's: only what the "
                                       "tier gives by itself is held against it")
            for column in (*_BASE_COLUMNS, "kld"):
                found[column] = held[column]
            return
        if ref is not None:
            self.findings.note(_CHECK, f"{tier}: its KLD is another pack's lower bound, and is not held against this one's")
        else:
            above = found["kld"] - held["kld"] - BOUND_ROUNDING * np.sqrt(np.maximum(held["kld"], 0)) - 1e-9
            if self.same_build and above.max() > 0:
                i = int(np.argmax(above))
                self.findings.fail(_CHECK, f"audit/{tier}/rows.parquet", f"a KLD of at least {found['kld'][i]}", held["kld"][i])
        found["kld"] = held["kld"]


def _same_arithmetic(text: TextPack, build: Mapping[str, Any]) -> bool:
    there = dataclasses.asdict(text.pack.facts.arithmetic)
    keys: Sequence[str] = list(there)
    return all(tuple(build[key]) == there[key] if isinstance(there[key], tuple) else build[key] == there[key] for key in keys)
