"""Rows that survive a kill: one append-only file per tier while an audit runs, one canonical parquet file at its end.

A part file is a sequence of equal records, the rows of one chunk each, in the order in which workers finished them. What a kill
leaves is read back up to the last whole record that says what it should; anything else is measured again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import atomic_path
from quantkit.spec.records import ROW_DTYPE

Rows = npt.NDArray[np.void]
_SYNC_EVERY_S = 1.0


class PartFile:
    """The rows of one tier so far.

    Args:
        path: the part file; its name holds the audit's id, so rows of other inputs are never taken for ours.
        n_scored: rows of a chunk.
        tokens: (n_tokens,) int32, the text; a record whose tokens differ from it is not ours.
    """

    def __init__(self, path: Path, n_ctx: int, tokens: npt.NDArray[np.int32]) -> None:
        self._n_scored = n_ctx - 1 - n_ctx // 2
        self._record_bytes = self._n_scored * ROW_DTYPE.itemsize
        self.chunks: dict[int, Rows] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for record in _read_records(path, self._record_bytes):
            if _is_ours(record, n_ctx, tokens):
                self.chunks[int(record["chunk"][0])] = record
            else:
                break
        self._file = path.open("ab")
        self._file.truncate(len(self.chunks) * self._record_bytes)
        self._synced = time.monotonic()

    def append(self, rows: Rows) -> None:
        """Add the rows of one chunk; flushed to disk about once a second."""
        self._file.write(rows.tobytes())
        self.chunks[int(rows["chunk"][0])] = rows
        if time.monotonic() - self._synced > _SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Flush to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.sync()
        self._file.close()


def _read_records(path: Path, record_bytes: int) -> list[Rows]:
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: len(data) // record_bytes * record_bytes]
    rows = np.frombuffer(whole, ROW_DTYPE)
    return np.split(rows, len(whole) // record_bytes) if whole else []


def _is_ours(record: Rows, n_ctx: int, tokens: npt.NDArray[np.int32]) -> bool:
    chunk = int(record["chunk"][0])
    first = n_ctx // 2
    if not 0 <= chunk < len(tokens) // n_ctx:
        return False
    expected = tokens[chunk * n_ctx + first + 1:(chunk + 1) * n_ctx]
    return bool((record["chunk"] == chunk).all() and (record["pos"] == np.arange(first, n_ctx - 1)).all()
                and (record["token"] == expected).all() and np.isfinite(record["kld"]).all())


def merge_rows(chunks: Mapping[int, Rows], order: npt.NDArray[np.int64], articles: npt.NDArray[np.int32]) -> Rows:
    """All rows in the chunk set's order, the article of each chunk filled in.

    Args:
        order: (n_chunk,) chunk numbers, rising.
        articles: (n_chunk,) the article of each.
    """
    rows = np.concatenate([chunks[int(chunk)] for chunk in order])
    rows["article"] = np.repeat(articles, len(rows) // len(order))
    return rows


def write_parquet(path: Path, rows: Rows, metadata: Mapping[str, str]) -> None:
    """The canonical file: fixed column order, one row group per 2^20 rows, zstd level 3, no dictionary, no page index.

    The same rows and metadata give the same bytes with one version of pyarrow.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(ROW_DTYPE.names or ())
    table = pa.table({name: pa.array(np.ascontiguousarray(rows[name])) for name in names})
    table = table.replace_schema_metadata({key: metadata[key] for key in sorted(metadata)})
    with atomic_path(path) as temp:
        pq.write_table(table, temp, row_group_size=1 << 20, compression="zstd", compression_level=3, use_dictionary=False,
                       write_statistics=False, version="2.6", data_page_version="1.0")


def read_parquet(path: Path) -> tuple[Rows, dict[str, str]]:
    """Rows and metadata of a canonical file.

    Raises:
        InputError: not a parquet file, or without the columns of ROW_DTYPE.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        rows = np.empty(table.num_rows, ROW_DTYPE)
        for name in ROW_DTYPE.names or ():
            rows[name] = table.column(name).to_numpy()
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a rows file of an audit: {error}") from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return rows, metadata
