"""Metadata pairs by their bytes: copied, changed, cut, and put in order."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_header import ArrayValue, read_header
from quantkit.spec.gguf_raw import (
    RawPair,
    merge_orders,
    read_pairs,
    sources_of,
    tensor_bytes,
    uint32_pair,
    with_first,
    with_uint32,
    write_gguf,
)
from tests.gguf_factory import raw_gguf, raw_key, raw_tensor, raw_text, tiny_gguf

NAMES = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=8)


def array(key: str, type_id: int, code: str, values: list[int]) -> bytes:
    return raw_key(key, 9, struct.pack("<IQ", type_id, len(values)) + struct.pack(f"<{len(values)}{code}", *values))


def test_pairs_are_the_bytes_of_the_file_whatever_their_type(tmp_path: Path) -> None:
    keys = [raw_key("general.architecture", 8, raw_text("llama")), raw_key("a.u8", 0, b"\x07"),
            raw_key("a.i64", 11, struct.pack("<q", -5)), raw_key("a.f64", 12, struct.pack("<d", 0.1)),
            raw_key("a.bool", 7, b"\x01"), array("a.u16s", 2, "H", [1, 2, 3]),
            raw_key("a.texts", 9, struct.pack("<IQ", 8, 2) + raw_text("ü") + raw_text("")),
            raw_key("split.count", 2, struct.pack("<H", 0))]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(keys, [raw_tensor("t", (32,))], data=bytes(128)))
    pairs = read_pairs(read_header(path))
    assert [pair.data for pair in pairs] == keys[:-1]  # how the file is split is not metadata of the model
    assert [pair.key for pair in pairs] == ["general.architecture", "a.u8", "a.i64", "a.f64", "a.bool", "a.u16s", "a.texts"]


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {"t": ((32,), "F32")}, big_endian=True)[0]
    with pytest.raises(GgufError, match="expected a little-endian file"):
        read_pairs(read_header(path))


def test_another_number_keeps_its_key() -> None:
    assert with_uint32(RawPair("x.n", raw_key("x.n", 10, struct.pack("<Q", 9))), 3) == uint32_pair("x.n", 3)
    assert uint32_pair("x.n", 3).data == raw_key("x.n", 4, struct.pack("<I", 3))


@pytest.mark.parametrize(("type_id", "code"), [(7, "B"), (5, "i"), (4, "I"), (6, "f"), (10, "Q"), (2, "H")])
def test_an_array_is_cut_and_keeps_its_element_type(type_id: int, code: str) -> None:
    pair = RawPair("x.a", array("x.a", type_id, code, [1, 0, 1, 1]))
    assert with_first(pair, 2).data == array("x.a", type_id, code, [1, 0])


@pytest.mark.parametrize("data", [raw_key("x.a", 4, struct.pack("<I", 3)), array("x.a", 5, "i", [1]),
                                  raw_key("x.a", 9, struct.pack("<IQ", 8, 2) + raw_text("u") + raw_text("v"))])
def test_what_cannot_be_cut_is_refused(data: bytes) -> None:
    with pytest.raises(GgufError, match=r"expected an array of at least 2 numbers as x\.a"):
        with_first(RawPair("x.a", data), 2)


@given(first=NAMES, second=NAMES)
def test_merged_orders_hold_every_name_once_and_keep_the_firsts_order(first: list[str], second: list[str]) -> None:
    merged = merge_orders(first, second)
    assert sorted(merged) == sorted({*first, *second})
    assert [name for name in merged if name in first] == first


@given(whole=st.lists(st.integers(0, 99).map(str), unique=True, max_size=20),
       keep=st.lists(st.booleans(), min_size=20, max_size=20))
@pytest.mark.slow
def test_an_order_that_was_taken_apart_comes_back_where_anchors_tell_it(whole: list[str], keep: list[bool]) -> None:
    """Names only one side has stand between the names that both have: the first's before the second's."""
    both = {name for name, kept in zip(whole, keep, strict=False) if kept}
    merged = merge_orders([n for n in whole if n in both], whole)
    assert merged == whole


def test_own_names_of_the_first_come_before_those_of_the_second() -> None:
    assert merge_orders(["emb", "blk.0", "blk.1", "norm"], ["emb", "blk.2", "norm"]) == ["emb", "blk.0", "blk.1", "blk.2", "norm"]
    assert merge_orders(["a"], ["x", "a", "y"]) == ["x", "a", "y"]
    assert merge_orders([], ["x"]) == ["x"]


def test_a_file_of_all_pairs_and_tensors_is_the_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {"t": ((64, 3), "BF16"), "u": ((32,), "F32"), "v": ((64, 1), "Q8_0")},
                     {"a.b": 3, "a.c": ["x", "y"]})[0]
    header, out = read_header(path), io.BytesIO()
    told: dict[str, bytes] = {}
    write_gguf(out, version=header.version, alignment=header.alignment, pairs=read_pairs(header), tensors=sources_of(header),
               on_tensor=lambda name, piece: told.update({name: told.get(name, b"") + piece}))
    assert out.getvalue() == path.read_bytes()
    assert told == {source.info.name: b"".join(tensor_bytes(source)) for source in sources_of(header)}


def test_a_source_that_became_shorter_is_told(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {"t": ((64, 64), "F32")})[0]
    source = sources_of(read_header(path))[0]
    with path.open("r+b") as file:
        file.truncate(source.info.offset + 100)
    with pytest.raises(GgufError, match="ends inside tensor 't'"):
        list(tensor_bytes(source))


def test_a_long_vocabulary_is_copied_without_being_decoded(tmp_path: Path) -> None:
    tokens = [f"token {i} ü" for i in range(5000)]
    path = tiny_gguf(tmp_path / "m.gguf", {"t": ((32,), "F32")}, {"tokenizer.ggml.tokens": tokens})[0]
    header = read_header(path)
    held = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(held, ArrayValue)
    assert held.values is None  # skimmed by the reader
    (pair,) = (p for p in read_pairs(header) if p.key == "tokenizer.ggml.tokens")
    assert pair.data == raw_key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 5000) + b"".join(map(raw_text, tokens)))
