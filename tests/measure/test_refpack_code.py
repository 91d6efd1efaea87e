"""Streams of numbers: what goes in comes out, in few bits, and bytes that are no stream are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.measure.refpack_code import Numbers, decode_numbers, encode_numbers, id_gaps, ids_of_gaps


def numbers(*values: int) -> Numbers:
    return np.array(values, np.uint32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200))
@pytest.mark.slow
def test_numbers_come_back(values: list[int]) -> None:
    data = encode_numbers(numbers(*values))
    decoded = decode_numbers(b"xy" + data + b"z", 2, len(values))
    assert decoded.numbers.tolist() == values
    assert decoded.stop == 2 + len(data)


def test_a_stream_is_what_the_module_says() -> None:
    classes = bytes([0, 1, 2, 2, 4])
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    head = coder.compress(classes) + coder.flush()
    bits = bytes([0b01000000, 0b10100000])  # 2 and 3 leave 0 and 1; 13 = 8 + 5 leaves 101
    assert encode_numbers(numbers(0, 1, 2, 3, 13)) == len(head).to_bytes(4, "little") + head + bits


def test_more_numbers_than_a_slice() -> None:
    values = np.random.default_rng(0).integers(4, 8, 300_001).astype(np.uint32)
    data = encode_numbers(values)
    assert np.array_equal(decode_numbers(data, 0, len(values)).numbers, values)


def test_bits_are_close_to_the_entropy() -> None:
    rng = np.random.default_rng(0)
    gaps = rng.geometric(0.02, 100_000)
    _, counts = np.unique(gaps, return_counts=True)
    entropy = -(counts / len(gaps) * np.log2(counts / len(gaps))).sum()
    assert 8 * len(encode_numbers(gaps.astype(np.uint32))) / len(gaps) < entropy + 0.15


@pytest.mark.parametrize(("data", "n", "found"), [
    (encode_numbers(numbers(1, 2, 3)), 4, "3 of them"),
    (encode_numbers(numbers(1, 2, 3)), 2, "3 of them"),
    (encode_numbers(numbers(100, 200, 300))[:-1], 3, "an early end"),
    (b"\x04\x00\x00\x00\x07bcd", 3, "bytes that zlib cannot read"),
    (b"", 3, "0 of them"),
    (b"\xff\xff\xff\xff\x03\x00", 0, "or a class beyond"),
])
def test_bytes_that_are_no_stream_are_refused(data: bytes, n: int, found: str) -> None:
    with pytest.raises(InputError, match=f"expected the coded numbers of a reference pack, found .*{found}"):
        decode_numbers(data, 0, n)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = bomb.compress(bytes(1 << 24)) + bomb.flush()
    with pytest.raises(InputError, match="11 of them"):
        decode_numbers(len(head).to_bytes(4, "little") + head, 0, 10)


@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=5))
@pytest.mark.slow
def test_ids_come_back(rows: list[set[int]]) -> None:
    ids = [np.array(sorted(row), np.int32) for row in rows]
    gaps = np.concatenate([id_gaps(row) for row in ids])
    assert ids_of_gaps(gaps, np.array([len(row) for row in ids]), 100).tolist() == np.concatenate(ids).tolist()


@pytest.mark.parametrize("gaps", [(1, 0), (50, 51)])
def test_ids_that_do_not_rise_or_reach_too_far_are_refused(gaps: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="token ids that do not rise or reach beyond 99"):
        ids_of_gaps(numbers(*gaps), np.array([2]), 100)
