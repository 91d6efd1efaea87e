"""The reader takes what llama.cpp takes, and meets everything else with one `GgufError` that says what is wrong."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_cursor import Budget
from quantkit.spec.gguf_header import ArrayValue, TensorInfo, read_header
from quantkit.spec.gguf_part import read_part
from quantkit.spec.model import describe_model
from tests.gguf_factory import Tensors, raw_gguf, raw_key, raw_tensor, raw_text, tiny_gguf, tiny_model

UINT8, UINT16, UINT32, INT32, BOOL, STRING, ARRAY, UINT64 = 0, 2, 4, 5, 7, 8, 9, 10


def u32(key: str, value: int) -> bytes:
    return raw_key(key, UINT32, struct.pack("<I", value))


def text(key: str | bytes, value: str | bytes) -> bytes:
    return raw_key(key, STRING, raw_text(value))


def array(key: str, type_id: int, n: int, values: bytes) -> bytes:
    return raw_key(key, ARRAY, struct.pack("<IQ", type_id, n) + values)


def split(no: int, count: int, n_tensors: int) -> list[bytes]:
    return [raw_key("split.no", UINT16, struct.pack("<H", no)), raw_key("split.count", UINT16, struct.pack("<H", count)),
            raw_key("split.tensors.count", INT32, struct.pack("<i", n_tensors))]


VALID = raw_gguf([text("general.architecture", "llama"), u32("llama.block_count", 1)],
                 [raw_tensor("a", (32, 2), 0, 0), raw_tensor("b", (32, 2), 8, 256)], data=bytes(256 + 68))
TYPES: Tensors = {"f32": ((5, 3), "F32"), "bf16": ((64, 2, 3), "BF16"), "q8": ((64, 2), "Q8_0"), "q4k": ((512, 1), "Q4_K")}


def test_everything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(VALID)
    header = read_header(path)
    assert (path, (path,), 3, False, 32) == (header.path, header.parts, header.version, header.big_endian, header.alignment)
    assert header.metadata == {"general.architecture": "llama", "llama.block_count": 1}
    a, b = header.tensors
    (start,) = header.data_offset
    assert len(VALID) - 324 == start
    assert ("a", (32, 2), "F32", start, 256, 0) == (a.name, a.shape, a.type.name, a.offset, a.size_bytes, a.part)
    assert ("b", (32, 2), "Q8_0", start + 256, 68, 0) == (b.name, b.shape, b.type.name, b.offset, b.size_bytes, b.part)
    assert a.n_elements == 64
    assert a.n_rows == 2
    assert len(VALID) == header.file_bytes


def test_every_kind_of_value(tmp_path: Path) -> None:
    values = [("B", 0, 200), ("b", 1, -100), ("H", 2, 60000), ("h", 3, -30000), ("I", 4, 1 << 31), ("i", 5, -1), ("f", 6, 0.5),
              ("Q", 10, 1 << 63), ("q", 11, -(1 << 62)), ("d", 12, 1e300)]
    keys = [raw_key(f"k{id_}", id_, struct.pack("<" + code, value)) for code, id_, value in values]
    keys += [raw_key("yes", BOOL, b"\1"), text("text", "größe"), text("empty", ""), array("none", STRING, 0, b""),
             array("flags", BOOL, 2, b"\0\1"), array("words", STRING, 2, raw_text("a") + raw_text("b"))]
    (tmp_path / "a.gguf").write_bytes(raw_gguf(keys))
    expected = {f"k{id_}": value for _, id_, value in values} | {
        "yes": True, "text": "größe", "empty": "", "none": ArrayValue(element_type="string", n=0, values=()),
        "flags": ArrayValue(element_type="bool", n=2, values=(False, True)),
        "words": ArrayValue(element_type="string", n=2, values=("a", "b")),
    }
    assert expected == read_header(tmp_path / "a.gguf").metadata


def test_long_arrays_are_skimmed(tmp_path: Path) -> None:
    """A string of two windows, so that the skimming crosses their borders, with a key behind it that must still be found."""
    words = b"".join(raw_text(b"\xff" * n) for n in (*range(700), 3 << 20, 0, 5))
    keys = [array("tokens", STRING, 703, words), array("numbers", UINT64, 600, bytes(4800)), u32("after", 7)]
    (tmp_path / "a.gguf").write_bytes(raw_gguf(keys))
    expected = {"tokens": ArrayValue(element_type="string", n=703, values=None),
                "numbers": ArrayValue(element_type="uint64", n=600, values=None), "after": 7}
    assert expected == read_header(tmp_path / "a.gguf").metadata


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("alignment", [32, 128])
def test_table_equals_gguf(tmp_path: Path, big_endian: bool, alignment: int) -> None:
    import gguf

    (path,) = tiny_gguf(tmp_path / "a.gguf", TYPES, {"x": [1, 2]}, alignment=alignment, big_endian=big_endian)
    header = read_header(path)
    expected = [(t.name, tuple(int(n) for n in t.shape), t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
                for t in gguf.GGUFReader(path).tensors]
    assert expected == [(t.name, t.shape, t.type.name, t.offset, t.size_bytes) for t in header.tensors]
    assert (big_endian, alignment) == (header.big_endian, header.alignment)


@pytest.mark.slow
def test_models_equal_gguf(shared: Path) -> None:
    import gguf

    for name in ("models/tiny-moe-bos-BF16.gguf", "oracle/stock-IQ1_M.gguf", "oracle/imatrix-moe.gguf"):
        path = shared / name
        header = read_header(path)
        reader = gguf.GGUFReader(path)
        expected = [(t.name, tuple(int(n) for n in t.shape), t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
                    for t in reader.tensors]
        assert expected == [(t.name, t.shape, t.type.name, t.offset, t.size_bytes) for t in header.tensors]
        assert {key for key in reader.fields if not key.startswith("GGUF.")} == header.metadata.keys()


def test_version_2_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(VALID[:4] + struct.pack("<I", 2) + VALID[8:])
    assert read_header(tmp_path / "a.gguf").version == 2


def test_data_may_be_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    head = raw_gguf(tensors=[raw_tensor("a", (1 << 20, 1 << 14))])
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 36))
    (tensor,) = read_header(path).tensors
    assert tensor.n_elements == 1 << 34
    assert tensor.size_bytes == 1 << 36


def test_gaps_and_any_order_are_read(tmp_path: Path) -> None:
    offsets = {"a": 512, "b": 64}
    tensors = [raw_tensor(name, offset=offset) for name, offset in offsets.items()]
    (tmp_path / "a.gguf").write_bytes(raw_gguf(tensors=tensors, data=bytes(640)))
    header = read_header(tmp_path / "a.gguf")
    assert offsets == {t.name: t.offset - header.data_offset[0] for t in header.tensors}


F32_MAX = (1 << 61) - 1
MALFORMED = {
    "empty file": (b"", "an empty one"),
    "short magic": (b"GG", "the magic needs 4 bytes at byte 0, but the file ends at byte 2"),
    "zeroed header": (bytes(4096), "a quantize run that was interrupted"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html>", "the download failed"),
    "other magic": (raw_gguf(magic=b"GGUX"), r"expected the first four bytes b'GGUF', got b'GGUX', not a GGUF file"),
    "version 0": (raw_gguf(version=0), "version 2 or 3, got 0"),
    "version 1": (raw_gguf(version=1), "got 1: GGUFv1 is no longer supported"),
    "version 4": (raw_gguf(version=4), "version 2 or 3, got 4"),
    "only a version": (VALID[:8], "the number of tensors and keys needs 8 bytes at byte 8"),
    "more keys than bytes": (raw_gguf(n_keys=1 << 60), r"a header of 1152921504606846976 metadata keys needs"),
    "more tensors than bytes": (raw_gguf(n_tensors=(1 << 64) - 1), "a header of 18446744073709551615 tensors needs"),
    "too many keys": (raw_gguf(n_keys=5000, data=bytes(100_000)), "at most 4096 metadata keys, got 5000"),
    "too many tensors": (raw_gguf(n_tensors=200_000, data=bytes(7_000_000)), "at most 131072 tensors, got 200000"),
    "37 bytes": (raw_gguf([raw_key("", UINT8, b"\1")]), "expected a name for metadata key 0 of 1, got ''"),
    "empty key": (raw_gguf([u32("", 1)]), "expected a name for metadata key 0 of 1, got ''"),
    "key with NUL": (raw_gguf([u32("a\0b", 1)]), r"expected a name for metadata key 0 of 1, got 'a\\x00b'"),
    "endless key": (raw_gguf(n_keys=1, data=struct.pack("<Q", 1 << 62) + bytes(99)), "key 0 of 1 needs 4611686018427387904"),
    "long key": (raw_gguf([u32("k" * 70_000, 1)]), "at most 65535 bytes, got 70000"),
    "key not UTF-8": (raw_gguf([text(b"a\xff", "x")]), "expected UTF-8 in metadata key 0 of 1, got byte 0xff at position 1"),
    "value not UTF-8": (raw_gguf([text("a", b"\xc3(")]), "expected UTF-8 in the value of 'a', got byte 0xc3"),
    "key twice": (raw_gguf([u32("a", 1), u32("a", 1)]), "unique metadata keys, got 'a' twice"),
    "value type 13": (raw_gguf([raw_key("a", 13, bytes(8))]), "the value of 'a' is of the unknown type 13"),
    "value cut": (raw_gguf([raw_key("k" * 9, UINT64, bytes(4))]), "the value of 'kkkkkkkkk' needs 8 bytes"),
    "bool 2": (raw_gguf([raw_key("a", BOOL, b"\2")]), "expected 0 or 1 for the value of 'a', a bool, got 2"),
    "array of arrays": (raw_gguf([array("a", ARRAY, 1, bytes(20))]), "got elements of type array"),
    "array of type 99": (raw_gguf([array("a", 99, 1, bytes(20))]), "got elements of type 99"),
    "endless array": (raw_gguf([array("a", UINT32, 1 << 63, b"")]), "the value of 'a' needs 36893488147419103232 bytes"),
    "endless strings": (raw_gguf([array("a", STRING, 1 << 61, b"")]), "the value of 'a' needs 18446744073709551616 bytes"),
    "string in array cut": (raw_gguf([array("a", STRING, 600, raw_text("x") * 599 + struct.pack("<Q", 1 << 40))]),
                            "the value of 'a' needs .* it is truncated"),
    "short array cut": (raw_gguf([array("a", STRING, 2, raw_text("x") + struct.pack("<Q", 1 << 40))]), "value of 'a' needs"),
    "alignment 0": (raw_gguf([u32("general.alignment", 0)]), "a power of two from 8 to 1048576, got 0"),
    "alignment 48": (raw_gguf([u32("general.alignment", 48)]), "a power of two from 8 to 1048576, got 48"),
    "alignment 2^31": (raw_gguf([u32("general.alignment", 1 << 31)]), "got 2147483648"),
    "alignment as text": (raw_gguf([text("general.alignment", "32")]), "'general.alignment' to be of type uint32, got string"),
    "split.count as uint32": (raw_gguf([u32("split.count", 2)]), "'split.count' to be of type uint16, got uint32"),
    "empty name": (raw_gguf(tensors=[raw_tensor("")], data=bytes(128)), "expected a name for the name of tensor 0"),
    "name of 64 bytes": (raw_gguf(tensors=[raw_tensor("n" * 64)], data=bytes(128)), "at most 63 bytes, got 64"),
    "name not UTF-8": (raw_gguf(tensors=[raw_tensor(b"\xfe")], data=bytes(128)), "UTF-8 in the name of tensor 0 of 1"),
    "name twice": (raw_gguf(tensors=[raw_tensor("a"), raw_tensor("a", offset=128)], data=bytes(256)), "got 'a' twice"),
    "no dimension": (raw_gguf(tensors=[raw_tensor("a", ())], data=bytes(128)), "1 to 4 dimensions for tensor 'a', got 0"),
    "five dimensions": (raw_gguf(tensors=[raw_tensor("a", (1,) * 5)]), "1 to 4 dimensions for tensor 'a', got 5"),
    "2^32 - 1 dimensions": (raw_gguf(tensors=[raw_tensor("a", n_dims=(1 << 32) - 1)]), "for tensor 'a', got 4294967295"),
    "zero dimension": (raw_gguf(tensors=[raw_tensor("a", (32, 0))]), r"dimensions above 0 for tensor 'a', got \(32, 0\)"),
    "elements overflow": (raw_gguf(tensors=[raw_tensor("a", (1 << 32, 1 << 32))]), "size of tensor 'a' to fit 63 bits"),
    "bytes overflow": (raw_gguf(tensors=[raw_tensor("a", (F32_MAX + 1,))]), "size of tensor 'a' to fit 63 bits"),
    "type 31": (raw_gguf(tensors=[raw_tensor("a", type_id=31)]), "tensor 'a' has the unknown type id 31"),
    "type 43": (raw_gguf(tensors=[raw_tensor("a", type_id=43)]), "tensor 'a' has the unknown type id 43"),
    "row not divisible": (raw_gguf(tensors=[raw_tensor("a", (288,), 12)]), "divisible by 256, the block of Q4_K, got 288"),
    "table cut": (raw_gguf(n_tensors=1, data=raw_tensor("a" * 20)[:-4]), "tensor 'aaaaaaaaaaaaaaaaaaaa' needs 8 bytes"),
    "offset unaligned": (raw_gguf(tensors=[raw_tensor("a", offset=8)], data=bytes(256)), "'a' to start at a multiple of 32"),
    "beyond the file": (raw_gguf(tensors=[raw_tensor("a", offset=1 << 62)], data=bytes(256)), "'a' ends at byte .* truncated"),
    "no data": (raw_gguf(tensors=[raw_tensor("a")], data=bytes(127)), "ends at byte 192, but the file ends at byte 191"),
    "overlap": (raw_gguf(tensors=[raw_tensor("a"), raw_tensor("b", offset=96)], data=bytes(512)),
                "tensor 'b' starts at byte 192, inside tensor 'a', which ends at byte 224"),
    "same place": (raw_gguf(tensors=[raw_tensor("a"), raw_tensor("b")], data=bytes(512)), "inside tensor"),
    "control characters": (raw_gguf(tensors=[raw_tensor("\x1b[2J", type_id=77)]), r"tensor '\\x1b\[2J' has"),
}


@pytest.mark.parametrize(("content", "expected"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=expected) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_every_truncation_is_met(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(VALID)
    for n in reversed(range(len(VALID))):
        os.truncate(path, n)
        with pytest.raises(GgufError):
            read_header(path)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="got a folder or a device"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GgufError, match="got a folder or a device"):
        read_header(tmp_path / "fifo")
    with pytest.raises(GgufError, match=r"none\.gguf: cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


@pytest.mark.parametrize(("keys", "expected"), [
    ([array("a", STRING, 1 << 31, b"")], "at most 128.00 MiB, but the value of 'a' goes beyond"),
    ([array("a", UINT8, 1 << 35, b"")], "at most 128.00 MiB, but the value of 'a' goes beyond"),
    ([array("a", STRING, 1 << 20, b"")], "expected a name for metadata key 1 of 2"),
    ([raw_key("a", STRING, struct.pack("<Q", 33 << 20))], "the value of 'a' to have at most 33554432 bytes"),
    ([raw_key("a", STRING, struct.pack("<Q", 20 << 20) + bytes(20 << 20)), raw_key("b", STRING, struct.pack("<Q", 20 << 20))],
     "at most 32.00 MiB of text in the metadata, but the value of 'b' goes beyond"),
], ids=["2 G strings", "32 G bytes", "1 M empty strings", "33 MiB of text", "40 MiB of text in two"])
@pytest.mark.slow
def test_huge_claims_are_met_soon(tmp_path: Path, keys: list[bytes], expected: str) -> None:
    """A file with a hole is as long as it likes, so the file's size bounds nothing."""
    path = tmp_path / "hole.gguf"
    path.write_bytes(raw_gguf(keys, n_keys=len(keys) + 1))
    os.truncate(path, 1 << 40)
    start = time.process_time()
    with pytest.raises(GgufError, match=expected):
        read_header(path)
    assert time.process_time() - start < 2


