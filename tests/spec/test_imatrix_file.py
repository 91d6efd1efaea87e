from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantkit.core.errors import ImatrixError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, floored, importances, merge, read_imatrix, write_imatrix


def entry(sums: Any, counts: Any) -> ImatrixEntry:
    n = np.array(counts, np.float32)
    return ImatrixEntry(in_sum2=np.array(sums, np.float32).reshape(len(n), -1), counts=n)


def imatrix(entries: Mapping[str, ImatrixEntry], datasets: tuple[str, ...] = ("calibration.txt",)) -> Imatrix:
    return Imatrix(entries=entries, datasets=datasets, chunk_count=4, chunk_size=512, legacy=False)


SMALL = imatrix({"blk.0.ffn_up_exps.weight": entry([[1, 2, 3], [4, 5, 6]], [7, 8]),
                 "blk.0.attn_q.weight": entry([1, 2], [512])})


def assert_equal(a: Imatrix, b: Imatrix) -> None:
    assert list(a.entries) == list(b.entries)
    for name in a.entries:
        np.testing.assert_array_equal(a.entries[name].in_sum2, b.entries[name].in_sum2)
        np.testing.assert_array_equal(a.entries[name].counts, b.entries[name].counts)
    assert (a.datasets, a.chunk_count, a.chunk_size, a.legacy) == (b.datasets, b.chunk_count, b.chunk_size, b.legacy)


class TestOracle:
    def test_reads_what_llama_imatrix_wrote(self, shared: Path) -> None:
        matrix = read_imatrix(shared / "oracle" / "imatrix-tiny.gguf")

        assert (len(matrix.entries), matrix.chunk_count, matrix.chunk_size, matrix.legacy) == (31, 8, 512, False)
        assert matrix.datasets == ("../corpus/calibration.txt",)
        assert {"blk.0.ffn_down.weight": 768, "blk.3.attn_q.weight": 256}.items() <= matrix.lengths().items()
        assert {4096.0} == {float(e.counts[0]) for e in matrix.entries.values()}

    def test_reads_each_experts_sums_as_gguf_does(self, shared: Path) -> None:
        path = shared / "oracle" / "imatrix-moe.gguf"
        theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}

        ours = read_imatrix(path).entries["blk.0.ffn_up_exps.weight"]

        np.testing.assert_array_equal(theirs["blk.0.ffn_up_exps.weight.in_sum2"].data, ours.in_sum2)
        assert ours.counts.tolist() == [1692.0, 843.0, 1278.0, 283.0]

    @pytest.mark.parametrize("name", ["imatrix-tiny.gguf", "imatrix-moe.gguf", "imatrix-smollm2.gguf"])
    def test_writes_the_bytes_that_llama_imatrix_wrote(self, shared: Path, tmp_path: Path, name: str) -> None:
        theirs, ours = shared / "oracle" / name, tmp_path / "again.gguf"
        write_imatrix(ours, read_imatrix(theirs))

        assert read_imatrix(ours).datasets == ("calibration.txt",)  # the one difference: no folders
        for tail_of in (tensor_table, tensor_data):
            assert tail_of(theirs) == tail_of(ours)


def tensor_table(path: Path) -> bytes:
    header = path.read_bytes()[:read_header(path).data_offset[0]]
    return header[header.index(b"blk.") - 8:].rstrip(b"\0")


def tensor_data(path: Path) -> bytes:
    return path.read_bytes()[read_header(path).data_offset[0]:]


class TestGguf:
    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a folder, with a comma" / "m.gguf"
        write_imatrix(path, SMALL)
        expected = replace(SMALL, entries=dict(sorted(SMALL.entries.items())))
        assert_equal(expected, read_imatrix(path))

    def test_equal_content_gives_equal_bytes(self, tmp_path: Path) -> None:
        a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
        write_imatrix(a, SMALL)
        write_imatrix(b, replace(SMALL, entries={name: SMALL.entries[name] for name in reversed(list(SMALL.entries))}))
        assert a.read_bytes() == b.read_bytes()

    def test_only_base_names_of_datasets_are_written(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_imatrix(path, replace(SMALL, datasets=("/home/user/texts/a, b.txt", "C:\\texts\\c.txt", "c.txt")))
        assert read_imatrix(path).datasets == ("a, b.txt", "c.txt")
        assert b"user" not in path.read_bytes()

    def test_a_matrix_without_datasets_keeps_the_key_that_the_library_wants(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_imatrix(path, replace(SMALL, datasets=()))
        assert read_imatrix(path).datasets == ("unknown",)

    def test_the_suffix_is_not_believed(self, tmp_path: Path) -> None:
        path = tmp_path / "renamed.dat"
        write_imatrix(path, SMALL)
        assert not read_imatrix(path).legacy

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path) -> None:
        long_name = imatrix({"x" * 56: entry([1], [1])})
        with pytest.raises(ImatrixError, match="at most 55 bytes"):
            write_imatrix(tmp_path / "m.gguf", long_name)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("bad", "expected"), [
        (replace(SMALL, legacy=True), "legacy"), (replace(SMALL, entries={}), "no entries")])
    def test_what_cannot_be_written(self, tmp_path: Path, bad: Imatrix, expected: str) -> None:
        with pytest.raises(ImatrixError, match=expected):
            write_imatrix(tmp_path / "m.gguf", bad)


