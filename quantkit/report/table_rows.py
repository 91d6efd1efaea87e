"""The records of a retention table: what its numbers depend on, and one row a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.core.errors import InputError
from quantkit.spec.records import TierSummary
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.source_facts import FileSource
from quantkit.spec.verdict_records import FloorVerdict, KernelFloor, WeightsKld


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """What the numbers of a table depend on, and what they can be verified with.

    Attributes:
        derived: the settings by which the protocol differs from the frozen one of its name; None if it is that one.
        base_type: the type of most of the base's parameters, such as BF16.
        chunk_rule: in words: "all 783 chunks", "64 chunks spread over the text", "the first 16 chunks".
        backend: where the arithmetic ran, such as "CPU" or "CUDA, 33 layers".
        calibration: the text behind the importances and what it shares with the evaluation text; "" where none were used.
        notes: what else a reader must know, such as tiers that failed.
    """

    result_id: str
    protocol_name: str
    protocol_id: str
    eval_id: str
    derived: str | None = None
    base_file: str
    base_sha256: str
    base_type: str
    corpus_name: str
    corpus_sha256: str
    token_ids_sha256: str
    chunk_rule: str
    n_ctx: int
    n_chunk: int
    n_scored: int
    n_article: int
    backend: str
    llama_commit: str
    library_version: str
    calibration: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One file of the table.

    Attributes:
        size_bytes: of all its parts. size_vs_base: a fraction of the base's.
        bpw: tensor bits a weight, whole file; bpw_core: without embedding, output and MTP block.
        substituted: share of parameters (0 to 1) whose type is another than the plan's rules asked for.
        notes: what was substituted, where a foreign file is from, and the like.
        letters: of mean KLD; two tiers that share one are not told apart. "" where no pair was tested.
        reference: the reference pack that stood in base's place; KLD is then a lower bound. None where base itself was run.
        floor: the arithmetic that moves the same file the most; floor_verdict: the tier beside it; weights: its weights alone.
        source: where a file without a plan is from, in its own words; None of a tier that was made here.
    """

    tier: str
    file: str
    sha256: str
    size_bytes: int
    size_vs_base: float
    bpw: float
    bpw_core: float | None
    summary: TierSummary
    is_base: bool = False
    substituted: float = 0.0
    notes: tuple[str, ...] = ()
    letters: str = ""
    reference: PackReference | None = None
    floor: KernelFloor | None = None
    floor_verdict: FloorVerdict | None = None
    weights: WeightsKld | None = None
    source: FileSource | None = None


def order_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    """The base, then the tiers by size, largest first; of equal sizes by name and hash.

    Raises:
        InputError: not exactly one base, or a tier measured on another number of chunks or tokens than the base.
    """
    bases = [row for row in rows if row.is_base]
    if len(bases) != 1:
        raise InputError(f"expected one base in the table, got {len(bases)} among {len(rows)} rows: leave the others away")
    design = bases[0].summary
    for row in rows:
        if (row.summary.n_chunk, row.summary.n_scored) != (design.n_chunk, design.n_scored):
            raise InputError(f"expected {design.n_chunk} chunks and {design.n_scored} scored tokens as for the base, got "
                             f"{row.summary.n_chunk} and {row.summary.n_scored} for {row.tier}: tiers are compared on the same "
                             "chunks only; audit them under one protocol")
    return sorted(rows, key=lambda row: (not row.is_base, -row.size_bytes, row.tier, row.sha256))
