"""The header of a GGUF model, single or split: metadata and tensor table of all its files together.

`read_header` follows the shards from any one of them. What one file holds, and why it can be trusted, is `spec.gguf_part`; what
the metadata mean is `spec.model`. Writing files and reading tensor data is the gguf library's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_cursor import Budget
from quantkit.spec.gguf_part import ArrayValue, Part, TensorInfo, Value, read_part

__all__ = ["ArrayValue", "GgufHeader", "TensorInfo", "Value", "read_header"]

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)

_T = TypeVar("_T", int, float, bool, str, ArrayValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensor table of a model file, all its parts together.

    `parts` are all files in order, `data_offset` is where each one's tensor data start, `part_alignment` how they are aligned;
    `tensors` follow file order, part by part. Metadata and `alignment` are those of the first part.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    big_endian: bool
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: tuple[int, ...]
    part_alignment: tuple[int, ...]
    file_bytes: int

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The value of a key; None where there is no such key.

        Raises:
            GgufError: the value is of another type than `kind`.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(f"{self.path}: expected {key} to be of type {kind.__name__}, got {_shown(value)}; fetch or convert "
                            "the file again")
        return value


def read_header(path: Path) -> GgufHeader:
    """Header of a GGUF, found from any one of its parts.

    Args:
        path: a single file, or any shard of a split one (`NAME-00002-of-00003.gguf`); all shards must lie beside it.

    Raises:
        GgufError: the file, or a shard, is missing, truncated, damaged, hostile or of a version that cannot be read.
    """
    given = read_part(path)
    budget = Budget()
    parts = [read_part(shard, budget) for shard in shards] if len(shards := _split_paths(given)) > 1 else [given]
    if len(parts) > 1:
        _check_split(parts)
    first = parts[0]
    return GgufHeader(
        path=path,
        parts=tuple(p.path for p in parts),
        version=first.version,
        big_endian=first.big_endian,
        alignment=first.alignment,
        metadata=first.metadata,
        tensors=tuple(t for p in parts for t in p.tensors),
        data_offset=tuple(p.data_offset for p in parts),
        part_alignment=tuple(p.alignment for p in parts),
        file_bytes=sum(p.file_bytes for p in parts),
    )


def _split_paths(given: Part) -> list[Path]:
    """All files of the model, in order; the file itself where it is not split.

    Source: llama_get_list_splits; a file is split when `split.count` is above 1, whatever its name.
    """
    count = given.metadata.get("split.count", 0)
    assert isinstance(count, int)  # _FIXED_TYPES
    if count <= 1:
        return [given.path]
    match = _SPLIT_NAME.fullmatch(given.path.name)
    number = given.metadata.get("split.no")
    if not isinstance(number, int):
        raise GgufError(f"{given.path}: expected a key split.no beside split.count {count}, got none: split the model again")
    if match is None or (int(match["no"]) - 1, int(match["count"])) != (number, count):
        raise GgufError(f"{given.path}: expected a file name that ends in -{number + 1:05d}-of-{count:05d}.gguf, as its "
                        "split.no and split.count say, got another: give the shard its name back")
    paths = [given.path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if missing := [p.name for p in paths if not p.exists()]:
        raise GgufError(f"{given.path}: expected all {count} shards beside it, missing {', '.join(missing[:5])}"
                        f"{' and more' if len(missing) > 5 else ''}: fetch the missing shards")
    return paths


def _check_split(parts: Sequence[Part]) -> None:
    """The shards belong together: numbers, counts, byte order, and tensors that are each there once."""
    first = parts[0]
    n_tensors = sum(len(p.tensors) for p in parts)
    for i, part in enumerate(parts):
        for key, expected in (("split.no", i), ("split.count", len(parts)), ("split.tensors.count", n_tensors)):
            if part.metadata.get(key) != expected:
                raise GgufError(f"{part.path}: expected {key} {expected}, got {part.metadata.get(key, 'no such key')}: "
                                "the shards are of different splits; put those of one together")
        if part.big_endian != first.big_endian:
            raise GgufError(f"{part.path}: expected the byte order of {first.path.name}, got the other one: split the model again")
    seen = set()
    for tensor in (t for p in parts for t in p.tensors):
        if tensor.name in seen:
            raise GgufError(f"{parts[tensor.part].path}: expected unique tensor names, got {tensor.name!a} in two shards; split "
                            "the model again")
        seen.add(tensor.name)


def _shown(value: Value) -> str:
    """A value out of the file for a message."""
    if isinstance(value, ArrayValue):
        return f"an array of {value.n} {value.element_type}"
    return f"the {type(value).__name__} {value!a:.80}"
