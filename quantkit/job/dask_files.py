"""Model files on a worker: addressed by what is in them, found on a shared path, or fetched from the hub once per machine.

    the path that the caller has it at        a shared file system
    <cache>/models/<sha256>/<name>            what was fetched before
    the hub                                   where a repository was named; into the cache, whole or not at all

A file is hashed once per worker process; after that its size, time and inode are looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.core.errors import EnvironmentFault, RunLocked
from quantkit.core.files import FolderLock, require_space, sha256_file
from quantkit.job.corpus import cache_folder
from quantkit.job.evaluation import Subject, join_hashes
from quantkit.job.hub.client import Hub, RemoteFile
from quantkit.job.hub.fetch import fetch_file
from quantkit.job.hub.names import Entry
from quantkit.job.progress import Silent

_LOCK_POLL_S = 1.0

_known: dict[tuple[str, int, int, int], str] = {}
_hashing = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model file, or all parts of a split one.

    Attributes:
        paths: where the caller has its parts.
        sha256: what it is known by; see `join_hashes`.
    """

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    sha256: str


def model_file(subject: Subject) -> ModelFile:
    """How a worker is told of a file."""
    paths = tuple(path.resolve() for path in subject.model.header.parts)
    return ModelFile(paths=paths, sizes=tuple(path.stat().st_size for path in paths), sha256=subject.sha256)


def find_model(file: ModelFile, fetch_from: str = "") -> Path:
    """The first part of the file on this machine, checked.

    Raises:
        EnvironmentFault: it is nowhere, or what is there has other bytes.
    """
    looked = []
    cache = cache_folder()
    kept = cache.parent / "models" / file.sha256 if cache else None
    for paths in (file.paths, tuple(kept / path.name for path in file.paths) if kept else ()):
        if problem := _problem(paths, file):
            looked.append(problem)
        elif paths:
            return paths[0]
    if not fetch_from:
        raise EnvironmentFault(f"{looked[0]}: let it lie on a path that all machines share, or name a repository to fetch it from "
                               "with --dask-fetch")
    if kept is None:
        raise EnvironmentFault("expected a cache folder to fetch models into, found neither XDG_CACHE_HOME nor a home: set one")
    with _alone_in(kept):
        paths = tuple(kept / path.name for path in file.paths)
        if _problem(paths, file):  # another process of this machine may have fetched it meanwhile
            _fetch(file, kept, fetch_from)
        if problem := _problem(paths, file):
            raise EnvironmentFault(f"{problem}: {fetch_from} holds another file of that name; publish this one there, or "
                                   "put it on a path that all machines share")
    return paths[0]


def _problem(paths: Sequence[Path], file: ModelFile) -> str | None:
    """Why the file is not at these paths; None if it is."""
    for path, size in zip(paths, file.sizes, strict=False):
        if not path.is_file():
            return f"expected {path.name} (sha256 {file.sha256[:16]}) at {path}, found nothing"
        if path.stat().st_size != size:
            return f"expected {size} bytes at {path}, found {path.stat().st_size}"
    if paths and (found := join_hashes([_sha256(path) for path in paths])) != file.sha256:
        return f"expected sha256 {file.sha256} at {paths[0]}, found {found}"
    return None


def _sha256(path: Path) -> str:
    facts = path.stat()
    key = (str(path), facts.st_size, facts.st_mtime_ns, facts.st_ino)
    with _hashing:
        if key not in _known:
            _known[key] = sha256_file(path)
        return _known[key]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The lock of a cache folder, waited for: it ends with its holder."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(FolderLock(folder))
                break
            except RunLocked:
                time.sleep(_LOCK_POLL_S)
        yield


def _fetch(file: ModelFile, folder: Path, fetch_from: str) -> None:
    """Every part that the repository has, by its hash; a part of a split model by its name and size.

    Raises:
        EnvironmentFault: it is not there, or the download failed.
    """
    repo_id, _, revision = fetch_from.partition("@")
    hub = Hub(repo_id)
    commit = hub.require_head(revision or None)
    listed = hub.list_files(commit).values()
    require_space(folder, sum(file.sizes), f"fetching {file.paths[0].name}")
    for path, size in zip(file.paths, file.sizes, strict=True):
        found = next((remote for remote in listed if _is_part(remote, path.name, size, file)), None)
        if found is None or found.sha256 is None:
            raise EnvironmentFault(f"expected {path.name} (sha256 {file.sha256[:16]}, {size} bytes) in {fetch_from}, found no such "
                                   "file: let it lie on a path that all machines share")
        fetch_file(hub, found, commit, folder, Entry(path.name, size, found.sha256), Silent())


def _is_part(remote: RemoteFile, name: str, size: int, file: ModelFile) -> bool:
    if remote.size_bytes != size:
        return False
    return remote.sha256 == file.sha256 if len(file.paths) == 1 else remote.path.rpartition("/")[2] == name
