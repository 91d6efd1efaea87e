"""Chunks that survive a kill, of any length: one file each, written whole, that begins with the sha256 of the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantkit.core.files import write_atomic

SUFFIX = ".chunk"
_HASH_BYTES = 32


class ChunkFolder:
    """The chunks of one piece of work, known by their numbers.

    Args:
        folder: its name holds a hash of everything that the work depends on, so chunks of other inputs are never taken for ours.
        n_parts: arrays of bytes in each chunk.
    """

    def __init__(self, folder: Path, n_parts: int) -> None:
        self._folder, self._n_parts = folder, n_parts
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, chunks: Sequence[int]) -> list[int]:
        """Those chunks that are not there, or whose bytes are not those that were written."""
        return [chunk for chunk in chunks if self.load(chunk) is None]

    def save(self, chunk: int, parts: Sequence[bytes]) -> None:
        """Write a chunk, on disk when this returns."""
        body = b"".join([np.array([len(part) for part in parts], "<i8").tobytes(), *parts])
        write_atomic(self._path(chunk), hashlib.sha256(body).digest() + body)

    def load(self, chunk: int) -> list[bytes] | None:
        """A chunk's parts; None if there is no sound one."""
        try:
            data = self._path(chunk).read_bytes()
        except OSError:
            return None
        start = _HASH_BYTES + 8 * self._n_parts
        if len(data) < start or hashlib.sha256(memoryview(data)[_HASH_BYTES:]).digest() != data[:_HASH_BYTES]:
            return None
        stops = start + np.cumsum(np.frombuffer(data, "<i8", self._n_parts, _HASH_BYTES))
        return [data[int(a):int(b)] for a, b in zip([start, *stops[:-1]], stops, strict=True)]

    def _path(self, chunk: int) -> Path:
        return self._folder / f"{chunk:08d}{SUFFIX}"
