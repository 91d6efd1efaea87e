"""Fetch a published bundle: the manifest, then every file that it lists, each held against its size and sha256 on the way.

The repository is a stranger's. Names are judged before anything is written, nothing is written through a link, files that the
manifest does not list are not fetched, and the manifest itself is written last: a folder with one is complete. A file on its way
is `.<sha256>.part`; the next start goes on where it ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import CheckFailed, EnvironmentFault, InputError
from quantkit.core.files import FolderLock, require_space, sha256_file, sync_folder, telling_full, write_atomic
from quantkit.core.units import MIB
from quantkit.job.hub.client import Hub, RemoteFile
from quantkit.job.hub.names import MANIFEST, MAX_MANIFEST_BYTES, Entry, add_apart, read_listing
from quantkit.job.manifest import APART
from quantkit.job.progress import Progress

_PIECE_BYTES = 16 * MIB


class Fetched(NamedTuple):
    """What a fetched folder holds: `n_kept` files were there already."""

    result_id: str
    commit: str
    n_files: int
    n_kept: int
    size_bytes: int


def fetch(repo_id: str, target: Path, progress: Progress, *, revision: str | None = None, force: bool = False) -> Fetched:
    """Download a bundle into a folder.

    Args:
        target: a new folder, or one that an earlier fetch of the same bundle began.
        revision: a commit, branch or tag; the default branch's head without one.
        force: replace files in the way, those of another bundle.

    Raises:
        InputError: no such repository, no bundle in it, names that lead elsewhere, or other files in the way.
        CheckFailed: the repository does not hold what its own manifest lists.
        EnvironmentFault: the download failed or was damaged, or the disk is full; the same command goes on from there.
    """
    hub = Hub(repo_id)
    commit = hub.require_head(revision)
    remote = hub.list_files(commit)
    where = f"{MANIFEST} of {repo_id}"
    manifest = _read_listing(hub, remote, commit, MANIFEST)
    listing = read_listing(manifest, where)
    apart = _read_listing(hub, remote, commit, APART) if APART in remote else None
    if apart is not None and read_listing(apart, f"{APART} of {repo_id}").result_id != listing.result_id:
        apart = None  # what an earlier result left in the repository
    if apart is not None:
        listing = add_apart(listing, apart, f"{APART} of {repo_id}")
    _check_remote(listing.entries, remote, where)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"expected a folder to fetch into, got {target}, which is a file or a link: choose another path")
    with FolderLock(target), telling_full(target):
        missing = [entry for entry in listing.entries if not _is_there(target, entry, force=force)]
        if (target / MANIFEST).exists() and (target / MANIFEST).read_bytes() != manifest and not force:
            raise InputError(f"{target} holds another bundle: choose another folder, or pass --force to replace its files")
        require_space(target, sum(entry.size_bytes for entry in missing), f"fetching {repo_id}")
        progress.start(f"fetch {repo_id}, MiB", sum(-(-entry.size_bytes // MIB) for entry in missing))
        for entry in missing:
            fetch_file(hub, remote[entry.path], commit, target, entry, progress)
        progress.finish()
        for name, data in ((APART, apart), (MANIFEST, manifest)):
            path = _plain_path(target, name)
            if data is not None and not (path.is_file() and path.read_bytes() == data):
                write_atomic(path, data)
    return Fetched(listing.result_id, commit, len(listing.entries), len(listing.entries) - len(missing),
                   sum(entry.size_bytes for entry in listing.entries))


def _read_listing(hub: Hub, remote: Mapping[str, RemoteFile], commit: str, name: str) -> bytes:
    file = remote.get(name)
    if file is None:
        raise InputError(f"expected a published bundle in {hub.repo_id}, found no {name}: it was not published by "
                         "`quantkit publish`; check the name")
    if file.size_bytes > MAX_MANIFEST_BYTES:
        raise InputError(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {file.size_bytes} as {name} of "
                         f"{hub.repo_id}: it is damaged or made to mislead; leave it alone")
    return hub.read_range(file, commit, 0, file.size_bytes) if file.size_bytes else b""


def _check_remote(entries: tuple[Entry, ...], remote: Mapping[str, RemoteFile], where: str) -> None:
    """Nothing is downloaded that is wrong already by the hub's own listing."""
    problems = []
    for entry in entries:
        file = remote.get(entry.path)
        if file is None:
            problems.append(f"{entry.path} is missing")
        elif file.size_bytes != entry.size_bytes:
            problems.append(f"{entry.path} has {file.size_bytes} bytes instead of {entry.size_bytes}")
        elif file.sha256 not in (None, entry.sha256):
            problems.append(f"{entry.path} has another sha256")
    if problems:
        raise CheckFailed(f"the repository does not hold what the {where} lists: {'; '.join(problems[:5])}"
                          + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
                          + "; ask who published it to publish it again")


def _is_there(target: Path, entry: Entry, *, force: bool) -> bool:
    """Whether a file is complete already.

    Raises:
        InputError: something else is in its place.
    """
    path = _plain_path(target, entry.path)
    if not path.exists():
        return False
    if path.is_file() and path.stat().st_size == entry.size_bytes and sha256_file(path) == entry.sha256:
        return True
    if path.is_dir() or not force:
        raise InputError(f"{path} exists already and is not what the bundle lists: choose another folder, or pass --force")
    return False


def _plain_path(target: Path, name: str) -> Path:
    """The path of a file below the folder; nothing on the way to it is a link."""
    path = target
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise InputError(f"{path} is a symbolic link: a bundle is not written through one; choose another folder")
    return path


def fetch_file(hub: Hub, file: RemoteFile, commit: str, target: Path, entry: Entry, progress: Progress) -> None:
    """Download one file below a folder, from where an earlier try ended; it has its name once its sha256 is the expected one.

    Raises:
        EnvironmentFault: the download failed or was damaged.
    """
    path = _plain_path(target, entry.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{entry.sha256}.part")
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "r+b") as out:
        digest = hashlib.sha256()
        while piece := out.read(_PIECE_BYTES):
            digest.update(piece)
        at = out.tell()
        progress.advance(at // MIB)
        while at < entry.size_bytes:
            piece = hub.read_range(file, commit, at, min(_PIECE_BYTES, entry.size_bytes - at))
            out.write(piece)
            digest.update(piece)
            progress.advance(-(-(at + len(piece)) // MIB) - -(-at // MIB))
            at += len(piece)
        out.flush()
        os.fsync(out.fileno())
    if at != entry.size_bytes or digest.hexdigest() != entry.sha256:
        part.unlink()
        raise EnvironmentFault(f"expected sha256 {entry.sha256} of {entry.path}, the download has another: it was damaged on the "
                               "way and dropped; run the same command again")
    part.replace(path)
    sync_folder(path.parent)
