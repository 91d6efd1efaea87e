"""What must be known of a calibration before it is used: that its text is another than the one measured on, that its matrix covers
the plans, and what had to be mended in it. All of it goes into the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import CorpusError
from quantkit.job.corpus import read_corpus
from quantkit.job.quantize import Importances
from quantkit.measure.ngrams import shared_ngrams
from quantkit.spec.plan_coverage import Coverage
from quantkit.spec.protocol import Corpus, Protocol, Tier
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

_NO_IMATRIX_FROM_BITS = 8  # types of so many bits or more do not use importances
_N_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much a calibration text and an evaluation text have in common: `n_shared` distinct n-grams, `share` of the smaller."""

    calibration: str
    calibration_sha256: str
    evaluation: str
    evaluation_sha256: str
    ngram: int
    n_shared: int
    share: float

    def describe(self) -> str:
        """One line for people."""
        return (f"{self.calibration} (sha256 {self.calibration_sha256}) shares {self.share:.2%} of its {self.ngram}-grams with "
                f"{self.evaluation} (sha256 {self.evaluation_sha256})")


def uses_importances(types: Iterable[str]) -> bool:
    """Whether any of these tensor types is written differently with importances."""
    return any(8 * (kind := TENSOR_TYPES[name]).type_size < _NO_IMATRIX_FROM_BITS * kind.block_size for name in types)


def may_calibrate(protocol: Protocol, tiers: Sequence[Tier]) -> bool:
    """Whether a ladder can need importances, told from its tiers alone, before any file is opened."""
    types = {protocol.plan.mtp_type, *(name for rule in protocol.plan.rules for name in (rule.type, rule.at_least))}
    for tier in tiers:
        types |= {tier.default or FTYPES[tier.ftype].default_type} | {n for rule in tier.rules for n in (rule.type, rule.at_least)}
        types.add(FTYPES[tier.ftype].default_type)
    return uses_importances(types - {""})


def measure_overlap(protocol: Protocol, evaluation: str, text: bytes, calibration: bytes) -> Overlap:
    """Compare the protocol's calibration text with one of its evaluation texts.

    Raises:
        CorpusError: they are one text, or share more n-grams than the protocol allows; says both hashes and the share.
    """
    spec = protocol.imatrix
    seen, measured = protocol.corpus(spec.corpus), protocol.corpus(evaluation)
    shared = shared_ngrams(calibration, text, spec.ngram)
    return check_overlap(_overlap(seen, measured, spec.ngram, shared.n_shared, shared.share), spec.max_shared_ngrams)


def check_overlap(overlap: Overlap, max_shared_ngrams: float) -> Overlap:
    """The overlap itself, if it is allowed.

    Raises:
        CorpusError: see `measure_overlap`.
    """
    if overlap.calibration_sha256 == overlap.evaluation_sha256:
        raise CorpusError(f"the calibration text {overlap.calibration} is the evaluation text {overlap.evaluation}, both of sha256 "
                          f"{overlap.evaluation_sha256}: importances from the text that is measured on flatter the low tiers; "
                          "calibrate on another text")
    if overlap.share > max_shared_ngrams:
        raise CorpusError(f"expected a calibration text that shares at most {max_shared_ngrams:.2%} with the evaluation text; "
                          f"{overlap.describe()}: importances from the text that is measured on flatter the low tiers; calibrate "
                          "on another text")
    return overlap


def read_overlaps(protocol: Protocol, corpus: Path | None, calibration: Path | None, held: Any = None) -> tuple[Overlap, ...]:
    """Prove that the calibration text is another than each evaluation text.

    Args:
        corpus, calibration: paths of the texts, where they are not found by themselves.
        held: what `overlaps_json` left of an earlier proof; texts are read only where it speaks of others.

    Raises:
        CorpusError: a text is missing, or see `measure_overlap`.
    """
    spec = protocol.imatrix
    seen = protocol.corpus(spec.corpus)
    found = []
    known = [entry for entry in held if isinstance(entry, dict)] if isinstance(held, list) else []
    for name in protocol.eval.corpora:
        measured = protocol.corpus(name)
        blank = _overlap(seen, measured, spec.ngram, 0, 0.0)
        if old := [entry for entry in known if _is_of(entry, blank)]:
            overlap = _overlap(seen, measured, spec.ngram, int(old[0]["n_shared"]), float(old[0]["share"]))
            found.append(check_overlap(overlap, spec.max_shared_ngrams))
            continue
        check_overlap(blank, spec.max_shared_ngrams)  # one text by its hash needs no reading
        found.append(measure_overlap(protocol, name, read_corpus(measured, corpus), read_corpus(seen, calibration)))
    return tuple(found)


