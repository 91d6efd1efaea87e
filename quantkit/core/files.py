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
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.core.errors import EnvironmentFault, InputError, NoSpace, RunLocked
from quantkit.core.units import format_bytes

_TEMP_NAME = re.compile(r"\..*\.[0-9]+-[0-9a-f]{8}\.tmp", re.DOTALL)
_TEMP_STEM_BYTES = 200  # leaves room for the rest of the name within the 255 bytes that file systems allow
_LOCK_NAME = ".lock"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: BaseException) -> bool:
    """Whether the system refused for want of space, of a quota's too."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def tell_no_room(target: Path, n_bytes: int, error: BaseException) -> None:
    """Say why native code, which tells no reason, failed to write: its disk has less room left than the rest of the file needs.

    Raises:
        NoSpace: so it is.
    """
    if shutil.disk_usage(target.parent).free < n_bytes:
        raise NoSpace(f"the disk is full while writing {target}: free some space and run again") from error


@contextlib.contextmanager
def telling_full(path: Path) -> Iterator[None]:
    """A full disk under a block is told in one sentence.

    Raises:
        NoSpace: names the path.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise NoSpace(f"the disk is full while writing {path}: free some space and run again") from error
        raise


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

    The file is flushed to disk, then renamed, then the folder is flushed. Missing folders are made. Nothing is checked about an
    existing target: callers ask `refuse_overwrite` first. A target that is a symlink is replaced, not written through.

    Raises:
        NoSpace: the disk is full, before the block or in it.
        InputError: before the block: the folder cannot be made or written to, or the name cannot exist.
    """
    temp = temp_path(target)
    try:
        with telling_full(target):
            _prove_writable(target, temp)
            yield temp
            sync_file(temp)
            temp.replace(target)
            sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):  # where the folder itself is gone, that is what matters
            temp.unlink(missing_ok=True)


def _prove_writable(target: Path, temp: Path) -> None:
    """Fail before the work, not at the rename after hours of it."""
    is_taken(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.touch(exist_ok=False)
        temp.unlink()  # so that a block that writes nothing is not taken for one that wrote an empty file
    except OSError as error:
        if is_full(error):
            raise
        raise InputError(f"cannot write {target}: {error.strerror}; choose another output path") from error


def temp_path(target: Path) -> Path:
    """A fresh temporary name beside a target, short enough for the longest target names."""
    stem = os.fsencode(target.name)[:_TEMP_STEM_BYTES].decode(errors="ignore")
    return target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_atomic(target: Path, data: bytes) -> None:
    """Write bytes to a file, whole or not at all."""
    with atomic_path(target) as temp:
        temp.write_bytes(data)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process's own, removed at its end.

    Raises:
        EnvironmentFault: there is nowhere to make one.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="quantkit-")
    except OSError as error:
        raise EnvironmentFault("expected a folder for temporary files, found none that can be written to "
                               f"({error.strerror or error}): set TMPDIR to one that can") from error


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
    left = find_leftovers(folder)
    for path in left:
        path.unlink()
    return left


def find_leftovers(folder: Path) -> list[Path]:
    """The temporary files below a folder: a killed run's, or those of a run that is still going."""
    return sorted(p for p in folder.rglob(".*.tmp") if _TEMP_NAME.fullmatch(p.name) and p.is_file() and not p.is_symlink())


def is_same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file, through links of both kinds, or would if they existed."""
    try:
        return a.samefile(b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


def is_taken(path: Path) -> bool:
    """Whether something is at a path, a link to nothing included.

    Raises:
        InputError: nothing can ever be there, a name that is too long or a folder that may not be entered.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another output path") from error
    return True


def refuse_overwrite(target: Path, inputs: Iterable[Path], *, force: bool = False) -> None:
    """Refuse an output that is one of the inputs, always, and one that exists, unless forced.

    Args:
        target: where the output shall go.
        inputs: every file that is read, all parts of a split model included.
        force: an existing file that is no input may be replaced.

    Raises:
        InputError: names the input that would be destroyed, or the existing file, or says why the path is impossible.
    """
    for path in inputs:
        if is_same_file(target, path):
            raise InputError(f"the output {target} is the input {path}: writing it would destroy the input; "
                             "choose another output path")
    if not is_taken(target):
        return
    if target.is_dir():
        raise InputError(f"expected a file path for the output, got the folder {target}: add a file name")
    if not force:
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


def lock_holder(folder: Path) -> str | None:
    """The pid of the process that works in a folder, as it wrote it, or "unknown"; None where none does. Writes nothing."""
    try:
        handle = os.open(folder / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)
    except BlockingIOError:
        return os.pread(handle, 100, 0).decode(errors="replace").strip() or "unknown"
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


class FolderLock:
    """One process at a time in a run directory.

    The lock is the kernel's (`flock`), so it ends with its holder however that dies; the file only says who holds it.

    Raises (on entry):
        RunLocked: another process holds it; names its pid.
        NoSpace: the disk is full.
        EnvironmentFault: the folder cannot be written to, or its file system knows no locks.

    Args:
        folder: made if it is missing.
        works_on: what a refusal calls the work, the folder itself by default.
    """

    def __init__(self, folder: Path, works_on: Path | None = None) -> None:
        self._path = folder / _LOCK_NAME
        self._advice = "choose another run directory" if works_on is None else "choose another output path"
        self._what = f"works in {folder}" if works_on is None else f"works on {works_on}"
        self._handle = -1

    def __enter__(self) -> FolderLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if is_full(error):
                raise NoSpace(f"the disk is full at {self._path.parent}: free some space and run again") from error
            raise EnvironmentFault(f"cannot work in {self._path.parent}: {error.strerror}; {self._advice}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._handle, 100, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            raise RunLocked(f"another process (pid {holder}) {self._what}: wait for it to end, or {self._advice}") from error
        except OSError as error:
            os.close(self._handle)
            raise EnvironmentFault(f"cannot lock {self._path.parent}: {error.strerror}; "
                                   "choose a run directory on a local disk") from error
        with contextlib.suppress(OSError):  # a full disk has no room for a name; the lock is held all the same
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)  # the file stays: unlinking a locked file lets two holders in
        fcntl.flock(self._handle, fcntl.LOCK_UN)  # closing is not enough: a process being started shares it for a moment
        os.close(self._handle)
