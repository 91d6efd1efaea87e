"""A store of bundles that replace each other.

    STORE/ bundles/<result_id>/     whole bundles, each with label.json: how it came here
           current                  a symlink to one of them
           rejected/<result_id>/    candidates that were not taken, each with label.json: why

A bundle appears under its name by one rename, whole and flushed to disk; after that `current` moves by one rename of a symlink. A
process that dies anywhere leaves the old bundle or the new one as current, whole. Model files are hard links where the file system
can, everything else is copied and hashed. Nothing is ever deleted but what a killed process left half made.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import EnvironmentFault, InputError
from quantkit.core.files import FolderLock, pretty_json, sha256_file, sync_file, sync_folder, telling_full, temp_path, write_atomic
from quantkit.job.hub.names import MANIFEST, Entry, add_apart, read_listing
from quantkit.job.manifest import APART
from quantkit.job.rundir import read_json

LABEL = "label.json"
_RESULT_ID = re.compile(r"[0-9a-f]{64}")
_HALF_MADE = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp", re.DOTALL)
_PLACES = ("bundles", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store, locked by this process."""

    path: Path

    @property
    def current(self) -> Path:
        return self.path / "current"

    def current_id(self) -> str | None:
        """The result id that `current` leads to; None in a new store.

        Raises:
            InputError: `current` is no link to a whole bundle of the store.
        """
        if not os.path.lexists(self.current):
            return None
        target = self.current.readlink() if self.current.is_symlink() else None
        if (target is None or target.parts[:-1] != ("bundles",) or not _RESULT_ID.fullmatch(target.name)
                or not (self.current / MANIFEST).is_file()):
            raise InputError(f"expected {self.current} to be a link to bundles/<result_id>, found something else: this is no store "
                             "of quantkit, or somebody moved its bundles; give another folder, or put the link back")
        return target.name

    def bundle(self, result_id: str) -> Path:
        return self.path / "bundles" / result_id

    def label(self, result_id: str) -> dict[str, Any]:
        """How a bundle came into the store.

        Raises:
            InputError: there is no label.
        """
        held = read_json(self.bundle(result_id) / LABEL)
        if not isinstance(held, dict):
            raise InputError(f"expected {LABEL} in {self.bundle(result_id)}, found none that can be read: the bound on commits is "
                             "in it; begin a new store")
        return held

    def commit(self, run: Path, result_id: str, label: Mapping[str, Any]) -> None:
        """Make a run's bundle the current one: put it beside the others, then move `current`."""
        self._place(run, "bundles", result_id, label)
        temp = temp_path(self.current)
        temp.symlink_to(Path("bundles") / result_id)
        temp.replace(self.current)
        sync_folder(self.path)

    def reject(self, run: Path | None, result_id: str, label: Mapping[str, Any]) -> Path:
        """Keep a candidate that was not taken, as evidence; without a run its label alone."""
        return self._place(run, "rejected", result_id, label)

    def _place(self, run: Path | None, place: str, result_id: str, label: Mapping[str, Any]) -> Path:
        target = self.path / place / result_id
        if run is not None and target.exists() and not (target / MANIFEST).exists():
            shutil.rmtree(target)  # a label alone, of the same candidate when it did not verify
        if target.exists():  # it was here before: only its label is new
            write_atomic(target / LABEL, pretty_json(label))
            return target
        target.parent.mkdir(exist_ok=True)
        temp = temp_path(target)
        temp.mkdir()
        try:
            if run is not None:
                _copy_bundle(run, temp)
            write_atomic(temp / LABEL, pretty_json(label))
            _sync_folders(temp)
            temp.replace(target)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        sync_folder(target.parent)
        return target


@contextlib.contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """Lock a store, make it if it is new, and clear what a killed process left half made.

    Raises:
        InputError: other files are there. RunLocked: another process works in it. NoSpace: the disk is full, in the block too.
    """
    known = {*_PLACES, "current", ".lock"}
    if path.exists():
        if not path.is_dir():
            raise InputError(f"expected a folder for the store, found the file {path}: choose another path")
        if others := [p.name for p in path.iterdir() if p.name not in known and not _HALF_MADE.fullmatch(p.name)]:
            raise InputError(f"expected a store of quantkit or an empty folder, found {others[0]} in {path}: choose another folder")
    with FolderLock(path), telling_full(path):
        for folder in (path, *(path / place for place in _PLACES)):
            for left in folder.glob(".*.tmp") if folder.is_dir() else ():
                if _HALF_MADE.fullmatch(left.name):
                    left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)
        yield Store(path=path)


def _copy_bundle(run: Path, target: Path) -> None:
    data = (run / MANIFEST).read_bytes()
    listing = read_listing(data, str(run / MANIFEST))
    if (run / APART).exists():
        apart = (run / APART).read_bytes()
        listing = add_apart(listing, apart, str(run / APART))
        write_atomic(target / APART, apart)
    for entry in listing.entries:
        destination = target / entry.path
        destination.parent.mkdir(parents=True, exist_ok=True)
        if not (entry.path.startswith("quants/") and _link(run / entry.path, destination)):
            _copy(run / entry.path, destination, entry)
    (target / MANIFEST).write_bytes(data)
    sync_file(target / MANIFEST)


def _link(source: Path, destination: Path) -> bool:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # another file system, or one without hard links
        return False
    return True


def _copy(source: Path, destination: Path, entry: Entry) -> None:
    shutil.copyfile(source, destination)
    sync_file(destination)
    if sha256_file(destination) != entry.sha256:
        raise EnvironmentFault(f"expected sha256 {entry.sha256} for the copy of {source}, found another: the run changed "
                               "meanwhile, or the disk is failing; verify the run and try again")


def _sync_folders(folder: Path) -> None:
    for where, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(where))
