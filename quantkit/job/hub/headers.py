"""Headers of models on the hub, by range reads: some megabytes of a file of many gigabytes.

A model becomes a hollow local file: the header's bytes, then a hole as large as the tensors. The bounded reader takes it like any
other file, and so does llama.cpp's dry run, which looks at names, shapes and metadata only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import GgufError
from quantkit.core.units import MIB
from quantkit.job.hub.client import Hub, RemoteFile
from quantkit.spec.gguf_cursor import MAX_HEADER_BYTES
from quantkit.spec.gguf_part import read_part

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_FIRST_BYTES = 2 * MIB


class ModelFiles(NamedTuple):
    """A model in a repository: the path of its first file, and all its files in order."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def find_models(files: Mapping[str, RemoteFile]) -> list[ModelFiles]:
    """The models of a repository, shards of one together, by name. Of a split with missing shards those that are there."""
    groups: dict[str, list[RemoteFile]] = {}
    for path in sorted(files):
        if path.endswith(".gguf"):
            match = _SPLIT_NAME.fullmatch(path)
            groups.setdefault(f"{match['prefix']}/{match['count']}" if match else path, []).append(files[path])
    return sorted(ModelFiles(group[0].path, tuple(group)) for group in groups.values())


class HeaderReader:
    """Makes hollow files. `n_bytes` counts what was read. Headers of one repository are alike: each tries the last one's size."""

    def __init__(self, hub: Hub, commit: str, folder: Path) -> None:
        self.n_bytes = 0
        self._hub = hub
        self._commit = commit
        self._folder = folder
        self._first_bytes = _FIRST_BYTES

    def make_hollow(self, model: ModelFiles, index: int) -> Path:
        """The path of a hollow file, or of the first of its shards, named by a number and not by a stranger.

        Raises:
            GgufError: a header that is damaged or hostile; names the remote file.
            EnvironmentFault: the hub cannot be read.
        """
        match = _SPLIT_NAME.fullmatch(model.name)
        if match and int(match["count"]) != len(model.files):
            raise GgufError(f"{model.name}: expected all {int(match['count'])} shards beside it, found {len(model.files)}: publish "
                            "the whole split")
        paths = [self._folder / _local_name(file, index) for file in model.files]
        for file, path in zip(model.files, paths, strict=True):
            try:
                self._read_header(file, path)
            except GgufError as error:
                raise GgufError(str(error).replace(str(path), file.path)) from error
        return paths[0]

    def _read_header(self, file: RemoteFile, path: Path) -> None:
        limit = min(file.size_bytes, MAX_HEADER_BYTES)
        n_held, n_wanted = 0, min(self._first_bytes, limit)
        with path.open("wb") as out:
            out.truncate(file.size_bytes)
            while True:
                out.seek(n_held)
                if n_wanted > n_held:
                    out.write(self._hub.read_range(file, self._commit, n_held, n_wanted - n_held))
                out.flush()
                self.n_bytes += n_wanted - n_held
                n_held = n_wanted
                if (data_offset := _data_offset(path, n_held, limit)) is not None:
                    self._first_bytes = max(_FIRST_BYTES, data_offset)
                    return
                n_wanted = min(2 * n_held, limit)


def _data_offset(path: Path, n_held: int, limit: int) -> int | None:
    """Where the data start, if the header ends within what is held; the hole reads as zeros, which may be taken for anything."""
    try:
        part = read_part(path)
    except GgufError:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if n_held >= limit or not is_gguf:
            raise
        return None
    return part.data_offset if part.data_offset <= n_held else None


def _local_name(file: RemoteFile, index: int) -> str:
    match = _SPLIT_NAME.fullmatch(file.path)
    return f"m{index}-{match['no']}-of-{match['count']}.gguf" if match else f"m{index}.gguf"


def unlink_all(paths: Iterable[Path]) -> None:
    """Remove files that are not needed any more."""
    for path in paths:
        path.unlink()
