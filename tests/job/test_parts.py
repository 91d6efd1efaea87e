"""Part files: what a kill leaves is read up to the last whole record that is ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.job.parts import PartFile, Rows, merge_rows, read_parquet, write_parquet
from quantkit.spec.records import ROW_DTYPE

N_CTX = 16
TOKENS = np.arange(64, dtype=np.int32)


def chunk_rows(chunk: int) -> Rows:
    rows = np.zeros(7, ROW_DTYPE)
    rows["chunk"], rows["pos"] = chunk, np.arange(8, 15)
    rows["token"] = TOKENS[chunk * N_CTX + 9:(chunk + 1) * N_CTX]
    rows["kld"] = 0.5 + chunk
    return rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "parts" / "x.rows"
    with PartFile(file, N_CTX, TOKENS) as parts:
        for chunk in (2, 0, 3):
            parts.append(chunk_rows(chunk))
    return file


def held(path: Path) -> list[int]:
    with PartFile(path, N_CTX, TOKENS) as parts:
        return list(parts.chunks)


def test_what_was_appended_is_there_again(path: Path) -> None:
    with PartFile(path, N_CTX, TOKENS) as parts:
        assert list(parts.chunks) == [2, 0, 3]
        assert parts.chunks[3].tobytes() == chunk_rows(3).tobytes()


@pytest.mark.parametrize("n_cut", [1, 7 * ROW_DTYPE.itemsize - 1])
def test_a_torn_record_is_dropped_and_written_over(path: Path, n_cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-n_cut])
    with PartFile(path, N_CTX, TOKENS) as parts:
        assert list(parts.chunks) == [2, 0]
        parts.append(chunk_rows(1))
    assert held(path) == [2, 0, 1]


def test_zeros_that_a_power_cut_leaves_are_not_rows(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 3] + bytes(len(data) // 3) + data[2 * len(data) // 3:])
    assert held(path) == [2]


def test_rows_of_another_text_are_not_ours(path: Path) -> None:
    with PartFile(path, N_CTX, TOKENS + 1) as parts:
        assert parts.chunks == {}
    assert path.stat().st_size == 0


def test_rows_that_are_not_finite_are_measured_again(path: Path) -> None:
    rows = chunk_rows(1)
    rows["kld"][3] = np.nan
    path.write_bytes(path.read_bytes() + rows.tobytes())
    assert held(path) == [2, 0, 3]


def test_rows_are_merged_in_the_chunk_sets_order(path: Path) -> None:
    with PartFile(path, N_CTX, TOKENS) as parts:
        rows = merge_rows(parts.chunks, np.array([0, 2, 3]), np.array([5, 5, 6], np.int32))
    assert rows["chunk"].tolist() == [0] * 7 + [2] * 7 + [3] * 7
    assert rows["article"].tolist() == [5] * 14 + [6] * 7


def test_parquet_holds_the_same_bits_and_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    rows = np.concatenate([chunk_rows(chunk) for chunk in range(4)])
    rows["nll_q"] = np.random.default_rng(0).normal(size=len(rows))
    write_parquet(tmp_path / "a.parquet", rows, {"b": "2", "a": "1"})
    write_parquet(tmp_path / "b.parquet", rows, {"a": "1", "b": "2"})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    back, metadata = read_parquet(tmp_path / "a.parquet")
    assert back.tobytes() == rows.tobytes()
    assert metadata == {"a": "1", "b": "2"}


@pytest.mark.system
def test_what_is_no_rows_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="is not a rows file of an audit"):
        read_parquet(tmp_path / "text")