def write_gguf(path: Path, tensors: Mapping[str, npt.NDArray[Any]], keys: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "")
    for key, value in keys.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KEYS = {"general.type": "imatrix", "imatrix.datasets": ["a.txt"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 512}
ONES = np.ones(4, np.float32)
PAIR = {"w.in_sum2": ONES, "w.counts": ONES[:1]}


class TestRefused:
    def test_a_model(self, tiny_model: Path) -> None:
        with pytest.raises(ImatrixError, match=r"expected an importance matrix, got a model: .*'qwen35'"):
            read_imatrix(tiny_model)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ImatrixError, match="cannot be read: No such file"):
            read_imatrix(tmp_path / "none.gguf")

    @pytest.mark.parametrize(("tensors", "keys", "expected"), [
        (PAIR, KEYS | {"general.type": "adapter"}, "got 'adapter'"),
        ({"w": ONES}, KEYS, "found none"),
        ({"w.in_sum2": ONES}, KEYS, "one of them for w"),
        (PAIR | {"v.counts": ONES}, KEYS, "one of them for v"),
        ({"w.in_sum2": ONES.astype(np.float16), "w.counts": ONES[:1]}, KEYS, r"F16 \(4,\)"),
        ({"w.in_sum2": ONES, "w.counts": ONES[:3]}, KEYS, "multiple"),
        ({"w.in_sum2": ONES, "w.counts": -ONES[:1]}, KEYS, "counts of zero or more"),
        ({"w.in_sum2": ONES, "w.counts": ONES[:1] * np.nan}, KEYS, "counts of zero or more"),
        (PAIR, {k: v for k, v in KEYS.items() if k != "imatrix.datasets"}, "imatrix.datasets"),
        (PAIR, {k: v for k, v in KEYS.items() if k != "imatrix.chunk_count"}, "imatrix.chunk_count"),
        (PAIR, KEYS | {"imatrix.chunk_size": 0}, "imatrix.chunk_size"),
        (PAIR, KEYS | {"imatrix.chunk_size": "many"}, "'many'"),
    ])
    def test_a_gguf_that_is_not_one(self, tmp_path: Path, tensors: Any, keys: Any, expected: str) -> None:
        path = write_gguf(tmp_path / "m.gguf", tensors, keys)
        with pytest.raises(ImatrixError, match=expected):
            read_imatrix(path)

    @pytest.mark.parametrize("n_lost", [17, 100, 4000, 37600])
    def test_a_truncated_file(self, shared: Path, tmp_path: Path, n_lost: int) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes((shared / "oracle" / "imatrix-moe.gguf").read_bytes()[:-n_lost])
        with pytest.raises(ImatrixError, match=r"cut\.gguf"):
            read_imatrix(path)


def legacy_bytes(entries: Mapping[str, tuple[int, list[float]]], n_chunk: int | None = 8,
                 dataset: str | None = "a.txt") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, (n_call, values) in entries.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_call, len(values))
        out += struct.pack(f"<{len(values)}f", *values)
    if n_chunk is not None:
        out += struct.pack("<i", n_chunk)
    if dataset is not None:
        out += struct.pack("<i", len(dataset)) + dataset.encode()
    return out


class TestLegacy:
    def test_means_times_calls(self, tmp_path: Path) -> None:
        path = tmp_path / "old.gguf"  # the suffix lies
        path.write_bytes(legacy_bytes({"b": (8, [8.0, 16.0, 4.0]), "a": (0, [3.0])}))

        matrix = read_imatrix(path)

        assert (list(matrix.entries), matrix.datasets, matrix.chunk_count) == (["a", "b"], ("a.txt",), 8)
        assert (matrix.chunk_size, matrix.legacy) == (0, True)
        assert importances(matrix.entries["b"]).tolist() == [1.0, 2.0, 0.5]
        assert importances(matrix.entries["a"]).tolist() == [3.0]

    @pytest.mark.parametrize(("n_chunk", "dataset", "expected"), [(None, None, (0, ())), (8, None, (8, ())), (8, "", (8, ()))])
    def test_the_end_is_optional(self, tmp_path: Path, n_chunk: int | None, dataset: str | None, expected: object) -> None:
        path = tmp_path / "old.dat"
        path.write_bytes(legacy_bytes({"a": (1, [1.0])}, n_chunk, dataset))
        matrix = read_imatrix(path)
        assert expected == (matrix.chunk_count, matrix.datasets)

    def test_a_file_cut_anywhere_before_its_end_is_refused(self, tmp_path: Path) -> None:
        whole = legacy_bytes({"abc": (8, [1.0, 2.0]), "d": (8, [3.0])})
        path = tmp_path / "old.dat"
        optional = len(whole) - len(legacy_bytes({})[4:]), len(whole) - len(b"\5\0\0\0a.txt")
        for n in set(range(len(whole))) - set(optional):
            path.write_bytes(whole[:n])
            with pytest.raises(ImatrixError, match=r"old\.dat"):
                read_imatrix(path)

    @pytest.mark.parametrize(("data", "expected"), [
        (b"version https://git-lfs.github.com/spec/v1\n", "neither"),
        (struct.pack("<i", -1) + bytes(100), "neither"),
        (struct.pack("<ii", 1, 2**31 - 1) + bytes(100), "length of 2147483647 bytes"),
        (struct.pack("<iisii", 1, 1, b"a", 1, 2**31 - 1) + bytes(100), "length of 2147483647 with"),
        (struct.pack("<iisii", 1, 1, b"\xff", 1, 1) + bytes(4), "UTF-8"),
        (legacy_bytes({"a": (1, [1.0])})[:-13].replace(b"\1", b"\2", 1) + legacy_bytes({"a": (1, [1.0])})[4:], "a twice"),
    ])
    def test_bytes_that_are_not_one(self, tmp_path: Path, data: bytes, expected: str) -> None:
        path = tmp_path / "m.dat"
        path.write_bytes(data)
        with pytest.raises(ImatrixError, match=expected):
            read_imatrix(path)


