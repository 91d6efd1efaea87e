"""The records of a run that may be a stranger's: what has to be there in which form before anything is told of it.

What records hold by themselves is checked where they are read (`spec.json_records`); this is the manifest, which is plain JSON, and
the rule that no name out of it becomes a path that leads elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.core.errors import InputError

_NUMBER = (int, float)
_HASH = re.compile(r"[0-9a-f]{64}")
_TEXT_OF_CORPUS = {"name": str, "sha256": _HASH}
_MOST = 1000  # tiers, texts: a table of more is no table
#: What a manifest has at least. A type or several, or a pattern of text; a mapping by key ("*": all of them); a list of one form.
_FORM: Mapping[str, Any] = {
    "result_id": _HASH, "quantkit": str, "token_ids_sha256": _HASH,
    "protocol": {"name": str, "derived": [str],
                 **dict.fromkeys(("protocol_id", "eval_id", "plan_id", "imatrix_id", "mtp_id"), _HASH)},
    "base": {"file": str, "sha256": _HASH, "size_bytes": int, "type": str, "bpw": (*_NUMBER, type(None)),
             "bpw_core": (*_NUMBER, type(None))},
    "corpus": _TEXT_OF_CORPUS,
    "further_corpora": [{**_TEXT_OF_CORPUS, "token_ids_sha256": _HASH}],
    "build": {"backend": str, "llama_cpp_commit": str, "llama_cpp_python": str, "system_info": str, "n_gpu_layers": int,
              "tensor_split": [_NUMBER]},
    "libraries": {"*": str},
    "tiers": {"*": {"file": str, "sha256": _HASH, "size_bytes": int, "bpw": _NUMBER, "bpw_core": (*_NUMBER, type(None))}},
    "files": {"*": dict},
}


def check_manifest(manifest: Mapping[str, Any], where: Path) -> None:
    """Hold a manifest against the form that reports need.

    Raises:
        InputError: names the first place that is not as it has to be.
    """
    if fault := next(_faults(manifest, _FORM, ""), None):
        raise InputError(f"expected the manifest of a run at {where}, got one in which {fault}: it is damaged or of another "
                         "version; fetch the bundle again, or run the same command again")
    names = [*manifest["tiers"], *(text["name"] for text in manifest["further_corpora"])]
    if len(names) > _MOST:
        raise InputError(f"expected at most {_MOST} tiers and texts in {where}, got {len(names)}: fetch it again")
    for name in names:
        if not can_be_folder(name):
            raise InputError(f"expected names of tiers and texts that are names of folders in {where}, got {name[:80]!a}: the "
                             "bundle was damaged or made to mislead; fetch it again")
    for record in (manifest["base"], *manifest["tiers"].values()):
        if not 0 < record["size_bytes"] < 1 << 62:
            raise InputError(f"expected the sizes of files in {where}, got {record['size_bytes']} bytes: fetch it again")


def can_be_folder(name: str) -> bool:
    """Whether a name is one folder below another, on every system, and printable."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set('/\\:') and len(name.encode()) <= 255


def _faults(value: Any, form: Any, path: str) -> Iterator[str]:
    shown = path or "the whole"
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            yield f"{shown} is no object"
        elif "*" in form:
            for key, item in value.items():
                yield from _faults(item, form["*"], f"{path}.{key[:40]!a}")
        else:
            for key, part in form.items():
                if key in value:
                    yield from _faults(value[key], part, f"{path}.{key}" if path else key)
                else:
                    yield f"{shown} has no {key}"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{shown} is no list"
        else:
            for i, item in enumerate(value):
                yield from _faults(item, form[0], f"{path}[{i}]")
    elif isinstance(form, re.Pattern):
        if not isinstance(value, str) or not form.fullmatch(value):
            yield f"{shown} is no sha256"
    elif not isinstance(value, form) or (isinstance(value, bool) and form is not bool):
        yield f"{shown} is of type {type(value).__name__}"
