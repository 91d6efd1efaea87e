"""What a look at a repository found, and what changed since the look before.

The last look at each repository lies in the cache. It decides nothing: without it there is only nothing to compare with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.files import sha256_json
from quantkit.job.corpus import cache_folder
from quantkit.job.rundir import read_json, write_json


class DiffGroup(NamedTuple):
    """Tensors of one name over all blocks that have one type in a file and another by a plan."""

    tensors: str
    in_file: str
    planned: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """A file's types beside those of a plan: `size_bytes` is what the plan's tensors would weigh."""

    plan: str
    n_different: int
    size_bytes: int
    groups: tuple[DiffGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLook:
    """One model of a repository. What could not be found out is None, and `notes` say why.

    mtp: "present", "head only", "stripped" (the count key or a sister file says that there was one), or "none".
    substituted: tensors whose rows the mix's own types do not divide, with the type they have instead.
    """

    name: str
    n_files: int
    size_bytes: int
    sha256: tuple[str, ...]
    architecture: str | None = None
    ftype: str | None = None
    n_params: int | None = None
    bpw: float | None = None
    bpw_core: float | None = None
    mtp: str | None = None
    template_sha256: str | None = None
    types: Mapping[str, str]
    stock: PlanDiff | None = None
    ours: PlanDiff | None = None
    substituted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoLook:
    """All models of a repository at one commit; `changes` are None at the first look."""

    repo_id: str
    commit: str
    models: tuple[ModelLook, ...]
    n_bytes_read: int
    changes: tuple[str, ...] | None


def changes_since(held: object, models: Sequence[ModelLook]) -> tuple[str, ...] | None:
    """What changed since a look that was kept; None if there is none."""
    before = held.get("models") if isinstance(held, dict) else None
    if not isinstance(before, dict):
        return None
    now = {model.name: _state(model) for model in models}
    found = [f"{name}: new" for name in now if name not in before]
    found += [f"{name}: gone" for name in before if name not in now]
    for name in now:
        old = before.get(name)
        if isinstance(old, dict) and old != now[name]:
            what = [words for key, words in _WORDS.items() if old.get(key) != now[name][key]]
            found.append(f"{name}: {', '.join(what)}")
    return tuple(sorted(found))


_WORDS = {"sha256": "other bytes", "types_sha256": "other tensor types", "template_sha256": "another chat template",
          "mtp": "another MTP head or none", "size_bytes": "another size"}


def load_look(endpoint: str, repo_id: str) -> Any:
    """The last look at a repository, or None."""
    path = _look_path(endpoint, repo_id)
    return None if path is None else read_json(path)


def keep_look(endpoint: str, look: RepoLook) -> None:
    """Remember a look for the next one."""
    path = _look_path(endpoint, look.repo_id)
    if path is not None:
        write_json(path, {"repo_id": look.repo_id, "commit": look.commit, "models": {m.name: _state(m) for m in look.models}})


def _state(model: ModelLook) -> dict[str, Any]:
    return {"sha256": list(model.sha256), "size_bytes": model.size_bytes, "types_sha256": sha256_json(dict(model.types)),
            "template_sha256": model.template_sha256, "mtp": model.mtp}


def _look_path(endpoint: str, repo_id: str) -> Path | None:
    corpora = cache_folder()
    key = hashlib.sha256(f"{endpoint} {repo_id}".encode()).hexdigest()[:32]
    return None if corpora is None else corpora.parent / "remote" / f"{key}.json"
