"""Rows that survive a kill: one append-only file per tier while an audit runs, one canonical parquet file at its end.

A part file is a sequence of equal records, the rows of one chunk each, in the order in which workers finished them. What a kill
leaves is read back up to the last whole record that says what it should; anything else is measured again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError, NoSpace
from quantkit.core.files import atomic_path, telling_full
from quantkit.job.foreign import is_own, read_in_worker, remember_own
from quantkit.spec.records import ROW_DTYPE

Rows = npt.NDArray[np.void]
MAX_ROWS = 1 << 25  # 130 times the whole test split of WikiText-2
_SYNC_EVERY_S = 1.0
_ARROW_TYPES = {name: {"i4": "int32", "f8": "double"}[ROW_DTYPE[name].str[1:]] for name in ROW_DTYPE.names or ()}


class PartFile:
    """The rows of one tier so far.

    Args:
        path: the part file; its name holds the audit's id, so rows of other inputs are never taken for ours.
        n_scored: rows of a chunk.
        tokens: (n_tokens,) int32, the text; a record whose tokens differ from it is not ours.
        step: what the work is called where rows are refused.

    Raises:
        NoSpace: the disk is full; here, in `append` and in `sync`.
    """

    def __init__(self, path: Path, n_ctx: int, tokens: npt.NDArray[np.int32], step: str = "audit") -> None:
        self._path, self._n_ctx, self._tokens, self._step = path, n_ctx, tokens, step
        self._n_scored = n_ctx - 1 - n_ctx // 2
        self._record_bytes = self._n_scored * ROW_DTYPE.itemsize
        self.chunks: dict[int, Rows] = {}
        with telling_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for record in _read_records(path, self._record_bytes):
                if _is_ours(record, n_ctx, tokens):
                    self.chunks[int(record["chunk"][0])] = record
                else:
                    break
            self._file = path.open("ab", buffering=0)  # so that what a full disk refused is not tried again at the end
            self._file.truncate(len(self.chunks) * self._record_bytes)
        self._synced = time.monotonic()

    def append(self, rows: Rows) -> None:
        """Add the rows of one chunk, unless they are there; flushed to disk about once a second.

        Raises:
            EngineError: not the rows of one chunk of this text; what a worker sends is not believed.
        """
        whole = isinstance(rows, np.ndarray) and rows.dtype == ROW_DTYPE and rows.shape == (self._n_scored,)
        if not whole or not _is_ours(rows, self._n_ctx, self._tokens):
            found = f"{rows.dtype if rows.dtype.names is None else 'rows'} of shape {rows.shape}" \
                if isinstance(rows, np.ndarray) else type(rows).__name__
            raise EngineError(f"{self._step}: expected {self._n_scored} rows of one chunk with the text's positions and tokens, "
                              f"got {found if not whole else 'others'} from the worker process: run again, and if it comes "
                              "back, report it")
        if int(rows["chunk"][0]) in self.chunks:
            return
        data = memoryview(rows.tobytes())
        with telling_full(self._path):
            while data:
                data = data[self._file.write(data):]
        self.chunks[int(rows["chunk"][0])] = rows
        if time.monotonic() - self._synced > _SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Flush to disk."""
        with telling_full(self._path):
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file, contextlib.suppress(*([] if kind is None else [NoSpace, OSError])):  # the first fault is the one to tell
            self.sync()


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
    remember_own(path)


def read_parquet(path: Path, *, n_rows: int | None = None) -> tuple[Rows, dict[str, str]]:
    """Rows and metadata of a canonical file. One that this process did not write is read by another, with limits.

    Args:
        n_rows: how many there must be, where that is known: others are refused before any is read.

    Raises:
        InputError: not a parquet file, other columns than those of ROW_DTYPE, another number of rows, or one that its reader does
            not survive.
    """
    return decode_parquet(path, n_rows) if is_own(path) else read_in_worker(decode_parquet, path, n_rows=n_rows)


def decode_parquet(path: Path, n_rows: int | None) -> tuple[Rows, dict[str, str]]:
    """`read_parquet`, in this process."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            _check_form(path, file, n_rows)
            table = file.read(use_threads=False)
        rows = np.empty(table.num_rows, ROW_DTYPE)
        for name in ROW_DTYPE.names or ():
            rows[name] = table.column(name).to_numpy()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a rows file of an audit ({' '.join(str(error).split())[:200]}): fetch or measure it "
                         "again") from error
    return rows, metadata


def _check_form(path: Path, file: Any, n_rows: int | None) -> None:
    """Columns and number of rows, by the file's footer alone."""
    found = {field.name: str(field.type) for field in file.schema_arrow}
    if found != _ARROW_TYPES:
        told = ", ".join(f"{name} {kind}" for name, kind in list(found.items())[:12])
        raise InputError(f"{path} is not a rows file of an audit: expected its columns, found {told[:300]!a}; fetch or "
                         "measure it again")
    if not 0 <= file.metadata.num_rows <= MAX_ROWS or n_rows not in (None, file.metadata.num_rows):
        raise InputError(f"{path} has {file.metadata.num_rows} rows, expected "
                         f"{f'at most {MAX_ROWS}' if n_rows is None else f'the {n_rows} of its chunks'}: measure it again")
