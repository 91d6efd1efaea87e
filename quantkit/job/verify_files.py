"""Is the bundle whole? The manifest by its own seal, and every file by name, size and hash.

A bundle that was downloaded is a stranger's: names may not lead out of the folder, nothing behind a link or a device is opened,
and nothing is read beyond a size that a manifest can have.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import InputError
from quantkit.core.files import pretty_json, sha256_file
from quantkit.job.hub.names import MANIFEST, MAX_MANIFEST_BYTES, Entry, Listing, add_apart, read_listing
from quantkit.job.manifest import APART, SCHEMA, is_bundle_file, result_id_of, seal_of
from quantkit.job.verify_findings import Findings

_CARD, _REPORT_CARD = "README.md", "report/README.md"  # the same file: where a repository has it, and where a run does
_NOT_OURS = {".git", ".cache", ".gitattributes"}  # what a hub and its client put beside a bundle
_MAX_JSON_BYTES = 256 << 20
_FORM = {"quantkit": str, "rows_version": int, "protocol": dict, "base": dict, "corpus": dict, "token_ids_sha256": str,
         "further_corpora": list, "imatrix": dict | None, "build": dict, "libraries": dict, "tiers": dict}


class Manifest(NamedTuple):
    """A manifest that could be read: its words, and the files that it lists, by path."""

    facts: dict[str, Any]
    entries: dict[str, Entry]


def check_manifest(folder: Path, findings: Findings, expected_id: str | None) -> Manifest | None:
    """Read the manifest, hold it against its own seal and result id, and against an id that was published.

    Returns:
        The manifest; None where nothing can be checked with it.

    Raises:
        InputError: there is none.
    """
    path = folder / MANIFEST
    if not _is_regular(path):
        raise InputError(f"expected a bundle, found no {MANIFEST} in {folder}: give a run directory or a downloaded bundle")
    held: Manifest | None = None
    with findings.reading("manifest", MANIFEST, f"a manifest of a measured run of schema {SCHEMA}"):
        findings.count("manifest")
        size_bytes = path.stat().st_size
        if size_bytes > MAX_MANIFEST_BYTES:
            raise InputError(f"{size_bytes} bytes, more than {MAX_MANIFEST_BYTES}")
        data = path.read_bytes()
        listing = read_listing(data, MANIFEST)
        facts = json.loads(data)
        if facts.get("schema") != SCHEMA:
            raise InputError(f"schema {facts.get('schema')!r}")
        for key, kind in _FORM.items():
            if not isinstance(facts[key], kind):
                raise InputError(f"{key} is a {type(facts[key]).__name__}")
        if pretty_json(facts) != data:
            raise InputError("other bytes than quantkit writes for these words")
        findings.equal("manifest", MANIFEST, "seal", seal_of(facts), facts.get("seal"))
        held = Manifest(facts, {entry.path: entry for entry in listing.entries})
        findings.equal("result id", MANIFEST, "result_id", result_id_of(facts), facts["result_id"])
    if held is not None and expected_id is not None:
        findings.equal("result id", MANIFEST, "the result that was asked for,", expected_id, held.facts["result_id"])
    return None if held is None else _with_apart(folder, held, listing, findings)


def _with_apart(folder: Path, held: Manifest, listing: Listing, findings: Findings) -> Manifest:
    """The manifest with the entries of the listing apart, where there is one and it is sound."""
    path = folder / APART
    if not path.exists() and not path.is_symlink():
        return held
    with findings.reading("manifest", APART, "a listing of what names a machine"):
        if not _is_regular(path) or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"no regular file, or more than {MAX_MANIFEST_BYTES} bytes")
        data = path.read_bytes()
        both = add_apart(listing, data, APART)
        if pretty_json(json.loads(data)) != data:
            raise InputError("other bytes than quantkit writes for these words")
        return Manifest(held.facts, {entry.path: entry for entry in both.entries})
    return held


def check_files(folder: Path, manifest: Manifest, findings: Findings) -> None:
    """Every listed file is there with its size and hash, and nothing else is."""
    present = dict(_walk(folder, findings))
    if _REPORT_CARD not in present and _CARD in present and _CARD not in manifest.entries and _REPORT_CARD in manifest.entries:
        present[_REPORT_CARD] = present.pop(_CARD)  # a repository shows its card at the top
    elif _CARD not in manifest.entries and _is_copy(present.get(_CARD), manifest.entries.get(_REPORT_CARD)):
        del present[_CARD]
    for name, entry in manifest.entries.items():
        findings.count("files")
        path = present.pop(name, None)
        if path is None:
            if not findings.has_failed(name):
                findings.fail("files", name, f"a file of {entry.size_bytes} bytes", "nothing")
            continue
        with findings.reading("files", name, "a file that can be read"):
            size_bytes = path.stat().st_size
            if size_bytes != entry.size_bytes:
                findings.fail("files", name, f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
            elif (sha256 := sha256_file(path)) != entry.sha256:
                findings.fail("files", name, f"sha256 {entry.sha256}", sha256)
    for name in present:
        findings.fail("files", name, "nothing, the manifest does not list it", "a file")


def read_json_bounded(path: Path) -> Any:
    """The value of a JSON file that is not trusted.

    Raises:
        InputError: too large. ValueError, RecursionError, OSError: not JSON, or not readable.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InputError(f"more than {_MAX_JSON_BYTES} bytes")
    return json.loads(path.read_bytes())


def is_sound(folder: Path, name: str, manifest: Manifest, findings: Findings) -> bool:
    """Whether a file is listed, there, and has the bytes that the manifest says: only then it is worth reading."""
    return name in manifest.entries and not findings.has_failed(name) and _is_regular(folder / name)


def _walk(folder: Path, findings: Findings) -> Iterator[tuple[str, Path]]:
    """The regular files of a bundle by relative path. Links and devices are told and never opened."""
    for where, folders, files in os.walk(folder):
        here = Path(where)
        for name in sorted([*folders, *files]):
            path = here / name
            relative = path.relative_to(folder).as_posix()
            if relative in _NOT_OURS or not is_bundle_file(relative):
                if name in folders:
                    folders.remove(name)
            elif path.is_symlink() or (name in files and not _is_regular(path)):
                if name in folders:
                    folders.remove(name)
                findings.fail("files", relative, "a regular file", "a link" if path.is_symlink() else "a device, pipe or socket")
            elif name in files:
                yield relative, path


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _is_copy(path: Path | None, entry: Entry | None) -> bool:
    return path is not None and entry is not None and path.stat().st_size == entry.size_bytes and sha256_file(path) == entry.sha256
