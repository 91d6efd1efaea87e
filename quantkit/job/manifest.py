"""The manifest: everything that a number in the run depends on, by hash, and every file of the bundle.

`result_id` is the sha256 of the canonical JSON of protocol ids, inputs, plans, rows and summaries: what tables print. It does not
depend on when, where or with how many workers the run was made.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.job.evaluation import Evaluation, Subject
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.model import type_shares
from quantkit.spec.protocol import Protocol

SCHEMA = 1
_LIBRARIES = ("gguf", "llama-cpp-python", "numpy", "pyarrow", "scipy")
_NOT_IN_BUNDLE = {"logs", "parts"}
_NOT_LISTED = {"manifest.json", "run.json", ".lock"}


def claim_run(run: RunFolder, protocol: Protocol, base: Subject) -> None:
    """Write the inputs down before any work, or check that the run is of the same base.

    Raises:
        InputError: the run directory belongs to another base.
    """
    held = read_json(run.manifest)
    if isinstance(held, dict) and "base" in held:
        expected = held["base"].get("sha256")
        if expected != base.sha256:
            raise InputError(f"{run.path} holds a run of another base: expected sha256 {expected}, found {base.sha256} for "
                             f"{base.path}: choose another run directory")
        return
    write_json(run.manifest, {"schema": SCHEMA, "protocol": _protocol_facts(protocol), "base": _base_facts(base)})


def write_manifest(run: RunFolder, protocol: Protocol, base: Subject, evaluation: Evaluation, tiers: Mapping[str, Any],
                   imatrix: Mapping[str, Any] | None) -> str:
    """Write the manifest of what is there; returns the result id.

    Args:
        tiers: tier name to the record of its file (file, size_bytes, sha256), measured ones only.
        imatrix: facts of the importance matrix in use, if any.
    """
    facts = {
        "schema": SCHEMA, "quantkit": __version__, "protocol": _protocol_facts(protocol), "base": _base_facts(base),
        "corpus": {"name": evaluation.corpus.name, "sha256": evaluation.corpus.sha256},
        "token_ids_sha256": evaluation.token_ids_sha256, "imatrix": imatrix, "build": _build_facts(evaluation),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "tiers": {name: {**record, **_hashes(run, name)} for name, record in sorted(tiers.items())},
    }
    identity = {key: facts[key] for key in ("protocol", "base", "corpus", "token_ids_sha256", "imatrix", "build", "tiers")}
    result_id = sha256_json(identity)
    write_json(run.manifest, {"result_id": result_id, **facts, "files": list_files(run.path)})
    return result_id


def refresh_files(run: RunFolder) -> None:
    """List the bundle's files anew, after a report was written."""
    held = read_json(run.manifest)
    write_json(run.manifest, {**held, "files": list_files(run.path)})


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file of the bundle by its relative path: sha256 and size. Logs, parts, times and speeds are not in it."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in _NOT_LISTED or name.split("/")[0] in _NOT_IN_BUNDLE or name.startswith("report/speed."):
            continue
        out[name] = {"sha256": sha256_file(path), "size_bytes": path.stat().st_size}
    return out


def _protocol_facts(protocol: Protocol) -> dict[str, Any]:
    return {"name": protocol.name, "protocol_id": protocol.protocol_id, "eval_id": protocol.eval_id, "plan_id": protocol.plan_id,
            "imatrix_id": protocol.imatrix_id, "mtp_id": protocol.mtp_id, "derived": list(protocol.derived)}


def _base_facts(base: Subject) -> dict[str, Any]:
    header = base.model.header
    largest = max(type_shares(header.tensors), key=lambda share: share.n_params)
    return {"file": base.path.name, "sha256": base.sha256, "size_bytes": header.file_bytes, "type": largest.type,
            "architecture": base.model.architecture, "n_params": base.model.n_params, "bpw": base.model.bpw,
            "bpw_core": base.model.bpw_core}


def _build_facts(evaluation: Evaluation) -> dict[str, Any]:
    build, offload = evaluation.build, evaluation.offload
    return {"backend": build.backend, "llama_cpp_python": build.llama_cpp_python, "llama_cpp_commit": build.llama_cpp_commit,
            "system_info": build.system_info, "n_gpu_layers": offload.n_gpu_layers, "main_gpu": offload.main_gpu,
            "tensor_split": list(offload.tensor_split)}


def _hashes(run: RunFolder, tier: str) -> dict[str, Any]:
    """Hashes of a tier's plan (None for a file that came from elsewhere), rows and summary."""
    plan = run.plan(tier)
    return {"plan_sha256": sha256_file(plan) if plan.exists() else None, "rows_sha256": sha256_file(run.rows(tier)),
            "summary_sha256": sha256_file(run.summary(tier))}
