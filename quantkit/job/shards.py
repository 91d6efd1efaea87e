"""A model split into shards below a size, and merged again.

    PREFIX-00001-of-00003.gguf    all metadata and the first tensors
    PREFIX-00002-of-00003.gguf    tensors, in the order of the model
    ...

Each shard has the keys split.no, split.count and split.tensors.count. Limits are in bytes of the file, header included: a hub
that takes 50 GB takes 50 * 10^9 bytes, which is less than 50 GiB. Names and keys are those of llama.cpp's gguf-split; unlike there
a shard never exceeds the limit, and what is written is read back and compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import EngineError, InputError
from quantkit.core.files import atomic_path, refuse_overwrite, require_space
from quantkit.job.gguf_rewrite import Hashes, Rewritten, compare_tensors, number_pair, rewrite_gguf, table_bytes, write_hashed
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.gguf_part import DEFAULT_ALIGNMENT, read_part
from quantkit.spec.gguf_raw import RawPair, TensorSource, read_pairs, sources_of

HUB_LIMIT_BYTES = 50 * 10**9  # a file on the hub; decimal, as the hub counts

_FIXED_BYTES = 24  # magic, version, two counts
_MAX_SHARDS = 2**16 - 1  # split.count is a uint16


class Shard(NamedTuple):
    """What one file of a split holds, and the exact size of the file."""

    pairs: tuple[RawPair, ...]
    tensors: tuple[TensorSource, ...]
    alignment: int
    size_bytes: int


def split_file(source: Path, prefix: Path, max_bytes: int, *, force: bool = False) -> list[Rewritten]:
    """Split a model into shards of at most so many bytes each.

    Args:
        source: a GGUF, or any shard of a split one.
        prefix: the shards' path without `-00001-of-0000N.gguf`; an ending `.gguf` is dropped.
        max_bytes: the largest file, header included.
        force: existing outputs may be replaced; an input never.

    Returns:
        The shards, in order.

    Raises:
        InputError: the model fits one file; a tensor or the metadata do not; an output is an input or exists.
        GgufError, EngineError, NoSpace: see `rewrite_gguf`.
    """
    header = read_header(source)
    shards = deal_tensors(header, read_pairs(header), max_bytes)
    targets = [shard_path(prefix, i, len(shards)) for i in range(len(shards))]
    for target in targets:
        refuse_overwrite(target, header.parts, force=force)
    require_space(prefix.parent, sum(shard.size_bytes for shard in shards), f"splitting {source.name}")
    with contextlib.ExitStack() as stack:
        # left in reverse order: the first shard, by which a model is named, appears last
        temps = [stack.enter_context(atomic_path(target)) for target in targets]
        for temp, shard in zip(temps, shards, strict=True):
            expected = write_hashed(temp, header.version, shard.alignment, shard.pairs, shard.tensors)
            _check_shard(temp, shard, expected)
    return [Rewritten(target, len(shard.tensors), shard.size_bytes) for target, shard in zip(targets, shards, strict=True)]


def merge_file(source: Path, target: Path, *, force: bool = False) -> Rewritten:
    """Write a split model as one file: its metadata without the `split.*` keys, its tensors in order.

    Raises:
        InputError: the model is a single file already; the target is one of its shards, or exists.
        GgufError, EngineError, NoSpace: see `rewrite_gguf`.
    """
    header = read_header(source)
    if len(header.parts) == 1:
        raise InputError(f"expected a shard of a split model, got {source}, which is a single file: there is nothing "
                         "to merge; keep it as it is")
    return rewrite_gguf(header, target, force=force)


def deal_tensors(header: GgufHeader, pairs: Sequence[RawPair], max_bytes: int) -> list[Shard]:
    """Which tensors go to which shard: in order, each shard filled as far as it goes.

    Raises:
        InputError: a tensor that fits no shard, by name; metadata that do not fit; a model that fits one file.
    """
    first, other = _Filling(pairs, header.alignment), _Filling((), DEFAULT_ALIGNMENT)
    if first.size_bytes > max_bytes:
        raise InputError(f"expected the metadata of {header.path} to fit a shard of {max_bytes} bytes, got {first.size_bytes}: "
                         "choose a larger --max-size")
    filled = [first]
    for tensor in sources_of(header):
        if (needed := other.size_with(tensor)) > max_bytes:
            raise InputError(f"expected every tensor of {header.path} to fit a shard of {max_bytes} bytes, got {tensor.info.name}, "
                             f"which needs {needed}: choose a larger --max-size")
        if filled[-1].size_with(tensor) > max_bytes:
            filled.append(_Filling((), DEFAULT_ALIGNMENT))
        filled[-1].add(tensor)
    if len(filled) == 1:
        raise InputError(f"expected a model larger than {max_bytes} bytes, got {header.path}, which fits one file: there is "
                         "nothing to split; keep it as it is, or choose a smaller --max-size")
    if len(filled) > _MAX_SHARDS:
        raise InputError(f"expected at most {_MAX_SHARDS} shards, got {len(filled)}: choose a larger --max-size")
    return [Shard((*f.pairs, *_split_pairs(i, len(filled), len(header.tensors))), tuple(f.tensors), f.alignment, f.size_bytes)
            for i, f in enumerate(filled)]


def shard_path(prefix: Path, index: int, count: int) -> Path:
    """The name that llama.cpp expects of a shard: numbered from 1, five digits."""
    return prefix.with_name(f"{prefix.name.removesuffix('.gguf')}-{index + 1:05d}-of-{count:05d}.gguf")


class _Filling:
    """A shard while tensors are dealt to it, and what its file will weigh."""

    def __init__(self, pairs: Sequence[RawPair], alignment: int) -> None:
        self.pairs = tuple(pairs)
        self.alignment = alignment
        self.tensors: list[TensorSource] = []
        self._header = _FIXED_BYTES + sum(len(p.data) for p in (*pairs, *_split_pairs(0, 0, 0)))
        self._data = 0

    @property
    def size_bytes(self) -> int:
        return _padded(self._header, self.alignment) + self._data

    def size_with(self, tensor: TensorSource) -> int:
        return (_padded(self._header + table_bytes(tensor.info), self.alignment) + self._data
                + _padded(tensor.info.size_bytes, self.alignment))

    def add(self, tensor: TensorSource) -> None:
        self.tensors.append(tensor)
        self._header += table_bytes(tensor.info)
        self._data += _padded(tensor.info.size_bytes, self.alignment)


def _split_pairs(index: int, count: int, n_tensors: int) -> tuple[RawPair, ...]:
    return (number_pair("split.no", "uint16", index), number_pair("split.count", "uint16", count),
            number_pair("split.tensors.count", "int32", n_tensors))


def _check_shard(path: Path, shard: Shard, expected: Hashes) -> None:
    part = read_part(path)
    compare_tensors([TensorSource(path, info) for info in part.tensors], expected)
    if part.file_bytes != shard.size_bytes:  # the limit was promised for this size
        raise EngineError(f"expected {shard.size_bytes} bytes in {path.name}, wrote {part.file_bytes}: write it again")


def _padded(n_bytes: int, alignment: int) -> int:
    return n_bytes + -n_bytes % alignment
