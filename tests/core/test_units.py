"""Sizes read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.core.units import GIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(("size_bytes", "text"), [
    (0, "0 B"), (812, "812 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"),
    (4_382_144, "4.18 MiB"), (1_048_575, "1.00 MiB"), (GIB - 1, "1.00 GiB"), (50 * 10**9, "46.57 GiB"),
    (5000 * GIB, "5000.00 GiB"), (-1536, "-1.50 KiB"),
])
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("text", "size_bytes"), [
    ("0", 0), ("812", 812), ("812 B", 812), ("1kB", 1000), ("1KiB", 1024), ("1.5 MiB", MIB * 3 // 2), ("45GB", 45 * 10**9),
    ("16GiB", 16 * GIB), ("16gib", 16 * GIB), (" 2 TB ", 2 * 10**12), ("2TiB", 2 << 40),
    ("9007199254740993", 2**53 + 1), ("0.1KiB", 102), ("1.1GB", 1_100_000_000),
])
def test_parse_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "16G", "1.GiB", ".5GiB", "1,5GiB", "1 GiB 2", "٣GiB", "nan"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a size such as 16GiB or 45GB, got"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_what_is_written_is_read_back_within_its_two_decimals(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= 0.005 * size_bytes + 1  # a part of a byte is dropped
