"""Importance matrices: the records, their file formats, merging, and the numbers that the quantizer gets.

An entry holds, for each expert (one for a dense matrix) and each input column, the sum of the squared activations that met it,
and how many rows were summed. Its importance is their quotient, the mean square.

    GGUF    llama-imatrix's: `general.type` = "imatrix", `<tensor>.in_sum2`, `<tensor>.counts`, `imatrix.chunk_count`,
            `imatrix.chunk_size` (tokens), `imatrix.datasets`
    legacy  the .dat of older versions: means times a number of calls, no chunk size. Readable, never written, never merged.

The two are told apart by content. A file is not trusted: nothing is allocated beyond what it really holds.

Left out: whether a matrix fits a plan (`spec.plan_coverage`), collecting one (`engine`).

Source: tools/imatrix/imatrix.cpp (save_imatrix, save_imatrix_legacy), common/imatrix-loader.cpp, tools/quantize/quantize.cpp
(load_imatrix) of the pinned llama.cpp.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import GgufError, ImatrixError
from quantkit.core.files import atomic_path
from quantkit.spec.gguf_header import ArrayValue, GgufHeader, TensorInfo, read_header
from quantkit.spec.gguf_part import MAX_NAME_BYTES
from quantkit.spec.imatrix_legacy import MAX_VALUES, LegacyEntry, read_legacy

_SUMS, _COUNTS = ".in_sum2", ".counts"
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImatrixEntry:
    """Sums of squared activations of one tensor's input.

    in_sum2: (n_expert, ne0) float32. counts: (n_expert,) float32, whole numbers: rows summed; calls in a legacy file.
    """

    in_sum2: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]

    @property
    def n_values(self) -> int:
        """ne0 * n_expert, the length that the library compares with the tensor's."""
        return int(self.in_sum2.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Imatrix:
    """An importance matrix file. `entries` are sorted by name; `chunk_size` is in tokens, 0 in a legacy file."""

    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int
    legacy: bool

    def lengths(self) -> dict[str, int]:
        """Tensor name → number of values, as `resolve_plan` takes it."""
        return {name: entry.n_values for name, entry in self.entries.items()}


class Floored(NamedTuple):
    """Importances that are safe to hand over, and what had to be done for it."""

    values: npt.NDArray[np.float32]
    n_zero_columns: int
    missing_experts: tuple[int, ...]


def read_imatrix(path: Path) -> Imatrix:
    """An importance matrix in either format.

    Raises:
        ImatrixError: no such file, a model in its place, or a file that is damaged or incomplete.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ImatrixError(f"expected an importance matrix at {path}, but it cannot be read: {error.strerror}; check "
                           "the path") from error
    if magic == b"GGUF":
        return _read_gguf(path)
    legacy = read_legacy(path)
    return Imatrix(entries=_sorted({name: _from_legacy(entry) for name, entry in legacy.entries.items()}),
                   datasets=legacy.datasets, chunk_count=legacy.chunk_count, chunk_size=0, legacy=True)


def write_imatrix(path: Path, imatrix: Imatrix, devices: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write llama.cpp's GGUF format: names sorted, no time, datasets by base name; equal content gives equal bytes.

    Args:
        devices: where it was collected, by what, if that was not the CPU: keys that llama.cpp does not read.

    Raises:
        ImatrixError: a legacy matrix, one without entries, or a tensor name too long for the format's suffixes.
    """
    import gguf

    if imatrix.legacy:
        raise ImatrixError(f"cannot write {path}: the matrix came from a legacy .dat file, which holds means and no chunk "
                           "size; collect it again")
    if not imatrix.entries:
        raise ImatrixError(f"cannot write {path}: the importance matrix has no entries; collect it again")
    if too_long := [name for name in imatrix.entries if len((name + _SUMS).encode()) > MAX_NAME_BYTES]:
        raise ImatrixError(f"cannot write {path}: tensor names of at most {MAX_NAME_BYTES - len(_SUMS)} bytes fit the format, "
                           f"got {_names(too_long)}: rename the tensors in the model")
    with atomic_path(path) as temp:
        writer = gguf.GGUFWriter(temp, "")
        writer.kv_data[0].clear()  # no architecture: llama-imatrix writes none
        writer.add_string("general.type", "imatrix")
        writer.add_array("imatrix.datasets", list(base_names(imatrix.datasets)) or ["unknown"])  # the key must exist
        writer.add_uint32("imatrix.chunk_count", imatrix.chunk_count)
        writer.add_uint32("imatrix.chunk_size", imatrix.chunk_size)
        for key, value in devices.items():
            writer.add_string(f"quantkit.{key}", value)
        for name in sorted(imatrix.entries):
            entry = imatrix.entries[name]
            n_expert = len(entry.counts)
            sums = np.ascontiguousarray(entry.in_sum2, np.float32).reshape(n_expert, -1)
            counts = np.ascontiguousarray(entry.counts, np.float32).reshape(n_expert, 1)
            # trailing dimensions of one are not written, as ggml does not write them
            writer.add_tensor(name + _SUMS, sums if n_expert > 1 else sums[0])
            writer.add_tensor(name + _COUNTS, counts if n_expert > 1 else counts[0])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        except OSError:
            for file in writer.fout or ():
                with contextlib.suppress(OSError):  # what is still in its buffer has no room either
                    file.close()
            raise


def base_names(datasets: tuple[str, ...]) -> tuple[str, ...]:
    """Names without folders, each once, in order: a path tells about a computer and not about a text."""
    names = (PurePosixPath(name.replace("\\", "/")).name for name in datasets)
    return tuple(dict.fromkeys(name for name in names if name))


def merge(a: Imatrix, b: Imatrix) -> Imatrix:
    """Both calibrations together: sums and counts added (in float64, stored as float32), chunks added.

    Raises:
        ImatrixError: a legacy matrix, other chunk sizes, other tensors or other shapes.
    """
    if a.legacy or b.legacy:
        raise ImatrixError("cannot merge a legacy .dat matrix: it holds means and no chunk size; collect it again")
    if a.chunk_size != b.chunk_size:
        raise ImatrixError(f"cannot merge matrices of different chunk sizes, got {a.chunk_size} and {b.chunk_size} tokens: "
                           "collect one of them again")
    if only_in_one := sorted(a.entries.keys() ^ b.entries.keys()):
        raise ImatrixError(f"cannot merge matrices of different models: {_names(only_in_one)} in one of them only; "
                           "collect both from one base")
    if other := [n for n, e in a.entries.items() if e.in_sum2.shape != b.entries[n].in_sum2.shape]:
        raise ImatrixError(f"cannot merge matrices of different models: {_names(other)} of other shapes, the first "
                           f"{a.entries[other[0]].in_sum2.shape} and {b.entries[other[0]].in_sum2.shape}; collect both from one "
                           "base")
    entries = {name: ImatrixEntry(in_sum2=_add(entry.in_sum2, b.entries[name].in_sum2),
                                  counts=_add(entry.counts, b.entries[name].counts)) for name, entry in a.entries.items()}
    return Imatrix(entries=_sorted(entries), datasets=base_names(a.datasets + b.datasets),
                   chunk_count=a.chunk_count + b.chunk_count, chunk_size=a.chunk_size, legacy=False)


def importances(entry: ImatrixEntry) -> npt.NDArray[np.float32]:
    """Mean squared activations as llama-quantize computes them; an expert without rows is neutral, 1.

    Returns:
        (n_expert * ne0,) float32, ≥ 0 in a sound matrix. Zeros are still in it: see `floored`.

    Source: tools/quantize/quantize.cpp, load_imatrix.
    """
    hit = entry.counts > 0
    counts = np.where(hit, entry.counts, np.float32(1))[:, None]
    return np.where(hit[:, None], entry.in_sum2 / counts, np.float32(1)).astype(np.float32).reshape(-1)


def floored(entry: ImatrixEntry, zero_floor: float) -> Floored:
    """Importances without zeros, which would zero weights: `importances`, and per expert (the tensor itself if it is dense)

        importance of a column never hit = zero_floor * mean importance of that expert's columns

    An expert without rows, or whose columns are all zero, is neutral: 1 everywhere. Other values are left as they are.

    Args:
        entry: a finite entry.
        zero_floor: fraction of the mean, above 0.

    Returns:
        (n_expert * ne0,) float32 values, all > 0; zero columns found in experts with rows; the experts without.
    """
    values = importances(entry).reshape(entry.in_sum2.shape)
    missing = tuple(int(i) for i in np.flatnonzero(entry.counts <= 0))
    zero = values <= 0
    if zero.any():
        mean = values.mean(axis=1, dtype=np.float64, keepdims=True)
        floor = np.where(mean > 0, np.maximum(zero_floor * mean, _FLOAT32_TINY), 1.0)
        values = np.where(zero, floor, values).astype(np.float32)
    return Floored(values=values.reshape(-1), n_zero_columns=int(zero.sum()), missing_experts=missing)


def _read_gguf(path: Path) -> Imatrix:
    try:
        header = read_header(path)
    except GgufError as error:
        raise ImatrixError(f"expected an importance matrix at {path}: {error}") from error
    kind = header.metadata.get("general.type")
    if kind != "imatrix":
        if kind == "model" or "general.architecture" in header.metadata:
            raise ImatrixError(f"expected an importance matrix, got a model: {path} has general.architecture = "
                               f"{header.metadata.get('general.architecture')!r}; give the matrix (were the two files swapped?)")
        raise ImatrixError(f"expected general.type = 'imatrix' in {path}, got {kind!r}: it is no importance matrix; give "
                           "another file")
    datasets = header.metadata.get("imatrix.datasets")
    if not isinstance(datasets, ArrayValue) or datasets.element_type != "string" or datasets.values is None:
        raise ImatrixError(f"expected a list of names as imatrix.datasets in {path}, found no such list: llama-quantize "
                           "refuses such a file; write it again")
    sums = {t.name.removesuffix(_SUMS): t for t in header.tensors if t.name.endswith(_SUMS)}
    counts = {t.name.removesuffix(_COUNTS): t for t in header.tensors if t.name.endswith(_COUNTS)}
    if not sums:
        raise ImatrixError(f"expected tensors named *{_SUMS} in {path}, found none: the matrix is empty; collect it again")
    if unpaired := sorted(sums.keys() ^ counts.keys()):
        raise ImatrixError(f"expected {_SUMS} and {_COUNTS} for each tensor in {path}, got one of them for "
                           f"{_names(unpaired)}: collect it again")
    n_values = sum(t.n_elements for t in sums.values())
    if n_values > MAX_VALUES:
        raise ImatrixError(f"expected at most {MAX_VALUES} values in {path}, got {n_values}: it is no importance matrix; give "
                           "another file")
    entries = {name: _read_entry(header, name, sums[name], counts[name]) for name in sorted(sums)}
    return Imatrix(entries=MappingProxyType(entries), datasets=tuple(str(name) for name in datasets.values),
                   chunk_count=_whole(header, "imatrix.chunk_count", 0), chunk_size=_whole(header, "imatrix.chunk_size", 1),
                   legacy=False)


def _read_entry(header: GgufHeader, name: str, sums: TensorInfo, counts: TensorInfo) -> ImatrixEntry:
    n_expert = counts.n_elements
    if {sums.type.name, counts.type.name} != {"F32"} or sums.n_elements % n_expert:
        raise ImatrixError(f"expected F32 sums and counts for {name} in {header.path}, the first a multiple of the second, got "
                           f"{sums.type.name} {sums.shape} and {counts.type.name} {counts.shape}: write the file again")
    rows = _read_floats(header, counts)
    if not np.isfinite(rows).all() or (rows < 0).any():
        raise ImatrixError(f"expected counts of zero or more for {name} in {header.path}, got {rows.min()} to {rows.max()}: "
                           "collect the matrix again")
    # the library rounds counts to whole numbers
    return ImatrixEntry(in_sum2=_read_floats(header, sums).reshape(n_expert, -1), counts=np.floor(rows + np.float32(0.5)))


def _read_floats(header: GgufHeader, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    order = ">f4" if header.big_endian else "<f4"
    values = np.fromfile(header.parts[tensor.part], order, math.prod(tensor.shape), offset=tensor.offset)
    return values.astype(np.float32, copy=False)


def _whole(header: GgufHeader, key: str, least: int) -> int:
    value = header.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ImatrixError(f"expected a whole number from {least} on as {key} in {header.path}, got {value!r}: "
                           "write the file again")
    return value


def _from_legacy(entry: LegacyEntry) -> ImatrixEntry:
    n_call = entry.n_call if entry.n_call > 0 else 1  # the library then takes the values as they are
    return ImatrixEntry(in_sum2=entry.values[None, :], counts=np.array([n_call], np.float32))


def _sorted(entries: dict[str, ImatrixEntry]) -> Mapping[str, ImatrixEntry]:
    return MappingProxyType(dict(sorted(entries.items())))


def _add(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # infinity, which the coverage check names
        return (a.astype(np.float64) + b.astype(np.float64)).astype(np.float32)


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
