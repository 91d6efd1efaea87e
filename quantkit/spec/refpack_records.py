"""Records of reference packs: what a pack says of itself, the columns of its rows, and what a tier measured against it carries."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quantkit.spec.json_records import record_from_json, record_to_json

REFPACK_VERSION = 1  # raised when bytes of a pack mean something else
FORMAT = "quantkit-refpack"

#: One scored position of the base. All numbers are of the base alone, float64, in nats where nothing else is said.
PACK_ROW_DTYPE = np.dtype([
    ("nll", "<f8"),  # of the token that follows; float32 logits, sums in float64, the same bits as nll_base of an audit
    ("lse", "<f8"),  # ln Σ exp of the logits
    ("entropy", "<f8"),
    ("margin", "<f8"),  # ln p1 − ln p2
    ("tail_mass", "<f8"),  # probability outside the head, exact
    ("head_cross", "<f8"),  # Σ w·ln p over the head, w the stored weights
    ("tail_cross", "<f8"),  # the same over the tail; 0 in rows that are not kept whole
    ("top1", "<i4"),
    ("n_head", "<i4"),
])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBase:
    """The base that a pack was made of, as a manifest names it: no file of it is needed to print a table."""

    file: str
    sha256: str
    size_bytes: int
    type: str
    architecture: str
    n_params: int
    bpw: float | None
    bpw_core: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackArithmetic:
    """The build and the devices on which base ran."""

    backend: str
    llama_cpp_python: str
    llama_cpp_commit: str
    system_info: str
    n_gpu_layers: int
    main_gpu: int
    tensor_split: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFacts:
    """What a pack says of itself, in the metadata of its file: text as it is, everything else as JSON.

    Attributes:
        n_chunk_total: whole chunks of the text; the pack may hold fewer.
        add_bos: whether the vocabulary puts a BOS before each chunk.
        mass, max_ids, full_every: of the protocol.
        content_sha256: of all other facts and of everything in the file but the encoded rows, each chunk of which has a hash of its
            own.
    """

    format: str
    version: int
    protocol_name: str
    eval_id: str
    base: PackBase
    corpus_name: str
    corpus_sha256: str
    token_ids_sha256: str
    n_vocab: int
    add_bos: bool
    n_ctx: int
    n_chunk_total: int
    mass: float
    max_ids: int
    full_every: int
    arithmetic: PackArithmetic
    content_sha256: str

    def to_metadata(self) -> dict[str, str]:
        """One string a field, as safetensors wants it."""
        plain = record_to_json(self)
        return {key: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), allow_nan=False)
                for key, value in plain.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> PackFacts:
        """The record that `to_metadata` wrote.

        Raises:
            KeyError, TypeError, ValueError: a key is missing, unknown, or its value of another kind.
        """
        hints = typing.get_type_hints(cls)
        names = {field.name for field in fields(cls)}
        return record_from_json(cls, {key: value if hints.get(key) is str or key not in names else json.loads(value)
                                      for key, value in metadata.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReference:
    """What the summary of a tier says where the reference was a pack: which, and how far its KLD falls short.

    Attributes:
        sha256: of the pack's file.
        tail_mass: mean probability outside the heads.
        same_arithmetic: whether base and tier ran on one build and kind of device.
        n_full: rows that the pack keeps whole, from which the shortfall is estimated.
        shortfall: estimate of how much larger the mean KLD over all tokens is, nats, >= 0; None if no row is kept whole.
        shortfall_se: its standard error, None below two whole rows.
    """

    kind: str
    file: str
    sha256: str
    mass: float
    max_ids: int
    tail_mass: float
    backend: str
    same_arithmetic: bool
    n_full: int
    shortfall: float | None
    shortfall_se: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, numbers and strings, keys in the order of the fields."""
        plain: dict[str, Any] = record_to_json(self)
        return plain

    @classmethod
    def from_json(cls, data: Any) -> PackReference:
        """The record that `to_json` wrote.

        Raises:
            KeyError, TypeError: a key is missing, unknown, or its value of another kind.
        """
        return record_from_json(cls, data)

    def notes(self) -> tuple[str, ...]:
        """What a reader of the tier's KLD must know, one sentence each."""
        short = "by how much is not known, no row is kept whole"
        if self.shortfall is not None:
            error = "" if self.shortfall_se is None else f" ± {self.shortfall_se:.2g}"
            rows = f"{self.n_full} row{'s' if self.n_full != 1 else ''} kept whole"
            short = f"short by an estimated {self.shortfall:.3g}{error} nats ({rows})"
        first = (f"ref: pack, mass {self.mass:g}: KLD is a lower bound, {short}; PPL, PPL drift, Δp and same top token are exact")
        if self.same_arithmetic:
            return (first,)
        return (first, f"the pack's base ran on another build or device ({self.backend}): KLD holds what the two differ by as well")


def reference_notes(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The notes of a tier from its summary file; none where it was measured against the base itself.

    Raises:
        KeyError, TypeError: what it says of its reference cannot be read.
    """
    return PackReference.from_json(summary["ref"]).notes() if "ref" in summary else ()
