"""Files: written whole or not at all, hashed, locked; inputs are never touched.

A temporary file lies beside its target and is named `.<target>.<pid>-<random>.tmp`, so that a rename within one file system
publishes it and a later run can recognise what a killed one left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.core.errors import InputError, NoSpace, RunLocked
from quantkit.core.units import format_bytes

_TEMP_SUFFIX = ".tmp"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, ASCII, shortest floats, no NaN.

    Raises:
        ValueError: a float that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_json(value: Any) -> str:
    """Hex sha256 of the canonical form of a JSON value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def pretty_json(value: Any) -> bytes:
    """JSON for files that people read: two spaces, keys in the order given, a newline at the end."""
    return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside the target; it becomes the target when the block ends well, and is removed otherwise.

    The file is flushed to disk, then renamed, then the folder is flushed. Missing folders are made. A full disk is told as
    `NoSpace`. Nothing is checked about an existing target: callers ask `refuse_overwrite` first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_path(target)
    try:
        yield temp
        sync_file(temp)
        os.replace(temp, target)
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise NoSpace(f"the disk is full while writing {target}: free some space and run again") from error
        raise
    finally:
        temp.unlink(missing_ok=True)


def temp_path(target: Path) -> Path:
    """A fresh temporary name beside a target, short enough for the longest target names."""
    stem = target.name.encode()[:200].decode(errors="ignore")
    return target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}{_TEMP_SUFFIX}")


def write_atomic(target: Path, data: bytes) -> None:
    """Write bytes to a file, whole or not at all."""
    with atomic_path(target) as temp:
        temp.write_bytes(data)


def sync_file(path: Path) -> None:
    """Flush one file to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    with contextlib.suppress(OSError):
        sync_file(folder)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the temporary files that a killed run left below a folder; the caller holds the folder's lock."""
    left = sorted(p for p in folder.rglob(f".*{_TEMP_SUFFIX}") if p.is_file())
    for path in left:
        path.unlink()
    return left


def is_same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file, through links of both kinds too."""
    if a.exists() and b.exists():
        return os.path.samefile(a, b)
    return a.resolve() == b.resolve()


def refuse_overwrite(target: Path, inputs: Iterable[Path], *, force: bool = False) -> None:
    """Refuse an output that is one of the inputs, always, and one that exists, unless forced.

    Args:
        target: where the output shall go.
        inputs: every file that is read, all parts of a split model included.
        force: an existing file that is no input may be replaced.

    Raises:
        InputError: names the input that would be destroyed, or the existing file.
    """
    for path in inputs:
        if is_same_file(target, path):
            raise InputError(f"the output {target} is the input {path}: writing it would destroy the input; "
                             "choose another output path")
    if target.is_dir():
        raise InputError(f"expected a file path for the output, got the folder {target}")
    if target.exists() and not force:
        raise InputError(f"the output {target} exists already: choose another path or pass --force to replace it")


def require_space(folder: Path, n_bytes: int, what: str) -> None:
    """Refuse work that cannot fit.

    Raises:
        NoSpace: the file system of the folder has less free space than is needed.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < n_bytes:
        raise NoSpace(f"{what} needs {format_bytes(n_bytes)}, but {folder} has {format_bytes(free)} free: "
                      "free some space or choose another folder")


class FolderLock:
    """One process at a time in a run directory.

    The lock is the kernel's (`flock`), so it ends with its holder however that dies; the file only says who holds it.

    Raises (on entry):
        RunLocked: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._handle = -1

    def __enter__(self) -> FolderLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 100, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            raise RunLocked(f"another process (pid {holder}) works in {self._path.parent}: wait for it to end, "
                            "or choose another run directory") from error
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.ftruncate(self._handle, 0)  # the file stays: unlinking a locked file lets two holders in
        os.close(self._handle)
