"""Units: bytes and how they are written. GiB means 2^30 bytes, MiB 2^20, GB 10^9."""

from __future__ import annotations

import re
from fractions import Fraction

from quantkit.core.errors import InputError

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}


def format_bytes(size_bytes: int) -> str:
    """A size for people, in binary units with two decimals: `16.79 GiB`, `4.18 MiB`, `812 B`. GiB is the largest unit."""
    size = float(size_bytes)
    if abs(size) < 1024:
        return f"{size_bytes} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if abs(size) < 1023.995:  # what would round to 1024.00 goes to the next unit
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} GiB"


def parse_bytes(text: str) -> int:
    """Bytes from `16GiB`, `45GB`, `1.5 MiB` or a bare number; a part of a byte is dropped.

    Raises:
        InputError: not a number with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(f"expected a size such as 16GiB or 45GB, got {text!r}: write a number and its unit")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])  # a float cannot hold every count of bytes
