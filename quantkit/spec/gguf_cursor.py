"""A bounded cursor over the bytes of one untrusted file.

Every length is held against the bytes that are left before anything is read or allocated for it, at most one window (1 MiB, or
one string) is in memory at a time, and an error names the file, what was being read and where.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import GgufError
from quantkit.core.units import MIB, format_bytes

# A 27B header is 11 MB. The bounds keep the worst header below some 300 MB of memory and 5 s, and are far from any real one.
MAX_HEADER_BYTES = 128 * MIB
MAX_TEXT_BYTES = 32 * MIB  # strings kept, in sum
MAX_TENSORS = 1 << 17
MAX_KEYS = 4096
MAX_KEYS_OF_ALL = 1 << 16  # files of one split: each has three of its own

_WINDOW = MIB


@dataclass(slots=True)
class Budget:
    """What is left for the headers of all files of one model together: thousands of shards cost no more than one file."""

    header_bytes: int = MAX_HEADER_BYTES
    text_bytes: int = MAX_TEXT_BYTES
    n_keys: int = MAX_KEYS_OF_ALL
    n_tensors: int = MAX_TENSORS


class Cursor:
    """Reads one file forward. `doing` is what an error says was being read; `order` is the byte order, "<" or ">"."""

    def __init__(self, path: Path, handle: int, size: int, budget: Budget | None = None) -> None:
        self.at = 0
        self.size = size
        self.order = "<"
        self.doing = "the magic"
        self._path = path
        self._handle = handle
        self.budget = budget or Budget()
        self._end = min(size, self.budget.header_bytes)
        self._window = b""
        self._start = 0

    def fail(self, message: str, then: str = "fetch or convert the file again") -> GgufError:
        """The error to raise, with the file's path before the message and what to do after it."""
        return GgufError(f"{self._path}: {message}; {then}")

    def require(self, n_bytes: int) -> None:
        """Refuse what cannot be there, before anything is read or allocated for it."""
        if n_bytes <= self._end - self.at:
            return
        if self.at + n_bytes <= self.size:
            raise self.fail(f"expected a header of at most {format_bytes(MAX_HEADER_BYTES)}, but {self.doing} goes beyond: "
                            "the file is damaged or not a model")
        raise self.fail(f"{self.doing} needs {n_bytes} bytes at byte {self.at}, but the file ends at byte {self.size}: "
                        "it is truncated or damaged", "fetch or write it again")

    def take(self, n_bytes: int) -> bytes:
        """The next bytes."""
        self.require(n_bytes)
        begin = self.at - self._start
        if begin + n_bytes > len(self._window):
            self._load(n_bytes)
            begin = 0
        self.at += n_bytes
        return self._window[begin:begin + n_bytes]

    def skip(self, n_bytes: int) -> None:
        """Pass over bytes that nobody needs."""
        self.require(n_bytes)
        self.at += n_bytes

    def number(self, code: str) -> Any:
        """One number of a `struct` code."""
        return struct.unpack(self.order + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, max_bytes: int) -> str:
        """A string that is kept: UTF-8, not longer than allowed, all of them together within `MAX_TEXT_BYTES`."""
        length: int = self.number("Q")
        self.require(length)
        if length > max_bytes:
            raise self.fail(f"expected {self.doing} to have at most {max_bytes} bytes, got {length}")
        self.budget.text_bytes -= length
        if self.budget.text_bytes < 0:
            raise self.fail(f"expected at most {format_bytes(MAX_TEXT_BYTES)} of text in the metadata, "
                            f"but {self.doing} goes beyond: the file is damaged or not a model")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"expected UTF-8 in {self.doing}, got byte 0x{error.object[error.start]:02x} "
                            f"at position {error.start}") from None

    def skip_strings(self, n: int) -> None:
        """Pass over strings by their lengths alone: some 10 million a second."""
        self.require(8 * n)
        length_at = struct.Struct(self.order + "Q").unpack_from
        while n:
            self.require(8)
            self._load(8)
            window, here, last = self._window, 0, len(self._window) - 8
            while n and here <= last:
                here += 8 + length_at(window, here)[0]
                n -= 1
            self.skip(here)

    def _load(self, n_bytes: int) -> None:
        self._window, self._start = os.pread(self._handle, max(n_bytes, _WINDOW), self.at), self.at
        if len(self._window) < n_bytes:
            raise self.fail(f"the file became shorter while it was read, at byte {self.at}", "wait until it is complete")
