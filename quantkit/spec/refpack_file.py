"""The container of a reference pack: safetensors, written as a stream and read in pieces.

The safetensors library writes only what is in memory as a whole and hashes nothing, so the container is written and read here;
the layout is its own (little-endian length, JSON header, tensors without gaps), and its tools open the file.

    tokens       (n_tokens,) I32              the whole text
    chunks       (n_chunk,) I32               numbers of the chunks, rising
    articles     (n_chunk,) I32               the article that each counts to
    row.<name>   (n_chunk, n_scored)          a column of PACK_ROW_DTYPE
    offsets      (n_chunk + 1, 2) I64         where each chunk's heads, and its tails, begin and end
    sha256       (n_chunk, 32) U8             of a chunk's heads and tails, one behind the other
    heads, tails (n_bytes,) U8                encoded rows; `measure.refpack_code` reads them
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import canonical_json, sha256_json
from quantkit.spec.json_records import record_to_json
from quantkit.spec.refpack_records import FORMAT, PACK_ROW_DTYPE, REFPACK_VERSION, PackFacts

Array = npt.NDArray[Any]
_DTYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 1 << 20
_LENGTH = 8
_COLUMNS = tuple(PACK_ROW_DTYPE.names or ())


class _Place(NamedTuple):
    """Where a tensor lies in the file, in bytes from its start."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class ChunkBytes(NamedTuple):
    """One chunk's encoded rows."""

    heads: bytes
    tails: bytes


class PackContent(NamedTuple):
    """Everything of a pack but the encoded rows; `rows` is (n_chunk, n_scored) of PACK_ROW_DTYPE."""

    tokens: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int32]
    articles: npt.NDArray[np.int32]
    rows: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]
    sha256: npt.NDArray[np.uint8]

    def tensors(self) -> dict[str, Array]:
        """By name, in the file's order: large alignments first, so that every tensor lies at a multiple of its own."""
        columns = {f"row.{name}": np.ascontiguousarray(self.rows[name]) for name in _COLUMNS}
        wide = {name: column for name, column in columns.items() if column.dtype.itemsize == 8}
        narrow = {name: column for name, column in columns.items() if name not in wide}
        return {**wide, "offsets": self.offsets, **narrow, "tokens": self.tokens, "chunks": self.chunks, "articles": self.articles,
                "sha256": self.sha256}

    def hash(self) -> str:
        """Hex sha256 over names, shapes and bytes of all tensors."""
        digest = hashlib.sha256()
        for name, array in self.tensors().items():
            digest.update(canonical_json([name, _NAMES[array.dtype], list(array.shape)]))
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def seal(facts: PackFacts, content: PackContent) -> PackFacts:
    """The facts with the hash of themselves and of the content."""
    plain = {key: value for key, value in record_to_json(facts).items() if key != "content_sha256"}
    return dataclasses.replace(facts, content_sha256=sha256_json({"facts": plain, "content": content.hash()}))


def write_refpack(file: BinaryIO, facts: PackFacts, content: PackContent, chunks: Iterable[ChunkBytes]) -> None:
    """Write a pack; the same arguments give the same bytes.

    Args:
        file: empty, seekable: heads and tails each lie in one piece, and are written as they come.
        facts: they are sealed here.
        chunks: in the order of `content.chunks`.
    """
    tensors = content.tensors()
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {name: (_NAMES[a.dtype], a.shape) for name, a in tensors.items()}
    shapes |= {name: ("U8", (int(content.offsets[-1, i]),)) for i, name in enumerate(("heads", "tails"))}
    start = _write_header(file, seal(facts, content).to_metadata(), shapes)
    for array in tensors.values():
        file.write(np.ascontiguousarray(array).data)
        start += array.nbytes
    bases = (start, start + int(content.offsets[-1, 0]))
    for i, chunk in enumerate(chunks):
        for base, offset, data in zip(bases, content.offsets[i], chunk, strict=True):
            file.seek(base + int(offset))
            file.write(data)


