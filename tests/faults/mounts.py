"""Small, full and read-only file systems, where the tests may mount some."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def small_disk(folder: Path, *, n_page: int = 0, n_inode: int = 0) -> Iterator[Path]:
    """A file system of so many pages, or files; none is no limit. Skips the test where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    _mount(["-t", "tmpfs", "-o", _limits(n_page, n_inode), "tmpfs", str(folder)])
    try:
        yield folder
    finally:
        unmount(folder)


def grow(folder: Path, *, n_page: int = 0, n_inode: int = 0) -> None:
    """Give a small disk other limits."""
    _mount(["-o", f"remount,{_limits(n_page, n_inode)}", str(folder)])


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A folder on which nothing can be written, not by root either."""
    _mount(["--bind", str(folder), str(folder)])
    try:
        _mount(["-o", "remount,ro,bind", str(folder)])
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Take it away, even while something in it is open."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _limits(n_page: int, n_inode: int) -> str:
    return f"size={n_page * PAGE},nr_inodes={n_inode}"  # 0 is no limit to either


def _mount(arguments: list[str]) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes Linux and root")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
