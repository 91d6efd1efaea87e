"""The legacy .dat format of importance matrices, read with bounds.

    int32 n_entries; each: int32 length, name, int32 n_call, int32 n_values, float32 values = mean square * n_call
    optional: int32 chunk_count, int32 length, name of the data set

All little endian. It has no magic, no chunk size and no expert counts.

Source: common/imatrix-loader.cpp, common_imatrix_load_legacy.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import ImatrixError

MAX_VALUES = 1 << 29  # 2 GiB of sums; a model of 671 B parameters and 256 experts needs half of it
_MAX_NAME_BYTES = 4096  # data sets are named by paths
_SMALLEST_ENTRY = 4 + 1 + 4 + 4 + 4


class LegacyEntry(NamedTuple):
    """`values` (ne0 * n_expert,) float32: mean squares times `n_call`."""

    values: npt.NDArray[np.float32]
    n_call: int


class LegacyImatrix(NamedTuple):
    """What a legacy file holds; `chunk_count` is 0 where it does not say."""

    entries: dict[str, LegacyEntry]
    datasets: tuple[str, ...]
    chunk_count: int


def read_legacy(path: Path) -> LegacyImatrix:
    """A legacy file.

    Raises:
        ImatrixError: the bytes are not one, or it ends early.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        n_entries = _int32(file, path, "the number of entries")
        if not 0 < n_entries <= size // _SMALLEST_ENTRY:
            raise ImatrixError(f"expected an importance matrix, as GGUF or as legacy .dat, got {path}, which is neither: its "
                               f"first bytes would mean {n_entries} entries in {size} bytes; give another file")
        entries: dict[str, LegacyEntry] = {}
        n_left = MAX_VALUES
        for i in range(n_entries):
            what = f"entry {i + 1} of {n_entries}"
            name = _text(file, path, size, f"the name of {what}")
            if name in entries:
                raise ImatrixError(f"expected each tensor once in {path}, got {name} twice: the file is damaged; collect it again")
            n_call = _int32(file, path, f"the calls of {what}")
            n_values = _int32(file, path, f"the length of {what}")
            if not 0 < n_values <= (size - file.tell()) // 4:
                raise ImatrixError(f"expected the values of {what} ({name}) in {path}, got a length of {n_values} with "
                                   f"{size - file.tell()} bytes left: the file is damaged or no importance matrix; give another "
                                   "file")
            n_left -= n_values
            if n_left < 0:
                raise ImatrixError(f"expected at most {MAX_VALUES} values in {path}, got more: it is no importance matrix; give "
                                   "another file")
            entries[name] = LegacyEntry(np.frombuffer(file.read(4 * n_values), "<f4").astype(np.float32), n_call)
        if file.tell() == size:
            return LegacyImatrix(entries, (), 0)
        chunk_count = _int32(file, path, "the number of chunks")
        datasets = (_text(file, path, size, "the name of the data set"),) if file.tell() < size else ()
        return LegacyImatrix(entries, tuple(name for name in datasets if name), chunk_count)


def _int32(file: BinaryIO, path: Path, what: str) -> int:
    data = file.read(4)
    if len(data) < 4:
        raise ImatrixError(f"expected {what} in {path}, but the file ends: it is truncated or no importance matrix; "
                           "collect it again")
    return int.from_bytes(data, "little", signed=True)


def _text(file: BinaryIO, path: Path, size: int, what: str) -> str:
    n = _int32(file, path, what)
    if not 0 <= n <= min(_MAX_NAME_BYTES, size - file.tell()):
        raise ImatrixError(f"expected {what} in {path}, got a length of {n} bytes: the file is damaged or no importance matrix; "
                           "give another file")
    try:
        return file.read(n).decode()
    except UnicodeDecodeError as error:
        raise ImatrixError(f"expected {what} in {path} as UTF-8, found other bytes: the file is damaged or no "
                           "importance matrix; collect it again") from error