def _write_header(file: BinaryIO, metadata: Mapping[str, str], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write the header; returns the offset of the first tensor."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(_LENGTH, "little"))
    file.write(header)
    return _LENGTH + len(header)


class Refpack:
    """A pack that is open: its facts and numbers in memory, its encoded rows read chunk by chunk and held against their hashes.

    Raises:
        InputError: the file is no pack, of another version, or damaged; names what is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        places, metadata = _read_header(path)
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path} is not a reference pack: expected a safetensors file with format {FORMAT}, found "
                             f"{metadata.get('format', 'none')}: make one with `quantkit refpack make`")
        if metadata.get("version") != str(REFPACK_VERSION):
            raise InputError(f"{path} is a reference pack of version {metadata.get('version', '?')[:20]}, expected "
                             f"{REFPACK_VERSION}: use the quantkit that it was made with, or make it anew")
        try:
            self.facts = PackFacts.from_metadata(metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"its metadata cannot be read: {error}") from error
        self._places = places
        self.content = self._read_content()
        self._index = {int(chunk): i for i, chunk in enumerate(self.content.chunks)}
        self._check()

    @property
    def n_scored(self) -> int:
        """Rows of a chunk."""
        return self.facts.n_ctx - 1 - self.facts.n_ctx // 2

    def chunk_rows(self, chunk: int) -> npt.NDArray[np.void]:
        """(n_scored,) of PACK_ROW_DTYPE."""
        rows: npt.NDArray[np.void] = self.content.rows[self._index[chunk]]
        return rows

    def chunk_bytes(self, chunk: int) -> ChunkBytes:
        """The encoded rows of a chunk, hash checked.

        Raises:
            InputError: they are not what was written; names the chunk.
        """
        i = self._index[chunk]
        parts = []
        with self.path.open("rb") as file:
            for j, name in enumerate(("heads", "tails")):
                start, stop = (int(at) for at in self.content.offsets[i:i + 2, j])
                file.seek(self._places[name].start + start)
                parts.append(file.read(stop - start))
        if hashlib.sha256(b"".join(parts)).digest() != self.content.sha256[i].tobytes():
            raise _damaged(self.path, f"the rows of chunk {chunk} do not have their hash")
        return ChunkBytes(*parts)

    def check_rows(self) -> None:
        """Read every chunk's encoded rows and hold them against their hashes.

        Raises:
            InputError: some are damaged; names the first chunk.
        """
        for chunk in self._index:
            self.chunk_bytes(chunk)

    def _read_content(self) -> PackContent:
        rows = None
        for name in _COLUMNS:
            column = self._read(f"row.{name}", PACK_ROW_DTYPE[name], 2)
            rows = np.empty(column.shape, PACK_ROW_DTYPE) if rows is None else rows
            if column.shape != rows.shape:
                raise _damaged(self.path, f"the columns of its rows have shapes {rows.shape} and {column.shape}")
            rows[name] = column
        assert rows is not None
        i4, i8 = _DTYPES["I32"], _DTYPES["I64"]
        return PackContent(self._read("tokens", i4, 1), self._read("chunks", i4, 1), self._read("articles", i4, 1), rows,
                           self._read("offsets", i8, 2), self._read("sha256", _DTYPES["U8"], 2))

    def _read(self, name: str, dtype: np.dtype[Any], n_dim: int) -> Array:
        place = self._places.get(name)
        if place is None or place.dtype != dtype or len(place.shape) != n_dim:
            raise _damaged(self.path, f"expected a tensor {name} of {n_dim} dimensions and type {dtype}, found none such")
        with self.path.open("rb") as file:
            file.seek(place.start)
            return np.frombuffer(file.read(place.stop - place.start), dtype).reshape(place.shape)

    def _check(self) -> None:
        content, facts = self.content, self.facts
        if seal(facts, content) != facts:
            raise _damaged(self.path, "its facts and numbers do not have the hash that its metadata names")
        if hashlib.sha256(content.tokens.tobytes()).hexdigest() != facts.token_ids_sha256:
            raise _damaged(self.path, "its token ids do not have the hash that its metadata names")
        n = len(content.chunks)
        offsets = content.offsets
        sound = (n >= 1 and facts.n_ctx >= 4 and content.rows.shape == (n, self.n_scored) and offsets.shape == (n + 1, 2)
                 and content.sha256.shape == (n, 32) and content.articles.shape == (n,) and (np.diff(content.chunks) > 0).all()
                 and content.chunks[0] >= 0 and content.chunks[-1] < len(content.tokens) // facts.n_ctx
                 and not offsets[0].any() and (np.diff(offsets, axis=0) >= 0).all()
                 and all(name in self._places and self._places[name].dtype == _DTYPES["U8"]
                         and self._places[name].shape == (int(offsets[-1, i]),) for i, name in enumerate(("heads", "tails"))))
        if not sound:
            raise _damaged(self.path, "its tensors do not fit each other")


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"the reference pack {path} is damaged: {what}; fetch it again, or make it anew with `quantkit refpack make`")


def _read_header(path: Path) -> tuple[dict[str, _Place], dict[str, str]]:
    """Tensors and metadata of a safetensors file, every offset checked against the file's size."""
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size_bytes - _LENGTH):
                raise InputError(f"{path} is not a reference pack: expected a safetensors file of quantkit, found no header of "
                                 "one; make one with `quantkit refpack make`")
            entries = json.loads(file.read(length))
        metadata = entries.pop("__metadata__", {})
        places = dict(_places(entries, _LENGTH + length, size_bytes))
        if not all(isinstance(item, str) for pair in metadata.items() for item in pair):
            raise TypeError("metadata that is not text")
    except OSError as error:
        raise InputError(f"cannot read the reference pack {path}: {error.strerror}; check the path") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {error}") from error
    return places, metadata


def _places(entries: Mapping[str, Any], start: int, size_bytes: int) -> Iterator[tuple[str, _Place]]:
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first, last = entry["data_offsets"]
        shape: Sequence[int] = entry["shape"]
        dtype = _DTYPES[entry["dtype"]]
        if not all(isinstance(n, int) and n >= 0 for n in (first, last, *shape)):
            raise ValueError(f"tensor {name} has a size that is no number")
        if first != reached or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} lies at {first} to {last}, expected {math.prod(shape)} elements from {reached}")
        reached = last
        yield name, _Place(dtype, tuple(shape), start + first, start + last)
    if start + reached != size_bytes:
        raise ValueError(f"the file has {size_bytes} bytes, expected {start + reached}")