class TestMerge:
    def test_adds_sums_counts_and_chunks(self) -> None:
        other = replace(SMALL, datasets=("/x/other.txt", "calibration.txt"), chunk_count=3)

        both = merge(SMALL, other)

        assert both.entries["blk.0.ffn_up_exps.weight"].in_sum2.tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]
        assert both.entries["blk.0.ffn_up_exps.weight"].counts.tolist() == [14.0, 16.0]
        assert (both.chunk_count, both.chunk_size, both.datasets) == (7, 512, ("calibration.txt", "other.txt"))

    @pytest.mark.parametrize(("other", "expected"), [
        (replace(SMALL, legacy=True), "legacy"),
        (replace(SMALL, chunk_size=1024), "got 512 and 1024 tokens"),
        (imatrix({"blk.0.attn_q.weight": SMALL.entries["blk.0.attn_q.weight"]}), "different models: blk.0.ffn_up_exps.weight"),
        (replace(SMALL, entries={**SMALL.entries, "blk.0.attn_q.weight": entry([1, 2, 3], [1])}), r"\(1, 2\) and \(1, 3\)"),
    ])
    def test_refuses_what_does_not_belong_together(self, other: Imatrix, expected: str) -> None:
        with pytest.raises(ImatrixError, match=expected):
            merge(SMALL, other)


class TestImportances:
    def test_quotients_of_each_expert(self) -> None:
        assert importances(entry([[1, 2], [2, 4]], [2, 1])).tolist() == [0.5, 1.0, 2.0, 4.0]

    def test_an_expert_without_rows_is_neutral(self) -> None:
        assert importances(entry([[1, 2], [0, 0]], [2, 0])).tolist() == [0.5, 1.0, 1.0, 1.0]


class TestFloored:
    def test_columns_never_hit_get_a_share_of_the_mean(self) -> None:
        result = floored(entry([0, 2, 4, 0], [2]), 0.1)
        np.testing.assert_array_equal(np.array([0.075, 1, 2, 0.075], np.float32), result.values)
        assert (result.n_zero_columns, result.missing_experts) == (2, ())

    def test_other_values_stay_even_below_the_floor(self) -> None:
        assert np.float32(1e-6) == floored(entry([1e-6, 1, 0], [1]), 0.5).values[0]

    def test_each_expert_is_floored_by_its_own_mean(self) -> None:
        result = floored(entry([[0, 8], [0, 2e-6]], [1, 1]), 0.5)
        np.testing.assert_allclose([2, 8, 5e-7, 2e-6], result.values, rtol=1e-6)

    def test_one_expert_of_four_without_rows(self) -> None:
        result = floored(entry([[1, 1], [0, 0], [1, 0], [3, 1]], [1, 0, 1, 1]), 0.5)
        assert result.values.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.25, 3.0, 1.0]
        assert (result.n_zero_columns, result.missing_experts) == (1, (1,))

    def test_a_matrix_whose_input_is_always_zero_is_neutral(self) -> None:
        result = floored(entry([0, 0], [5]), 0.5)
        assert (result.values.tolist(), result.n_zero_columns) == ([1.0, 1.0], 2)

    @given(hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 2.0**100, width=32)),
           hnp.arrays(np.float32, 3, elements=st.integers(0, 5).map(float)))
    @pytest.mark.slow
    def test_nothing_is_zero_and_what_was_not_is_unchanged(self, sums: Any, counts: Any) -> None:
        e = ImatrixEntry(in_sum2=sums, counts=counts)
        values, before = floored(e, 1e-3).values, importances(e)
        assert (values > 0).all()
        np.testing.assert_array_equal(before[before > 0], values[before > 0])

    def test_real_matrices_are_not_touched(self, shared: Path) -> None:
        for e in read_imatrix(shared / "oracle" / "imatrix-smollm2.gguf").entries.values():
            np.testing.assert_array_equal(importances(e), floored(e, 1e-2).values)
