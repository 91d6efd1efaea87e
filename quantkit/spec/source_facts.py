"""Where a file that came from elsewhere is from: what it says of itself, what lies in it, and the hub's repository if known.

It stands where a tier of ours has a plan: RUN/source/<tier>.json. What a file says is its maker's word, text of a stranger: paths
of the machine that it was made on are cut to their last part, and nothing decides by any of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantkit.spec.blocks import kind_of
from quantkit.spec.model import ModelInfo, type_shares
from quantkit.spec.quantizable import is_quantizable

_SAID = re.compile(
    r"general\.(name|basename|finetune|version|size_label|organization|author|quantized_by|license|url|repo_url|file_type"
    r"|quantization_version|source\.(url|repo_url|huggingface\.repository)|base_model\.[0-9]{1,2}\.(name|organization|version|repo_url))"
    r"|quantize\.imatrix\.(file|dataset|entries_count|chunks_count)")
_FILES = {"quantize.imatrix.file", "quantize.imatrix.dataset"}  # names of files, however their folders are written
_LONGEST, _MOST = 300, 40

# A path of a machine inside a text: from its root to the last part, which stays. `https://` and `and/or` are none.
_PATH = re.compile(r"(?:\bfile://|(?<![\w/:.\\]))(?:~|[A-Za-z]:|\\\\)?(?:[/\\][^/\\\s]+)*[/\\](?=[^/\\\s])")
# A file in the hub's cache: models--OWNER--NAME/snapshots/COMMIT/...; owner and name cannot hold two dashes in a row.
_CACHED = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeCount:
    """Tensors of one type. `kind` is `token_embd`, `ffn_down` of whatever trunk block, or `MTP block`; "" over all tensors."""

    kind: str
    type: str
    n_tensors: int
    n_params: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Where one file is from.

    Attributes:
        said: provenance keys of the file, as they stand in it but for paths; `ftype` is the name of its general.file_type.
        repository, revision: of the hub, where the file lies as the hub's client left it; None where that is not known.
        n_parts: files that it was split into.
        types: all tensors by type; kinds: matrices that llama.cpp quantizes, by kind and type.
    """

    sha256: str
    repository: str | None
    revision: str | None
    n_parts: int
    ftype: str | None
    said: Mapping[str, str]
    types: tuple[TypeCount, ...]
    kinds: tuple[TypeCount, ...]


class HubPlace(NamedTuple):
    """Where on the hub a file is from; None where it is not known."""

    repository: str | None
    revision: str | None


def describe_source(model: ModelInfo, sha256: str) -> FileSource:
    """What there is to say of a file, from its header and its place on this machine."""
    header, place = model.header, hub_place(model.header.parts[0])
    matrices: dict[str, list[int]] = {}
    for i, tensor in enumerate(header.tensors):
        if is_quantizable(tensor.name, tensor.shape, model.architecture):
            matrices.setdefault(kind_of(tensor.name, model.roles[tensor.name]), []).append(i)
    return FileSource(
        sha256=sha256, repository=place.repository, revision=place.revision, n_parts=len(header.parts), ftype=model.ftype_name,
        said=said_of(header.metadata), types=_counts("", model, range(len(header.tensors))),
        kinds=tuple(count for kind, members in matrices.items() for count in _counts(kind, model, members)))


def said_of(metadata: Mapping[str, object]) -> dict[str, str]:
    """Provenance keys with their values: short, printable, without the folders of the machine that the file was made on."""
    out: dict[str, str] = {}
    for key in sorted(metadata):
        value = metadata[key]
        if len(out) == _MOST or not _SAID.fullmatch(key):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            out[key] = str(value)
        elif isinstance(value, str) and (text := _without_folders(value, is_file=key in _FILES)):
            out[key] = text
    return out


def hub_place(path: Path) -> HubPlace:
    """Repository and commit of a file that lies where huggingface_hub put it: in its cache, or in a folder that it downloads to.

    Beside a download of the second kind stands `.cache/huggingface/download/<file>.metadata`, which begins with the commit.
    """
    if found := _CACHED.search(path.absolute().as_posix()):
        return HubPlace(f"{found['owner']}/{found['name']}", found["commit"])
    folder = path.absolute().parent
    for root in (folder, *list(folder.parents)[:3]):
        note = root / ".cache" / "huggingface" / "download" / path.absolute().relative_to(root).with_name(f"{path.name}.metadata")
        try:
            with note.open("rb") as file:
                first = file.read(41)
        except OSError:
            continue
        commit = first.decode("ascii", "replace").strip()
        return HubPlace(None, commit if _COMMIT.fullmatch(commit) else None)
    return HubPlace(None, None)


def _counts(kind: str, model: ModelInfo, members: Sequence[int]) -> tuple[TypeCount, ...]:
    """Tensors by type, those with the most parameters first."""
    return tuple(TypeCount(kind=kind, type=s.type, n_tensors=s.n_tensors, n_params=s.n_params, size_bytes=s.size_bytes)
                 for s in type_shares([model.header.tensors[i] for i in members]))


def _without_folders(value: str, *, is_file: bool) -> str:
    text = "".join(c if c.isprintable() else " " for c in value[:16 * _LONGEST]).strip()
    text = re.split(r"[/\\]", text)[-1] if is_file else _PATH.sub("", text)
    return text if len(text) <= _LONGEST else text[:_LONGEST - 1] + "…"
