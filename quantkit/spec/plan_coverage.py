"""Whether an importance matrix covers a plan, told before a byte is written. The need comes from the plan, not from names.

llama.cpp notices a missing entry when it reaches the tensor, ignores misnamed entries, and takes thin ones as they are.

    matched     tensors that the plan quantizes and the matrix has an entry for
    unmatched   both ways: quantized tensors without an entry, entries that no tensor of the base is named by
    lookups     embeddings of which rows are taken and nothing is multiplied; importances do not apply to them
    match       the smaller of two shares: trunk matrices that are matched, entries that name a tensor of the base. The MTP block,
                embedding and output do not count: llama-imatrix has none of them, and what needs importances is checked anyway
    low counts  fewer than min_count rows, in a whole matrix or in an expert that has any
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quantkit.core.errors import ImatrixError
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry
from quantkit.spec.plan_records import Plan, PlanRow
from quantkit.spec.protocol import ImatrixSpec
from quantkit.spec.quantizable import needs_imatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinEntry:
    """An entry with few rows: those experts that have fewer than min_count, and those that have none."""

    name: str
    n_low: int
    n_missing: int
    n_expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What of a matrix a plan can use. Names are in the order of the base, unknown ones sorted. `match` is 0 to 1, more is better.

    `needed` are the tensors whose type cannot be written, or could not be kept, without importances, `unused` entries of
    tensors that keep their type.
    """

    matched: tuple[str, ...]
    needed: tuple[str, ...]
    without_entry: tuple[str, ...]
    lookups: tuple[str, ...]
    unused: tuple[str, ...]
    unknown: tuple[str, ...]
    thin: tuple[ThinEntry, ...]
    match: float

    def to_json(self) -> dict[str, Any]:
        """As JSON, lists instead of tuples."""
        return {key: [asdict(v) if isinstance(v, ThinEntry) else v for v in value] if isinstance(value, tuple) else value
                for key, value in ((name, getattr(self, name)) for name in self.__slots__)}

    def notes(self) -> list[str]:
        """What a user should know, one line each; nothing where all is well. Experts without rows are told by who mends them."""
        notes = []
        if self.without_entry:
            notes.append(f"quantized without importances: {_names('tensors', self.without_entry)}")
        if self.unknown:
            notes.append(f"in the matrix, but not in the base: {_names('entries', self.unknown)}")
        if low := [entry.name for entry in self.thin if entry.n_low]:
            notes.append(f"few rows behind {_names('entries', low)}: calibrate on more text")
        return notes


def is_lookup(name: str, role: str, *, tied: bool) -> bool:
    """Whether rows of a matrix are looked up and nothing is multiplied by it: an untied embedding, an MTP block's own."""
    return name.endswith("embed_tokens.weight") or (role == "embedding" and (not tied or name != "token_embd.weight"))


def check_coverage(plan: Plan, imatrix: Imatrix, spec: ImatrixSpec) -> Coverage:
    """What the plan can use of the matrix.

    Raises:
        ImatrixError: entries of another length, with values that are not finite or below zero; too few matches; a needed entry
            that is missing, has too few rows or lacks too many experts.
    """
    rows = {row.name: row for row in plan.rows}
    used = {name: row for name, row in rows.items() if row.quantizable}
    tied = all(row.role != "output" for row in plan.rows)
    lookups = tuple(name for name, row in used.items() if is_lookup(name, row.role, tied=tied) and name not in imatrix.entries)
    coverage = Coverage(
        matched=tuple(name for name in used if name in imatrix.entries),
        needed=tuple(name for name, row in used.items() if _is_needed(row, plan.ftype)),
        without_entry=tuple(name for name in used if name not in imatrix.entries and name not in lookups),
        lookups=lookups,
        unused=tuple(name for name in rows if name in imatrix.entries and name not in used),
        unknown=tuple(sorted(imatrix.entries.keys() - rows.keys())),
        thin=tuple(thin for name in used if name in imatrix.entries
                   and (thin := _thin(name, imatrix.entries[name], imatrix.legacy, spec.min_count))),
        match=_match(plan, imatrix),
    )
    _check_match(plan, coverage, spec)
    for name in coverage.matched:
        _check_entry(used[name], imatrix.entries[name])
    _check_needed(plan, coverage, imatrix, spec)
    return coverage


