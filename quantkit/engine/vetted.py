"""The one gate between a path and native code: no file reaches llama.cpp before its header was read with bounds.

llama.cpp believes a header: lengths and counts become allocations, a wrong type an abort. So every native load and every quantize
call takes its path from here. A header costs 0.1 s at 250,000 tokens; a file that did not change since is not read again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.gguf_part import read_part

_Print = tuple[int, int, int, int]  # device, inode, size, time of the last change
_seen: dict[Path, tuple[tuple[Path, _Print], ...]] = {}  # a path that passed, and the files that made it pass


def native_path(path: Path) -> bytes:
    """A model's path as llama.cpp takes it, once its header, and those of all its shards, passed the reader.

    Raises:
        GgufError: see `read_header`.
    """
    if not _is_known(path):
        _remember(path, read_header(path).parts)
    return os.fsencode(path)


def native_paths(paths: Sequence[Path]) -> list[bytes]:
    """The same of files that make up one model together, each judged by itself: their names need not be those of shards.

    Raises:
        GgufError: see `read_part`.
    """
    for path in paths:
        if not _is_known(path):
            read_part(path)
            _remember(path, (path,))
    return [os.fsencode(path) for path in paths]


def _is_known(path: Path) -> bool:
    held = _seen.get(path)
    return held is not None and all(_fingerprint(part) == known for part, known in held)


def _remember(path: Path, parts: Sequence[Path]) -> None:
    if len(_seen) > 10_000:  # a search makes many trials of the same few hundred files
        _seen.clear()
    _seen[path] = tuple((part, found) for part in parts if (found := _fingerprint(part)) is not None)
    if len(_seen[path]) != len(parts):
        del _seen[path]
        raise GgufError(f"{path}: the file went away while it was read: wait until nothing moves it")


def _fingerprint(path: Path) -> _Print | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