def test_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(VALID)
    monkeypatch.setattr(os, "pread", lambda handle, n, at: b"GG")
    with pytest.raises(GgufError, match="became shorter while it was read"):
        read_header(path)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_split_is_read_from_any_shard(tmp_path: Path, given: int) -> None:
    (whole,) = tiny_model(tmp_path / "whole.gguf")
    parts = tiny_model(tmp_path / "m.gguf", n_part=3)
    header, single = read_header(parts[given]), read_header(whole)
    assert (parts[given], tuple(parts)) == (header.path, header.parts)
    assert [(t.name, t.shape, t.type) for t in single.tensors] == [(t.name, t.shape, t.type) for t in header.tensors]
    assert {0, 1, 2} == {t.part for t in header.tensors}
    assert sum(p.stat().st_size for p in parts) == header.file_bytes
    assert single.metadata == {k: v for k, v in header.metadata.items() if not k.startswith("split.")}
    for tensor in header.tensors:
        in_single = next(t for t in single.tensors if t.name == tensor.name)
        with parts[tensor.part].open("rb") as shard, whole.open("rb") as file:
            shard.seek(tensor.offset)
            file.seek(in_single.offset)
            assert file.read(in_single.size_bytes) == shard.read(tensor.size_bytes)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    parts = tiny_model(tmp_path / "m.gguf", n_part=3)
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(GgufError, match=r"all 3 shards beside it, missing m-00002-of-00003\.gguf: fetch"):
            read_header(path)


