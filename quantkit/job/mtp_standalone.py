"""MTP checks outside the ladder: one file, or trunks times heads, in a run directory that is new or there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from quantkit.core.errors import InputError
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.mtp_check import Candidate, MtpOptions, check_mtp
from quantkit.job.mtp_matrix import run_matrix
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, open_run, read_json
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.protocol import Protocol
from quantkit.spec.speed_records import MatrixCell


def check_file(model: Path, head: Path | None, base: Path | None, protocol: Protocol, run_path: Path, corpus: Path | None,
               progress: Progress, options: MtpOptions = MtpOptions()) -> MtpResult:  # noqa: B008 - frozen
    """Check one file in a run directory of its own, or in one that is there.

    A file that is a tier of the run is checked under the tier's name, any other under its own.

    Raises:
        InputError, GgufError, CorpusError, RunLocked: see the parts.
    """
    for path in filter(None, (model, head, base)):
        describe_model(read_header(path))  # before any hashing
    text = read_corpus(protocol.corpus(protocol.mtp.corpus), corpus)
    with open_run(run_path, protocol) as run:
        trunk = named_as_tier(run, model)
        candidate = Candidate.of(trunk, read_subject(head, "head") if head else None, read_subject(base, "base") if base else None)
        return check_mtp(run, protocol, candidate, text, progress, options)


def named_as_tier(run: RunFolder, path: Path) -> Subject:
    """A file under the name of the run's tier that has its bytes, or else under its own."""
    held = read_json(run.manifest)
    tiers = (held.get("tiers") or {}) if isinstance(held, dict) else {}
    subject = read_subject(path, path.stem)
    names = [name for name, record in tiers.items() if record["sha256"] == subject.sha256]
    return dataclasses.replace(subject, name=names[0]) if names else subject


def matrix_files(base: Path, trunks: Sequence[Path], protocol: Protocol, run_path: Path, corpus: Path | None,
                 progress: Progress, options: MtpOptions = MtpOptions()) -> list[MatrixCell]:  # noqa: B008 - frozen
    """The matrix in a run directory: of the given trunks, or else of the run's tiers whose files are still there.

    Raises:
        InputError: there is no trunk, or the base has no head.
    """
    for path in (base, *trunks):
        describe_model(read_header(path))  # before any hashing
    text = read_corpus(protocol.corpus(protocol.mtp.corpus), corpus)
    with open_run(run_path, protocol) as run:
        return run_matrix(run, protocol, read_subject(base, "base"), find_trunks(run, trunks), text, progress, options)


def find_trunks(run: RunFolder, files: Sequence[Path]) -> list[Subject]:
    """The given files, or else the run's tiers.

    Raises:
        InputError: there is none.
    """
    if files:
        return [named_as_tier(run, path) for path in files]
    held = read_json(run.manifest)
    tiers = (held.get("tiers") or {}) if isinstance(held, dict) else {}
    there = [read_subject(run.quants / record["file"], name) for name, record in tiers.items()
             if (run.quants / record["file"]).exists()]
    if not there:
        raise InputError(f"expected tiers with files in {run.quants}, found none: name the trunk files, or run without "
                         "--drop-files")
    return there