def overlaps_json(overlaps: Iterable[Overlap]) -> list[dict[str, Any]]:
    """As JSON, for the record that spares the next start the reading."""
    return [asdict(overlap) for overlap in overlaps]


def imatrix_facts(protocol: Protocol, importances: Importances, coverages: Mapping[str, Coverage],
                  overlaps: Sequence[Overlap] | None, held: Any = None) -> dict[str, Any]:
    """What the manifest says of the importance matrix.

    Args:
        coverages: tier to what its plan can use of the matrix.
        overlaps: of the text that it was collected over; None for a matrix that was given, whose text nobody knows.
        held: the facts of an earlier start; its tiers stay, if they used the same matrix.
    """
    facts: dict[str, Any] = {
        "file": importances.file, "sha256": importances.sha256, "given": overlaps is None,
        "corpus_sha256": None if overlaps is None else protocol.corpus(protocol.imatrix.corpus).sha256,
        "overlap": None if overlaps is None else overlaps_json(overlaps), "datasets": list(importances.datasets),
        "chunk_count": importances.chunk_count, "n_entries": importances.n_entries, "zero_floor": protocol.imatrix.zero_floor,
        "zero_columns": dict(importances.zero_columns),
        "missing_experts": {name: list(experts) for name, experts in importances.missing_experts.items()},
        "coverage": {tier: _coverage_facts(coverage) for tier, coverage in coverages.items()}}
    same = held if isinstance(held, dict) and held.get("sha256") == importances.sha256 else {}
    for key in ("zero_columns", "missing_experts", "coverage"):
        facts[key] = dict(sorted({**same.get(key, {}), **facts[key]}.items()))
    return facts


def importance_notes(importances: Importances, coverages: Mapping[str, Coverage], overlaps: Sequence[Overlap] | None) -> list[str]:
    """What a user should know of the matrix in use, one line each."""
    notes = [overlap.describe() for overlap in overlaps or ()]
    if overlaps is None:
        notes.append("the matrix was given and its format does not hold the calibration text's hash: whether that is the text "
                     "measured on is unknown")
    if zeros := importances.zero_columns:
        notes.append(f"{sum(zeros.values())} columns of {len(zeros)} tensors were never hit and get a fraction of the mean: "
                     f"{_named([f'{name} ({n})' for name, n in zeros.items()])}")
    if missing := importances.missing_experts:
        notes.append(f"{sum(map(len, missing.values()))} experts of {len(missing)} tensors were never hit and are neutral: "
                     f"{_named([f'{name} ({len(experts)})' for name, experts in missing.items()])}")
    tiers_of: dict[str, list[str]] = {}
    for tier, coverage in coverages.items():
        for note in coverage.notes():
            tiers_of.setdefault(note, []).append(tier)
    notes += [f"in {', '.join(tiers)}: {note}" for note, tiers in tiers_of.items()]
    return [f"imatrix: {note}" for note in notes]


def _coverage_facts(coverage: Coverage) -> dict[str, Any]:
    """The whole record but the long lists of what is as it should be, of which the numbers say enough."""
    record = coverage.to_json()
    return {"n_matched": len(record.pop("matched")), "n_needed": len(record.pop("needed")), **record}


def _overlap(seen: Corpus, measured: Corpus, ngram: int, n_shared: int, share: float) -> Overlap:
    return Overlap(calibration=seen.name, calibration_sha256=seen.sha256, evaluation=measured.name,
                   evaluation_sha256=measured.sha256, ngram=ngram, n_shared=n_shared, share=share)


def _is_of(entry: Mapping[str, Any], wanted: Overlap) -> bool:
    """Whether a recorded overlap is of the same texts and the same n."""
    keys = ("calibration_sha256", "evaluation_sha256", "ngram")
    return all(entry.get(key) == getattr(wanted, key) for key in keys) and {"n_shared", "share"} <= entry.keys()


def _named(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_N_NAMED]) + (f" and {len(texts) - _N_NAMED} more" if len(texts) > _N_NAMED else "")