def test_shard_under_another_name(tmp_path: Path) -> None:
    parts = tiny_model(tmp_path / "m.gguf", n_part=2)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match=r"a file name that ends in -00001-of-00002\.gguf"):
        read_header(renamed)
    parts[1].rename(parts[0])
    with pytest.raises(GgufError, match=r"a file name that ends in -00002-of-00002\.gguf"):
        read_header(parts[0])


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(raw_gguf(split(0, 2, 2), [raw_tensor("a")], data=bytes(128)))

    def reads(content: bytes, expected: str) -> None:
        second.write_bytes(content)
        with pytest.raises(GgufError, match=expected):
            read_header(first)

    reads(raw_gguf(split(0, 2, 2), [raw_tensor("b")], data=bytes(128)), "m-00002-of-00002.gguf: expected split.no 1, got 0")
    reads(raw_gguf(split(1, 3, 2), [raw_tensor("b")], data=bytes(128)), "expected split.count 2, got 3")
    reads(raw_gguf(tensors=[raw_tensor("b")], data=bytes(128)), "expected split.no 1, got no such key")
    reads(raw_gguf(split(1, 2, 2), [raw_tensor("b"), raw_tensor("c", offset=128)], data=bytes(256)),
          "m-00001-of-00002.gguf: expected split.tensors.count 3, got 2")
    reads(raw_gguf(split(1, 2, 2), [raw_tensor("a")], data=bytes(128)), "unique tensor names, got 'a' in two shards")
    reads(VALID[:90], "m-00002-of-00002.gguf: .* truncated")
    second.write_bytes(raw_gguf(split(1, 2, 2), [raw_tensor("b")], data=bytes(128)))
    assert [(t.name, t.part) for t in read_header(first).tensors] == [("a", 0), ("b", 1)]


