"""A plan: for every tensor of a base the type it gets, the rule that chose it, and its exact bytes.

    size_bytes    n_rows * row_bytes of every tensor, as llama-quantize sums them
    tensor_bytes  the same with each tensor padded to 32: the file without its header
    bpw           8 * size_bytes / elements; bpw_core the same over trunk tensors alone (`spec.model` has the definition)
    substituted   tensors whose rows the wanted type's blocks do not divide; they have the type that llama.cpp falls back to
    no_imatrix    tensors whose wanted type needs importances that the matrix lacks; they have one that needs none
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from quantkit.core.errors import PlanError
from quantkit.spec.gguf_header import TensorInfo
from quantkit.spec.json_records import record_from_json
from quantkit.spec.model import Role, TypeShare, bits_per_weight, type_shares
from quantkit.spec.tensor_types import TENSOR_TYPES

ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT, the only one that the quantizer writes

Change = Literal["", "substituted", "no imatrix"]

_SYNTAX = re.compile(r"[\\^$.|?*+()\[\]{}/]")  # ECMAScript's syntax characters


class Override(NamedTuple):
    """One line of what llama.cpp is told: an anchored pattern that fits one name, and the type."""

    pattern: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One tensor.

    `shape` is in ggml's order, ne0 first. `wanted` is the type that the rule named and `change` why `type` is another one.
    `quantizable` tells whether the library would quantize it: what it leaves alone anyway needs no override.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    source_type: str
    type: str
    rule: str
    wanted: str
    change: Change
    quantizable: bool
    size_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All tensors of one tier, in the order of the base."""

    tier: str
    ftype: str
    rows: tuple[PlanRow, ...]

    @property
    def size_bytes(self) -> int:
        """Sum of the tensors, without padding."""
        return sum(row.size_bytes for row in self.rows)

    @property
    def tensor_bytes(self) -> int:
        """Sum of the tensors, each padded to the alignment."""
        return sum(-(-row.size_bytes // ALIGNMENT) * ALIGNMENT for row in self.rows)

    @property
    def n_params(self) -> int:
        return sum(row.n_elements for row in self.rows)

    @property
    def bpw(self) -> float:
        """Tensor bits per weight of the whole file."""
        return bits_per_weight(_as_tensors(self.rows)) or 0.0

    @property
    def bpw_core(self) -> float | None:
        """Tensor bits per weight without embedding, output and MTP; None where nothing is left."""
        return bits_per_weight(_as_tensors(row for row in self.rows if row.role == "trunk"))

    @property
    def types(self) -> tuple[TypeShare, ...]:
        """Tensors, parameters and bytes of each type."""
        return type_shares(_as_tensors(self.rows))

    @property
    def substituted(self) -> tuple[PlanRow, ...]:
        """Rows whose shape forced another type; a tier that has any must be marked wherever it is shown."""
        return self._changed("substituted")

    @property
    def no_imatrix(self) -> tuple[PlanRow, ...]:
        """Rows that have another type for want of importances."""
        return self._changed("no imatrix")

    def _changed(self, change: Change) -> tuple[PlanRow, ...]:
        return tuple(row for row in self.rows if row.change == change)

    def share_params(self, rows: Iterable[PlanRow]) -> float:
        """Fraction of all parameters that some rows hold."""
        return sum(row.n_elements for row in rows) / self.n_params if self.n_params else 0.0

    def share_bytes(self, rows: Iterable[PlanRow]) -> float:
        """Fraction of all tensor bytes that some rows hold."""
        return sum(row.size_bytes for row in rows) / self.size_bytes if self.rows else 0.0

    def overrides(self) -> dict[str, str]:
        """Tensor name → type for every tensor that the library would quantize: nothing is left to its mix."""
        return {row.name: row.type for row in self.rows if row.quantizable}

    def override_patterns(self) -> tuple[Override, ...]:
        """The overrides as the library takes them: one anchored, escaped ECMAScript pattern for each tensor."""
        return tuple(anchored(name, type_) for name, type_ in self.overrides().items())

    def notes(self) -> tuple[str, ...]:
        """What a reader must know before believing the tier's name, one sentence each."""
        why = ((self.substituted, "substituted, the blocks of the wanted type do not divide their rows"),
               (self.no_imatrix, "at a type that needs no importances, which they lack"))
        return tuple(f"{len(rows)} of {len(self.rows)} tensors {text} ({self.share_params(rows):.1%} of parameters, "
                     f"{self.share_bytes(rows):.1%} of bytes)" for rows, text in why if rows)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON: numbers first, then every row. Equal plans give equal JSON."""
        return {
            "schema": 1, "tier": self.tier, "ftype": self.ftype, "n_params": self.n_params, "size_bytes": self.size_bytes,
            "tensor_bytes": self.tensor_bytes, "bpw": self.bpw, "bpw_core": self.bpw_core, "notes": list(self.notes()),
            "types": [asdict(share) for share in self.types],
            "rows": [{**asdict(row), "shape": list(row.shape)} for row in self.rows],
        }

    @staticmethod
    def from_json(value: Any) -> Plan:
        """A plan from `to_json`'s value. The numbers are computed anew and must agree.

        Raises:
            PlanError: not a plan, or one that was changed by hand.
        """
        try:
            rows = tuple(_read_row(row) for row in value["rows"])
            plan = Plan(tier=value["tier"], ftype=value["ftype"], rows=rows)
            again = plan.to_json()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"expected a plan of schema 1, got something else ({error!r}): plan the tier again") from error
        if again != value:
            wrong = ", ".join(sorted(key for key in again.keys() | value.keys() if again.get(key) != value.get(key)))
            raise PlanError(f"expected the plan of tier {plan.tier} to agree with its own rows, got another {wrong}: "
                            "plan the tier again")
        return plan


def anchored(name: str, type_name: str) -> Override:
    """An override that fits one tensor's name alone: anchored, ECMAScript's syntax characters escaped."""
    return Override(f"^{_SYNTAX.sub(_escape, name)}$", type_name)


def tensor_size(shape: tuple[int, ...], type_name: str) -> int:
    """Bytes of a tensor: n_rows * row_bytes.

    Raises:
        ValueError: the type's blocks do not divide ne0.
    """
    return math.prod(shape[1:]) * TENSOR_TYPES[type_name].row_bytes(shape[0])


def as_mapping(rows: Iterable[PlanRow]) -> dict[str, str]:
    """Tensor name → type, kept tensors included: what a written file must hold."""
    return {row.name: row.type for row in rows}


def _read_row(value: Mapping[str, Any]) -> PlanRow:
    row = record_from_json(PlanRow, value)
    if not 1 <= len(row.shape) <= 4 or min(row.shape) < 1 or row.type not in TENSOR_TYPES:
        raise ValueError(f"{row.name[:80]}: shape {row.shape}, type {row.type!r}")
    if row.size_bytes != tensor_size(row.shape, row.type):
        raise ValueError(f"{row.name}: {row.size_bytes} bytes")
    return row


def _as_tensors(rows: Iterable[PlanRow]) -> list[TensorInfo]:
    return [TensorInfo(name=row.name, shape=row.shape, type=TENSOR_TYPES[row.type], offset=0, size_bytes=row.size_bytes, part=0)
            for row in rows]


def _escape(match: re.Match[str]) -> str:
    return f"\\{match.group()}"
