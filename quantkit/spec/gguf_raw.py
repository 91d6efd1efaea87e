"""GGUF files written from the bytes of others: metadata pairs copied as they lie there, tensor data streamed.

What gguf's reader takes ten seconds and 800 MB to decode for a header with 248,320 tokens, and may write back in another form,
is a few byte ranges here. A pair that changes is encoded anew; all others keep their exact bytes, types and order.
The headers have been read and judged by `spec.gguf_header` before; this trusts their counts, and copies little-endian files only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from quantkit.core.errors import GgufError
from quantkit.core.units import MIB
from quantkit.spec.gguf_cursor import Cursor
from quantkit.spec.gguf_header import GgufHeader, TensorInfo
from quantkit.spec.gguf_part import MAX_KEY_BYTES

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of the number types, by their ids
_UINT32, _STRING, _ARRAY = 4, 8, 9
_STEP = 4 * MIB


class RawPair(NamedTuple):
    """A metadata pair as it is stored: key, type and value together."""

    key: str
    data: bytes


class TensorSource(NamedTuple):
    """Where a tensor's bytes are."""

    path: Path
    info: TensorInfo


def read_pairs(header: GgufHeader) -> list[RawPair]:
    """The metadata pairs of a model's first file, in order, without those that say how it is split.

    Raises:
        GgufError: the file is big-endian, or changed since its header was read.
    """
    if header.big_endian:
        raise GgufError(f"{header.path}: expected a little-endian file, got a big-endian one: convert it first")
    path = header.parts[0]
    with path.open("rb", buffering=0) as file:
        handle, size = file.fileno(), os.fstat(file.fileno()).st_size
        cursor = Cursor(path, handle, size)
        cursor.skip(16)  # magic, version, number of tensors
        n_pairs = cursor.number("Q")
        pairs = [RawPair(*_read_pair(cursor, handle)) for _ in range(n_pairs)]
    if {pair.key for pair in pairs} != set(header.metadata):
        raise GgufError(f"{path}: the file changed while it was read: wait until nothing writes to it")
    return [pair for pair in pairs if not pair.key.startswith("split.")]


def _read_pair(cursor: Cursor, handle: int) -> tuple[str, bytes]:
    start = cursor.at
    key = cursor.text(MAX_KEY_BYTES)
    _skip_value(cursor, cursor.number("I"))
    return key, os.pread(handle, cursor.at - start, start)


def _skip_value(cursor: Cursor, type_id: int) -> None:
    if type_id == _STRING:
        cursor.skip(cursor.number("Q"))
    elif type_id != _ARRAY:
        cursor.skip(_SIZES[type_id])
    else:
        element, n = cursor.number("I"), cursor.number("Q")
        if element == _STRING:
            cursor.skip_strings(n)
        else:
            cursor.skip(n * _SIZES[element])


def with_uint32(pair: RawPair, value: int) -> RawPair:
    """The same key with another number, as a uint32."""
    return uint32_pair(pair.key, value)


def uint32_pair(key: str, value: int) -> RawPair:
    """A new pair of type uint32."""
    return RawPair(key, _text(key) + struct.pack("<II", _UINT32, value))


def with_first(pair: RawPair, n: int) -> RawPair:
    """An array of numbers cut to its first n elements; its element type stays."""
    at = 8 + len(pair.key.encode())
    type_id, element, n_held = struct.unpack("<IIQ", pair.data[at:at + 16].ljust(16, b"\0"))  # a bare number is shorter
    if type_id != _ARRAY or element not in _SIZES or n_held < n:
        raise GgufError(f"expected an array of at least {n} numbers as {pair.key}, got another value: convert the file again")
    head = pair.data[:at] + struct.pack("<IIQ", _ARRAY, element, n)
    return RawPair(pair.key, head + pair.data[at + 16:at + 16 + n * _SIZES[element]])


def write_gguf(file: IO[bytes], *, version: int, alignment: int, pairs: Sequence[RawPair], tensors: Sequence[TensorSource],
               on_tensor: Callable[[str, bytes], None] | None = None) -> None:
    """Write a whole file: header, then the tensors' data, each padded to the alignment.

    Args:
        file: where, from its start.
        tensors: in the order of the new file.
        on_tensor: told each piece of a tensor's data as it was read, for hashing.
    """
    written = file.write(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)))
    for pair in pairs:
        written += file.write(pair.data)
    offset = 0
    for source in tensors:
        info = source.info
        written += file.write(_text(info.name) + struct.pack(f"<I{len(info.shape)}QIQ", len(info.shape), *info.shape, info.type.id,
                                                             offset))
        offset += info.size_bytes + -info.size_bytes % alignment
    file.write(bytes(-written % alignment))
    for source in tensors:
        for piece in tensor_bytes(source):
            file.write(piece)
            if on_tensor is not None:
                on_tensor(source.info.name, piece)
        file.write(bytes(-source.info.size_bytes % alignment))


def tensor_bytes(source: TensorSource) -> Iterator[bytes]:
    """A tensor's data in pieces of at most 4 MiB.

    Raises:
        GgufError: the file ends before the tensor does.
    """
    with source.path.open("rb") as file:
        file.seek(source.info.offset)
        left = source.info.size_bytes
        while left:
            piece = file.read(min(left, _STEP))
            if not piece:
                raise GgufError(f"{source.path}: ends inside tensor {source.info.name!a}: fetch or write it again")
            left -= len(piece)
            yield piece


def sources_of(header: GgufHeader, wanted: Callable[[str], bool] = lambda name: True) -> list[TensorSource]:
    """The tensors of a model in file order, those whose name is wanted."""
    return [TensorSource(header.parts[t.part], t) for t in header.tensors if wanted(t.name)]


def merge_orders(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Both sequences' names once each: between two common names first the first's own, then the second's own.

    Names that both have, but in another order, stand where the first has them.
    """
    first, second = list(first), list(second)
    known = set(first)
    own: dict[str | None, list[str]] = {}
    anchor: str | None = None
    for name in second:
        if name in known:
            anchor = name
        else:
            own.setdefault(anchor, []).append(name)
    common = known & set(second)
    out: list[str] = []
    pending = own.pop(None, [])
    for name in first:
        if name in common:
            out += pending
            pending = own.pop(name, [])
        out.append(name)
    return out + pending


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