def test_one_shard_of_one_is_single(tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes(raw_gguf(split(0, 1, 1), [raw_tensor("a")], data=bytes(128)))
    assert (path,) == read_header(path).parts


def test_get_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(raw_gguf([raw_key("flag", BOOL, b"\1"), u32("n", 3), array("x", UINT8, 2, b"ab")]))
    header = read_header(tmp_path / "a.gguf")
    assert header.get("n", int) == 3
    assert header.get("flag", bool) is True
    assert header.get("none", str) is None
    with pytest.raises(GgufError, match="expected flag to be of type int, got the bool True"):
        header.get("flag", int)
    with pytest.raises(GgufError, match="expected x to be of type str, got an array of 2 uint8"):
        header.get("x", str)


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), n=st.integers(1, 8), cut=st.booleans())
@pytest.mark.slow
def test_no_mutation_escapes(tmp_path: Path, mutants: bytes, seed: int, n: int, cut: bool) -> None:
    """Any bytes changed, and the end cut off at times: an answer inside the file, or a `GgufError` that names it, soon."""
    rng = random.Random(seed)
    content = bytearray(mutants)
    for _ in range(n):
        content[rng.randrange(len(content))] = rng.choice([0, 1, 0x7f, 0x80, 0xff, rng.randrange(256)])
    path = tmp_path / "mutant.gguf"
    path.write_bytes(content[:rng.randrange(len(content))] if cut else content)
    refusal, tensors = "", tuple[TensorInfo, ...]()
    try:
        tensors = describe_model(read_header(path)).header.tensors
    except GgufError as error:
        refusal = str(error)
    assert not refusal or "mutant.gguf" in refusal
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all(0 < tensor.offset <= tensor.offset + tensor.size_bytes <= path.stat().st_size for tensor in tensors)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model whose header is most of the file, so that mutations meet it."""
    keys = {"general.name": "m", "llama.block_count": 2, "llama.nextn_predict_layers": 1, "llama.expert_count": 4,
            "llama.expert_used_count": 2, "general.file_type": 15, "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "x", "llama.context_length": 64}
    names = ("token_embd.weight", "blk.0.ssm_a", "blk.1.nextn.eh_proj.weight")
    tensors: Tensors = dict.fromkeys(names, ((8, 2), "F32"))
    (path,) = tiny_gguf(tmp_path_factory.mktemp("mutants") / "m.gguf", tensors, keys)
    return path.read_bytes()


@pytest.mark.parametrize(("what", "message"), [
    ("header_bytes", "header of at most"), ("text_bytes", "of text in the metadata"), ("n_keys", "all shards together"),
    ("n_tensors", "all shards together"),
])
def test_thousands_of_shards_cost_no_more_than_one_file(what: str, message: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is within the limits, and all of them together are not."""
    parts = tiny_gguf(tmp_path / "m.gguf", dict.fromkeys("abc", ((32,), "F32")), n_part=3)
    spent = Budget()
    for part in parts[:2]:
        read_part(part, spent)
    enough_for_two = getattr(Budget(), what) - getattr(spent, what)
    monkeypatch.setattr("quantkit.spec.gguf_header.Budget", lambda: Budget(**{what: enough_for_two}))
    with pytest.raises(GgufError, match=rf"m-00003.*{message}"):
        read_header(parts[0])
    monkeypatch.undo()
    assert [t.name for t in read_header(parts[2]).tensors] == ["a", "b", "c"]
