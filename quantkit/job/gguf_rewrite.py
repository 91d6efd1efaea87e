"""A GGUF rewritten with other metadata or fewer tensors, its tensor data untouched and proved to be.

A byte size that is computed wrongly makes tensors overlap in a file that still loads, and whose own sha256 is right
(ik_llama.cpp#2443): so every tensor of the written file is read back and held against the bytes it was made from.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import EngineError
from quantkit.core.files import atomic_path, refuse_overwrite, require_space
from quantkit.core.units import MIB
from quantkit.spec.gguf_header import GgufHeader, TensorInfo, read_header
from quantkit.spec.gguf_raw import RawPair, TensorSource, read_pairs, sources_of, tensor_bytes, write_gguf

Hashes = Mapping[str, str]

_SCALARS = {"uint16": (2, "<H"), "uint32": (4, "<I"), "int32": (5, "<i")}  # type id, code
_STRING = 8


class Rewritten(NamedTuple):
    """A file that was written and read back."""

    path: Path
    n_tensors: int
    size_bytes: int


def text_pair(key: str, value: str) -> RawPair:
    """A metadata pair that holds a string."""
    return RawPair(key, _text(key) + struct.pack("<I", _STRING) + _text(value))


def number_pair(key: str, kind: str, value: int) -> RawPair:
    """A metadata pair that holds a uint16, a uint32 or an int32."""
    type_id, code = _SCALARS[kind]
    return RawPair(key, _text(key) + struct.pack("<I", type_id) + struct.pack(code, value))


def rewrite_gguf(source: GgufHeader, target: Path, *, keep: Callable[[str], bool] = lambda name: True,
                 set_pairs: Iterable[RawPair] = (), drop_keys: Iterable[str] = (), force: bool = False) -> Rewritten:
    """Write a model as one file, with some tensors left out and some metadata changed.

    Args:
        source: the model, single or split; its shards become one file and `split.*` keys are dropped.
        target: never one of the source's files.
        keep: tells by name which tensors are wanted.
        set_pairs: replace the pairs of their keys, in place; new keys come last.
        drop_keys: keys to leave out.
        force: an existing target may be replaced.

    Raises:
        InputError: the target is an input, or exists.
        GgufError: a source that is big-endian, or changes while it is read.
        EngineError: a tensor of the written file does not have its source's bytes.
        NoSpace: the file will not fit.
    """
    refuse_overwrite(target, source.parts, force=force)
    changed, dropped = {pair.key: pair for pair in set_pairs}, set(drop_keys)
    pairs = [changed.pop(pair.key, pair) for pair in read_pairs(source) if pair.key not in dropped]
    return write_model(target, source, [*pairs, *changed.values()], sources_of(source, keep))


def write_model(target: Path, like: GgufHeader, pairs: Sequence[RawPair], tensors: Sequence[TensorSource]) -> Rewritten:
    """Write one file under a temporary name, read it back, compare every tensor's bytes, rename.

    Args:
        like: whose GGUF version and alignment the file has.
        pairs, tensors: all of the file, in order.

    Raises:
        EngineError, GgufError, NoSpace: as `rewrite_gguf`.
    """
    n_bytes = sum(t.info.size_bytes + like.alignment for t in tensors) + sum(len(p.data) for p in pairs) + MIB
    require_space(target.parent, n_bytes, f"writing {target.name}")
    with atomic_path(target) as temp:
        expected = write_hashed(temp, like.version, like.alignment, pairs, tensors)
        written = read_header(temp)
        compare_tensors(sources_of(written), expected)
        size_bytes = written.file_bytes
    return Rewritten(target, len(tensors), size_bytes)


def write_hashed(path: Path, version: int, alignment: int, pairs: Sequence[RawPair], tensors: Sequence[TensorSource]) -> Hashes:
    """Write a file and return the sha256 of each tensor's bytes as they were read."""
    hashes: dict[str, Any] = {source.info.name: hashlib.sha256() for source in tensors}
    with path.open("wb") as file:
        write_gguf(file, version=version, alignment=alignment, pairs=pairs, tensors=tensors,
                   on_tensor=lambda name, piece: hashes[name].update(piece))
    return {name: digest.hexdigest() for name, digest in hashes.items()}


def compare_tensors(written: Sequence[TensorSource], expected: Hashes) -> None:
    """Hold every tensor of a written file against the sha256 of the bytes it was made from.

    Raises:
        EngineError: other tensors than expected, or the first one whose bytes differ.
    """
    names = [source.info.name for source in written]
    if set(names) != set(expected):
        raise EngineError(f"expected {len(expected)} tensors in {written[0].path if written else 'a written file'}, found "
                          f"{len(names)}: write it again")
    for source in written:
        if tensor_sha256(source) != expected[source.info.name]:
            raise EngineError(f"the bytes of {source.info.name} in {source.path} are not those of its source: the disk or the copy "
                              "is faulty; write it again")


def tensor_sha256(source: TensorSource) -> str:
    """The sha256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in tensor_bytes(source):
        digest.update(piece)
    return digest.hexdigest()


def table_bytes(info: TensorInfo) -> int:
    """Bytes of one row of the tensor table."""
    return 8 + len(info.name.encode()) + 4 + 8 * len(info.shape) + 4 + 8


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
