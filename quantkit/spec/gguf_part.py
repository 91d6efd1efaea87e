"""One GGUF file's header, read with bounds: metadata and tensor table. Tensor data is never read.

Nothing in the file is trusted. Every count and length is held against the bytes that are left before anything is allocated,
long arrays are skimmed, and whatever is odd is a `GgufError` that names the file, the key or tensor, what was expected and what
was found. A file with a hole where the data should be is a valid input.

Source: ggml/src/gguf.cpp (gguf_init_from_reader) of the pinned llama.cpp. Stricter than that: no zero dimensions, no empty
names or ones with a NUL byte, UTF-8 where text is kept. Laxer: gaps between tensors are legal here, both byte orders are read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import GgufError
from quantkit.core.units import MIB
from quantkit.spec.gguf_cursor import MAX_KEYS, MAX_KEYS_OF_ALL, MAX_TENSORS, MAX_TEXT_BYTES, Budget, Cursor
from quantkit.spec.tensor_types import TENSOR_TYPES_BY_ID, TensorType

# Far from any real header, and small enough to bound memory together with the cursor's limits.
MAX_KEPT_VALUES = 512  # llama.cpp's limit of layers, so every per-layer array is kept
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the NUL
MIN_ALIGNMENT = 8
MAX_ALIGNMENT = MIB
DEFAULT_ALIGNMENT = 32

_INT64_MAX = (1 << 63) - 1
_TYPE_NAMES = dict(enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array",
                              "uint64", "int64", "float64")))
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_UINT16, _UINT32, _INT32, _BOOL, _STRING, _ARRAY = 2, 4, 5, 7, 8, 9
# The library refuses the file, or aborts, when one of these has another type.
_FIXED_TYPES = {"general.alignment": _UINT32, "split.no": _UINT16, "split.count": _UINT16, "split.tensors.count": _INT32}
_MAGIC = b"GGUF"
_NOT_GGUF = {  # the first four bytes of what is often found in a GGUF's place
    b"\0\0\0\0": "zeros: a quantize run that was interrupted leaves such a file; write it again",
    b"vers": "the text of a Git LFS pointer: fetch the file itself with `git lfs pull`",
    b"<!DO": "a web page: the download failed; fetch the file again",
    b"<htm": "a web page: the download failed; fetch the file again",
    b"PK\3\4": "a zip archive, perhaps a PyTorch checkpoint: convert it to GGUF first",
    b"lmgg": "a GGML file from before GGUF: convert the original model again",
    b"tjgg": "a GGML file from before GGUF: convert the original model again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayValue:
    """A metadata array. `values` is None where it is longer than `MAX_KEPT_VALUES`: it was skimmed, never held."""

    element_type: str
    n: int
    values: tuple[int | float | bool | str, ...] | None


Value = int | float | bool | str | ArrayValue


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in ggml's order, row length ne0 first; `offset` counts from its file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size_bytes: int
    part: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[1:])


class Part(NamedTuple):
    """What one file holds."""

    path: Path
    version: int
    big_endian: bool
    alignment: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_bytes: int


def read_part(path: Path, budget: Budget | None = None) -> Part:
    """One file's metadata and tensor table, checked by themselves.

    Args:
        budget: shared with the other files of a split, and made smaller by this one.

    Raises:
        GgufError: see the module.
    """
    try:
        if path.exists() and not path.is_file():
            raise GgufError(f"{path}: expected a GGUF file, got a folder or a device: give the file itself")
        with path.open("rb", buffering=0) as file:
            return _parse(path, Cursor(path, file.fileno(), os.fstat(file.fileno()).st_size, budget))
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from error


def _parse(path: Path, cursor: Cursor) -> Part:
    version, big_endian = _read_version(cursor)
    cursor.doing = "the number of tensors and keys"
    n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
    # an empty key of one byte takes 8 + 4 + 1 bytes, an unnamed tensor of one dimension 8 + 4 + 8 + 4 + 8
    for n, what, shortest, limit in ((n_keys, "metadata keys", 13, MAX_KEYS), (n_tensors, "tensors", 32, MAX_TENSORS)):
        cursor.doing = f"a header of {n} {what}"
        cursor.require(n * shortest)
        if n > limit:
            raise cursor.fail(f"expected at most {limit} {what}, got {n}: the file is damaged or not a model")
    cursor.budget.n_keys -= n_keys
    cursor.budget.n_tensors -= n_tensors
    if min(cursor.budget.n_keys, cursor.budget.n_tensors) < 0:
        raise cursor.fail(f"expected at most {MAX_TENSORS} tensors and {MAX_KEYS_OF_ALL} metadata keys in all shards together, got "
                          "more: the files are damaged or not a model")
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    tensors = _read_tensors(cursor, n_tensors, metadata)
    data_offset = cursor.at + (-cursor.at % alignment if tensors else 0)  # as ggml: no padding without tensors
    placed = tuple(replace(t, offset=data_offset + t.offset) for t in tensors)
    _check_layout(cursor, placed, alignment)
    cursor.budget.header_bytes -= cursor.at
    return Part(path, version, big_endian, alignment, metadata, placed, data_offset, cursor.size)


def _read_version(cursor: Cursor) -> tuple[int, bool]:
    """Magic, version and byte order. The magic reads the same in both orders; the version does not."""
    if not cursor.size:
        raise cursor.fail("expected a GGUF file, got an empty one", "fetch or write it again")
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise cursor.fail(f"expected the first four bytes {_MAGIC!r}, got {magic!r}, {_NOT_GGUF.get(magic, 'not a GGUF file')}")
    cursor.doing = "the version"
    raw = cursor.take(4)
    big_endian = raw[:2] == b"\0\0" != raw[2:]
    cursor.order = ">" if big_endian else "<"
    version = int.from_bytes(raw, "big" if big_endian else "little")
    if version not in (2, 3):
        raise cursor.fail(f"expected GGUF version 2 or 3, got {version}{': GGUFv1 is no longer supported' if version == 1 else ''}",
                          "convert the original model again")
    return version, big_endian


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for i in range(n_keys):
        cursor.doing = f"metadata key {i} of {n_keys}"
        key = cursor.text(MAX_KEY_BYTES)
        if not key or "\0" in key:
            raise cursor.fail(f"expected a name for metadata key {i} of {n_keys}, got {_shown(key)}")
        if key in metadata:
            raise cursor.fail(f"expected unique metadata keys, got {_shown(key)} twice")
        cursor.doing = f"the value of {_shown(key)}"
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: Cursor, key: str) -> Value:
    type_id = cursor.number("I")
    if key in _FIXED_TYPES and type_id != _FIXED_TYPES[key]:
        raise cursor.fail(f"expected {_shown(key)} to be of type {_TYPE_NAMES[_FIXED_TYPES[key]]}, "
                          f"got {_TYPE_NAMES.get(type_id, type_id)}")
    if type_id != _ARRAY:
        return _read_one(cursor, type_id)
    type_id, n = cursor.number("I"), cursor.number("Q")
    if type_id == _ARRAY or type_id not in _TYPE_NAMES:
        raise cursor.fail(f"expected an array of numbers, bools or strings as {cursor.doing}, "
                          f"got elements of type {_TYPE_NAMES.get(type_id, type_id)}, which llama.cpp does not read")
    if n <= MAX_KEPT_VALUES:
        values = tuple(_read_one(cursor, type_id) for _ in range(n))
        return ArrayValue(element_type=_TYPE_NAMES[type_id], n=n, values=values)
    if type_id == _STRING:
        cursor.skip_strings(n)
    else:
        cursor.skip(n * struct.calcsize("<" + _CODES[type_id]))
    return ArrayValue(element_type=_TYPE_NAMES[type_id], n=n, values=None)


def _read_one(cursor: Cursor, type_id: int) -> int | float | bool | str:
    if type_id == _STRING:
        return cursor.text(MAX_TEXT_BYTES)
    if type_id not in _CODES:
        raise cursor.fail(f"{cursor.doing} is of the unknown type {type_id}")
    value: int | float = cursor.number(_CODES[type_id])
    if type_id != _BOOL:
        return value
    if value not in (0, 1):
        raise cursor.fail(f"expected 0 or 1 for {cursor.doing}, a bool, got {value}")
    return value == 1


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)  # _FIXED_TYPES
    if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"expected 'general.alignment' to be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, "
                          f"got {alignment}")
    return alignment


def _read_tensors(cursor: Cursor, n_tensors: int, metadata: Mapping[str, Value]) -> list[TensorInfo]:
    """The tensor table; offsets still count from the start of the data."""
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    assert isinstance(count, int) and isinstance(number, int)  # _FIXED_TYPES  # noqa: PT018
    part = number if count > 1 else 0
    tensors: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        cursor.doing = f"the name of tensor {i} of {n_tensors}"
        tensor = _read_tensor(cursor, part)
        if tensor.name in tensors:
            raise cursor.fail(f"expected unique tensor names, got {_shown(tensor.name)} twice")
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _read_tensor(cursor: Cursor, part: int) -> TensorInfo:
    name = cursor.text(MAX_NAME_BYTES)
    if not name or "\0" in name:
        raise cursor.fail(f"expected a name for {cursor.doing}, got {_shown(name)}")
    cursor.doing = f"tensor {_shown(name)}"
    n_dims = cursor.number("I")
    if not 1 <= n_dims <= 4:
        raise cursor.fail(f"expected 1 to 4 dimensions for {cursor.doing}, got {n_dims}")
    shape = tuple(cursor.number("Q") for _ in range(n_dims))
    if 0 in shape:
        raise cursor.fail(f"expected dimensions above 0 for {cursor.doing}, got {shape}")
    type_id, offset = cursor.number("I"), cursor.number("Q")
    type_ = TENSOR_TYPES_BY_ID.get(type_id)
    if type_ is None:
        raise cursor.fail(f"{cursor.doing} has the unknown type id {type_id}: it was removed from llama.cpp, or is newer than "
                          "the pinned version", "choose a file of other types")
    if shape[0] % type_.block_size:
        raise cursor.fail(f"expected rows of {cursor.doing} to be divisible by {type_.block_size}, the block of {type_.name}, "
                          f"got {shape[0]} elements")
    size_bytes = math.prod(shape[1:]) * type_.row_bytes(shape[0])
    if max(math.prod(shape), size_bytes) > _INT64_MAX:
        raise cursor.fail(f"expected the size of {cursor.doing} to fit 63 bits, got the shape {shape} of {type_.name}")
    return TensorInfo(name=name, shape=shape, type=type_, offset=offset, size_bytes=size_bytes, part=part)


def _check_layout(cursor: Cursor, tensors: Sequence[TensorInfo], alignment: int) -> None:
    """Tensors start aligned, end within the file and do not overlap. Gaps are legal here."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        name = _shown(tensor.name)
        if tensor.offset % alignment:
            raise cursor.fail(f"expected tensor {name} to start at a multiple of {alignment}, got byte {tensor.offset}")
        if tensor.offset < end:
            raise cursor.fail(f"tensor {name} starts at byte {tensor.offset}, inside tensor {before}, which ends at byte {end}")
        end, before = tensor.offset + tensor.size_bytes, name
        if end > cursor.size:
            raise cursor.fail(f"tensor {name} ends at byte {end}, but the file ends at byte {cursor.size}: "
                              "it is truncated or damaged", "fetch or write it again")


def _shown(text: str) -> str:
    """A name out of the file for a message: quoted, control characters escaped, cut where it is long."""
    return ascii(text) if len(text) <= 80 else f"{text[:80]!a}..."
