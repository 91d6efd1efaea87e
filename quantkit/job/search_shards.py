"""Files of one group of tensors each, from which trials are composed.

    first.gguf              all metadata, and the tensors that the search leaves alone
    <type>/<group>.gguf     one group of tensors at one type, cut out of a whole file that was quantized to that type

The bytes of a tensor depend on its own weights, its type and its importances alone, so they are those of any plan's file. Each
type's whole file is deleted once it is cut. All files of one index are interchangeable: they say the same place in the split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from quantkit.core.files import atomic_path, sha256_json
from quantkit.job.gguf_rewrite import number_pair
from quantkit.spec.gguf_header import GgufHeader, TensorInfo
from quantkit.spec.gguf_part import read_part
from quantkit.spec.gguf_raw import RawPair, TensorSource, read_pairs, sources_of, write_gguf
from quantkit.spec.tensor_types import TENSOR_TYPES

_ALIGNMENT = 32


class ShardStore:
    """The files of one search.

    Args:
        folder: of these inputs alone; what lies there is whole, since files appear by rename.
        base: the base's header.
        groups: name of each group to the names of its tensors, in the order of the split.
    """

    def __init__(self, folder: Path, base: GgufHeader, groups: Mapping[str, Sequence[str]]) -> None:
        self._folder, self._base, self.groups = folder, base, {name: tuple(tensors) for name, tensors in groups.items()}
        self._index = {group: i + 1 for i, group in enumerate(groups)}

    def write_base(self) -> None:
        """The first file, and every group as the base has it."""
        moved = {name for names in self.groups.values() for name in names}
        first = self._folder / "first.gguf"
        if not first.exists():
            self._write(first, [*read_pairs(self._base), *self._split_pairs(0)],
                        sources_of(self._base, lambda name: name not in moved))
        self.cut(self._base, "base")

    def cut(self, header: GgufHeader, kind: str, groups: Sequence[str] | None = None) -> None:
        """The files of some groups, or of all, from a file that holds them."""
        for group in self.groups if groups is None else groups:
            target = self.path(group, kind)
            if not target.exists():
                names = set(self.groups[group])
                self._write(target, self._split_pairs(self._index[group]), sources_of(header, names.__contains__))

    def cut_dequantized(self, header: GgufHeader, kind: str, groups: Sequence[str]) -> None:
        """The files of some groups with a quantized file's weights in the base's own types.

        BF16 rounds them once more, by a relative error of at most 2^-9.
        """
        like = {t.name: t for t in self._base.tensors}
        for group in groups:
            target = self.path(group, kind)
            if target.exists():
                continue
            sources = sources_of(header, set(self.groups[group]).__contains__)
            with atomic_path(target) as temp:
                raw = temp.with_name(temp.name + ".raw")
                try:
                    infos = _dequantize(sources, like, raw)
                    self._write(temp, self._split_pairs(self._index[group]), [TensorSource(raw, info) for info in infos])
                finally:
                    raw.unlink(missing_ok=True)

    def mix(self, group: str, types: Mapping[str, str]) -> str:
        """The kind of a group whose tensors have these types: one type's name, or that of a file made of several types' files."""
        own = [types[name] for name in self.groups[group]]
        kinds = [kind if kind != like.type.name else "base" for kind, like in zip(own, self._like(group), strict=True)]
        if len(set(kinds)) == 1:
            return kinds[0]
        kind = f"mix-{sha256_json(kinds)[:16]}"
        target = self.path(group, kind)
        if not target.exists():
            sources = []
            for name, own_kind in zip(self.groups[group], kinds, strict=True):
                path = self.path(group, own_kind)
                sources += [TensorSource(path, info) for info in read_part(path).tensors if info.name == name]
            self._write(target, self._split_pairs(self._index[group]), sources)
        return kind

    def tensors(self, group: str, kind: str) -> list[TensorSource]:
        """The tensors of a group's file."""
        path = self.path(group, kind)
        return [TensorSource(path, info) for info in read_part(path).tensors]

    def _like(self, group: str) -> list[TensorInfo]:
        known = {t.name: t for t in self._base.tensors}
        return [known[name] for name in self.groups[group]]

    def path(self, group: str, kind: str) -> Path:
        """Where a group's file is; `kind` is a type's name, `base`, or another word of the caller's."""
        return self._folder / kind / f"{self._index[group]:05d}.gguf"

    def compose(self, kinds: Mapping[str, str]) -> tuple[Path, ...]:
        """The files of a model: each group as `kinds` says, as the base has it where it says nothing."""
        return (self._folder / "first.gguf", *(self.path(group, kinds.get(group, "base")) for group in self.groups))

    def _split_pairs(self, index: int) -> list[RawPair]:
        return [number_pair("split.no", "uint16", index), number_pair("split.count", "uint16", len(self.groups) + 1),
                number_pair("split.tensors.count", "int32", len(self._base.tensors))]

    def _write(self, target: Path, pairs: Sequence[RawPair], tensors: Sequence[TensorSource]) -> None:
        with atomic_path(target) as temp, temp.open("wb") as file:
            write_gguf(file, version=self._base.version, alignment=_ALIGNMENT, pairs=pairs, tensors=tensors)


def _dequantize(sources: Sequence[TensorSource], like: Mapping[str, TensorInfo], target: Path) -> list[TensorInfo]:
    """Write weights one after another in the types of `like`; returns where they are."""
    import gguf

    infos = []
    with target.open("wb") as file:
        for source in sources:
            info, kind = source.info, like[source.info.name].type
            row_bytes = info.type.row_bytes(info.shape[0])
            data = np.memmap(source.path, np.uint8, "r", info.offset, (info.n_rows, row_bytes))
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(info.type.id))
            raw = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(kind.id))
            offset = file.tell()
            file.write(np.ascontiguousarray(raw).tobytes())
            infos.append(TensorInfo(name=info.name, shape=info.shape, type=TENSOR_TYPES[kind.name], offset=offset,
                                    size_bytes=file.tell() - offset, part=0))
        file.flush()
        os.fsync(file.fileno())
    return infos
