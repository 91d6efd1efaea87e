"""What a bundle may hold, by name: the same rules for what goes up and for what comes down.

A manifest that was fetched is a stranger's. Its names become paths below a folder, so whatever could lead out of it, hide in it,
stand where the run's own state stands, or be something other than evidence, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from quantkit.core.errors import InputError
from quantkit.job.manifest import is_apart, is_bundle_file

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20

_SUFFIXES = {".csv", ".dat", ".gguf", ".html", ".json", ".md", ".parquet", ".png", ".svg", ".toml", ".txt", ".xml"}
_REFPACK = re.compile(r"ref(-[^/]+)?\.safetensors")  # reference packs that a bundle may hold, ref-TEXT of a further text
_STORE = {"bundles", "rejected"}  # folders of a gate's store, which holds bundles and is none
_LONGEST_PART = 255
_MAX_FILES = 100_000
_AGAIN = "it is damaged or made to mislead; fetch it again from where it was made"


class Entry(NamedTuple):
    """A file of a bundle, as its manifest lists it."""

    path: str
    size_bytes: int
    sha256: str


class Listing(NamedTuple):
    """What a manifest says about its bundle."""

    result_id: str
    entries: tuple[Entry, ...]


def read_listing(data: bytes, where: str) -> Listing:
    """The result id and the files of a manifest.

    Args:
        where: names the manifest in errors.

    Raises:
        InputError: not a manifest, or one with a name, size or hash that no bundle has; names it.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a manifest at {where}, got something that is not JSON: fetch it again") from error
    if not isinstance(value, dict) or not _is_hash(value.get("result_id")) or not isinstance(value.get("files"), dict):
        raise InputError(f"expected a manifest of a measured run at {where}, with result_id and files, got something else: "
                         "run it to its end first")
    files = value["files"]
    if len(files) > _MAX_FILES:
        raise InputError(f"expected at most {_MAX_FILES} files in {where}, got {len(files)}: {_AGAIN}")
    if problems := [problem for name in files if (problem := name_problem(name))] + collisions(files):
        raise InputError(f"{where} lists what no bundle holds: {'; '.join(problems[:5])}: {_AGAIN}")
    return Listing(value["result_id"], tuple(_read_entry(name, item, where) for name, item in sorted(files.items())))


def add_apart(listing: Listing, data: bytes, where: str) -> Listing:
    """A manifest's listing with that of what names a machine, `report/speed.manifest.json`.

    Raises:
        InputError: not such a listing, one of another result, or one that lists what the manifest has to.
    """
    apart = read_listing(data, where)
    if apart.result_id != listing.result_id:
        raise InputError(f"expected the listing of result {listing.result_id} at {where}, got one of {apart.result_id}: make the "
                         "report again with `quantkit report`")
    listed = {entry.path for entry in listing.entries}
    if wrong := [entry.path for entry in apart.entries if not is_apart(entry.path) or entry.path in listed]:
        raise InputError(f"expected nothing but speeds, page and card in {where}, got {wrong[0]!a}: {_AGAIN}")
    return Listing(listing.result_id, tuple(sorted((*listing.entries, *apart.entries))))


def name_problem(name: str) -> str | None:
    """Why a path cannot be a file of a bundle; None if it can."""
    shown = ascii(name)[:200]
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in name:
        return f"{shown} is not a path below the folder"
    if not name.isprintable() or any(len(part.encode()) > _LONGEST_PART for part in parts):
        return f"{shown} is not a name that every file system can hold"
    if any(part.startswith(".") or part.endswith(("~", " ", ".")) for part in parts):
        return f"{shown} is hidden or scratch"
    if parts[0] in _STORE or not is_bundle_file(name):
        return f"{shown} is a run's own state"
    if PurePosixPath(name).suffix not in _SUFFIXES and not _REFPACK.fullmatch(name):
        return f"{shown} is of no kind that a bundle holds ({', '.join(sorted(_SUFFIXES))})"
    return None


def collisions(names: Iterable[str]) -> list[str]:
    """Names that some file systems take for one, and files that are folders of others."""
    seen: dict[str, str] = {}
    problems = []
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            problems.append(f"{name!a} and {other!a} differ in case alone")
    folders = {str(parent).casefold() for name in seen.values() for parent in PurePosixPath(name).parents}
    return problems + [f"{name!a} is a file and a folder" for folded, name in seen.items() if folded in folders]


def _read_entry(name: str, item: Any, where: str) -> Entry:
    size, sha256 = (item.get("size_bytes"), item.get("sha256")) if isinstance(item, dict) else (None, None)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63 or not _is_hash(sha256):
        raise InputError(f"expected size_bytes and sha256 for {name!a} in {where}, got {ascii(item)[:100]}: {_AGAIN}")
    return Entry(name, size, str(sha256))


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
