"""The bundle of a run as it would be published: what its manifest lists, there or apart, the listings, and the card.

Nothing else goes up. The card is the run's README.md, or report/README.md, and stands at the top of the repository as README.md.
Before anything is sent, every file is held against the manifest and searched for what must not be published.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file
from quantkit.core.units import format_bytes
from quantkit.job.hub.leaks import find_leaks
from quantkit.job.hub.names import MANIFEST, MAX_MANIFEST_BYTES, add_apart, read_listing
from quantkit.job.manifest import APART
from quantkit.job.shards import HUB_LIMIT_BYTES

CARD = "README.md"
_CARDS = (CARD, "report/README.md")
_N_SHOWN = 10


class BundleFile(NamedTuple):
    """A file to publish: its path in the repository, the local file, and what it holds."""

    path: str
    local: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A run's bundle. `files` are those that are listed, but for a card at the top; `card` is None where none was made."""

    folder: Path
    result_id: str
    files: tuple[BundleFile, ...]
    manifest: BundleFile
    card: BundleFile | None

    @property
    def all_files(self) -> tuple[BundleFile, ...]:
        """Everything that goes up, in order: the card last, so that it never speaks of files that are not there."""
        return (*self.files, self.manifest, *([self.card] if self.card else []))


def read_bundle(folder: Path) -> Bundle:
    """The bundle that a run directory's manifest lists. Its files are not read yet.

    Raises:
        InputError: no manifest of a measured run, or one that lists what no bundle holds.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_MANIFEST_BYTES else b""
    except OSError as error:
        raise InputError(f"expected a run directory, found no {MANIFEST} in {folder}: make one with `quantkit run`") from error
    listing = read_listing(data, str(path))
    beside = []
    if (folder / APART).exists():
        apart = (folder / APART).read_bytes()
        listing = add_apart(listing, apart, str(folder / APART))
        beside = [BundleFile(APART, folder / APART, len(apart), hashlib.sha256(apart).hexdigest())]
    listed = {e.path: BundleFile(e.path, folder / e.path, e.size_bytes, e.sha256) for e in listing.entries}
    found = next((listed[name] for name in _CARDS if name in listed), None)
    manifest = BundleFile(MANIFEST, path, len(data), hashlib.sha256(data).hexdigest())
    return Bundle(folder=folder, result_id=listing.result_id, files=(*(f for name, f in listed.items() if name != CARD), *beside),
                  manifest=manifest, card=found._replace(path=CARD) if found else None)


def check_bundle(bundle: Bundle, max_bytes: int = HUB_LIMIT_BYTES) -> None:
    """Refuse a bundle that is not what its manifest says, or must not be published.

    Raises:
        InputError: names the files: missing, changed, links, above the hub's limit, or with tokens or paths in them.
    """
    for file in bundle.all_files:
        if file.size_bytes > max_bytes:
            raise InputError(f"expected files of at most {max_bytes} bytes ({format_bytes(max_bytes)}), the hub's limit, got "
                             f"{file.path} of {file.size_bytes}: split it with `quantkit split`, then let `quantkit report` list "
                             "the shards")
    problems = [problem for file in bundle.all_files if (problem := _problem(bundle.folder, file))]
    if not problems:
        problems = [f"{file.path} holds {leak}" for file in bundle.all_files for leak in find_leaks(file.local, bundle.folder)]
    if problems:
        shown = "\n  ".join(problems[:_N_SHOWN])
        more = f"\n  and {len(problems) - _N_SHOWN} more" if len(problems) > _N_SHOWN else ""
        raise InputError(f"{bundle.folder} cannot be published, nothing was sent; put right what is listed:\n  {shown}{more}")


def _problem(folder: Path, file: BundleFile) -> str | None:
    """Why a file is not what the manifest lists."""
    relative = file.local.relative_to(folder)
    if any((folder / part).is_symlink() for part in (relative, *list(relative.parents)[:-1])):
        return f"{relative} is or lies behind a symbolic link"
    try:
        size_bytes = file.local.stat().st_size
    except OSError:
        return f"{relative} is in the manifest, but not there"
    if not file.local.is_file():
        return f"{relative} is no file"
    if size_bytes != file.size_bytes:
        return f"{relative} has {size_bytes} bytes, the manifest says {file.size_bytes}"
    if sha256_file(file.local) != file.sha256:
        return f"{relative} has another sha256 than the manifest says"
    return None