def _is_needed(row: PlanRow, ftype: str) -> bool:
    """Whether importances are missed where there are none: by the type, or by the type that was wanted of a trunk matrix.

    The plan gives what lacks importances a larger type. That is right for the MTP block, the embedding and the output, which most
    matrices leave out; a matrix without a part of the trunk is broken.
    """
    return needs_imatrix(row.name, row.type, ftype) or (row.role == "trunk" and row.change == "no imatrix")


def _match(plan: Plan, imatrix: Imatrix) -> float:
    trunk = [row.name for row in plan.rows if row.quantizable and row.role == "trunk"]
    names = {row.name for row in plan.rows}
    shares = [sum(name in imatrix.entries for name in trunk) / len(trunk)] if trunk else []
    shares += [sum(name in names for name in imatrix.entries) / len(imatrix.entries)] if imatrix.entries else [0.0]
    return min(shares)


def _thin(name: str, entry: ImatrixEntry, legacy: bool, min_count: int) -> ThinEntry | None:
    """None for an entry with enough rows everywhere; a legacy file does not tell rows."""
    if legacy:
        return None
    n_missing = int((entry.counts <= 0).sum())
    n_low = int((entry.counts < min_count).sum()) - n_missing
    return ThinEntry(name=name, n_low=n_low, n_missing=n_missing, n_expert=len(entry.counts)) if n_low or n_missing else None


def _check_match(plan: Plan, coverage: Coverage, spec: ImatrixSpec) -> None:
    if coverage.match < spec.min_match:
        raise ImatrixError(f"tier {plan.tier}: expected at least {spec.min_match:.0%} of names to match between the importance "
                           f"matrix and the base, got {coverage.match:.0%}: {len(coverage.matched)} tensors have an entry, "
                           f"{_names('none for', coverage.without_entry)}, {_names('no tensor for', coverage.unknown)}; "
                           "collect the matrix from this base")


def _check_entry(row: PlanRow, entry: ImatrixEntry) -> None:
    expected = row.shape[0] * (row.shape[2] if len(row.shape) > 2 else 1)
    if entry.n_values != expected:
        raise ImatrixError(f"expected {expected} importances for {row.name} (ne0 * ne2), got {entry.n_values}: the matrix is from "
                           "another model; collect it from this base")
    bad = ~(np.isfinite(entry.in_sum2) & (entry.in_sum2 >= 0))
    if bad.any():
        column = int(np.flatnonzero(bad.any(axis=0))[0])
        raise ImatrixError(f"expected sums of squares for {row.name}, finite and not below zero, got {int(bad.sum())} others, the "
                           f"first in column {column}: collect the matrix again")


def _check_needed(plan: Plan, coverage: Coverage, imatrix: Imatrix, spec: ImatrixSpec) -> None:
    types = {row.name: row.wanted if row.change == "no imatrix" else row.type for row in plan.rows}
    if missing := [f"{name} ({types[name]})" for name in coverage.needed if name not in imatrix.entries]:
        raise ImatrixError(f"tier {plan.tier}: expected importances for every tensor whose type needs them, got "
                           f"{_names('none for', missing)}; collect a matrix that covers them, or plan with this one")
    thin = {entry.name: entry for entry in coverage.thin}
    for name in coverage.needed:
        if name not in thin:
            continue
        n_rows = int(imatrix.entries[name].counts.sum())
        if n_rows < spec.min_count:
            raise ImatrixError(f"tier {plan.tier}: expected at least {spec.min_count} rows behind {name} ({types[name]}), got "
                               f"{n_rows}: calibrate on more text")
        if thin[name].n_missing > spec.max_missing_experts * thin[name].n_expert:
            raise ImatrixError(f"tier {plan.tier}: expected at most {spec.max_missing_experts:.0%} of experts without rows behind "
                               f"{name} ({types[name]}), got {thin[name].n_missing} of {thin[name].n_expert}: calibrate on more "
                               "text")


def _names(what: str, names: Sequence[str]) -> str:
    """`none for 2 (a, b)`."""
    if not names:
        return f"{what} 0"
    return f"{what} {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
