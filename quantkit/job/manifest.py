"""The manifest: everything that a number in the run depends on, by hash, and every file of the bundle.

`result_id` is the sha256 of the canonical JSON of protocol ids, inputs, build, plans, rows, summaries and whatever else was
measured: what tables print. It does not depend on when, where or with how many workers the run was made, nor on what is computed
from rows (pairs, slices, reports), nor on whether the tiers' files were kept. `seal` is the sha256 of everything else in the
manifest: it makes a changed byte show, and proves nothing about who wrote it; a result id that was published does.

What names a machine is published too, but listed apart, in report/speed.manifest.json, so that the manifest is the same bytes
wherever a run is made: report/speed.*, and the page and the card, which show the speeds beside the table.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.job.evaluation import ROWS_VERSION, Evaluation, Subject
from quantkit.job.pairs import write_computed
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.model import type_shares
from quantkit.spec.protocol import Protocol
from quantkit.spec.refpack_records import PackBase

SCHEMA = 1
LIBRARIES = ("gguf", "llama-cpp-python", "matplotlib", "numpy", "pandas", "pyarrow", "scipy")
_NOT_IN_BUNDLE = {"logs", "parts"}
APART = "report/speed.manifest.json"  # the listing of what names a machine
_NOT_LISTED = {"manifest.json", "run.json", ".lock", "label.json", APART}  # label.json: what a gate said of the bundle
_CARDS = {"README.md", "report/README.md"}
_IDENTITY = ("rows_version", "protocol", "base", "corpus", "token_ids_sha256", "further_corpora", "imatrix", "build", "tiers")
_NOT_EVIDENCE = {"quants", "report", "source"}  # tiers' files are in `tiers` by hash, dropped or not; a source is hearsay
_COMPUTED = {"pairs.json", "slices.json"}


def claim_run(run: RunFolder, protocol: Protocol, base: Subject | PackBase) -> None:
    """Write the inputs down before any work, or check that the run is of the same base.

    Args:
        base: its file, or what a reference pack says of it.

    Raises:
        InputError: the run directory belongs to another base.
    """
    held = read_json(run.manifest)
    if isinstance(held, dict) and "base" in held:
        expected = held["base"].get("sha256")
        if expected != base.sha256:
            found = base.path if isinstance(base, Subject) else f"the reference pack's {base.file}"
            raise InputError(f"{run.path} holds a run of another base: expected sha256 {expected}, found {base.sha256} for "
                             f"{found}: choose another run directory")
        return
    _write(run, {"schema": SCHEMA, "protocol": _protocol_facts(protocol), "base": base_facts(base)})


def write_manifest(run: RunFolder, protocol: Protocol, base: Subject | PackBase, evaluation: Evaluation,
                   tiers: Mapping[str, Any], imatrix: Mapping[str, Any] | None,
                   further: Sequence[tuple[RunFolder, Evaluation]] = ()) -> str:
    """Compute what rows of all tiers give together, and write the manifest of what is there; returns the result id.

    Args:
        tiers: tier name to the record of its file (file, size_bytes, sha256), measured ones only.
        imatrix: facts of the importance matrix in use, if any.
        further: the second and later texts of the protocol, each with where its results lie.
    """
    for own, text in ((run, evaluation), *further):
        write_computed(own, protocol, text, tiers)
    facts: dict[str, Any] = {
        "schema": SCHEMA, "quantkit": __version__, "rows_version": ROWS_VERSION, "protocol": _protocol_facts(protocol),
        "base": base_facts(base), "corpus": {"name": evaluation.corpus.name, "sha256": evaluation.corpus.sha256},
        "token_ids_sha256": evaluation.token_ids_sha256,
        "further_corpora": [{"name": text.corpus.name, "sha256": text.corpus.sha256, "token_ids_sha256": text.token_ids_sha256}
                            for _, text in further],
        "imatrix": imatrix, "build": _build_facts(evaluation),
        "libraries": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}},
        "tiers": {name: {**record, **_hashes(run, name)} for name, record in sorted(tiers.items())},
    }
    facts["files"] = list_files(run.path, facts["tiers"])
    result_id = result_id_of(facts)
    _write(run, {"result_id": result_id, **facts})
    return result_id


def result_id_of(manifest: Mapping[str, Any]) -> str:
    """The result id that a manifest's own words come to.

    Raises:
        KeyError, TypeError, AttributeError: something that it is made of is missing or of another kind.
    """
    identity = {key: manifest[key] for key in _IDENTITY}
    measured = {name: facts["sha256"] for name, facts in manifest["files"].items() if _is_evidence(name)}
    return sha256_json({**identity, "evidence": measured})


def seal_of(manifest: Mapping[str, Any]) -> str:
    """The sha256 of everything in a manifest but the seal itself."""
    return sha256_json({key: value for key, value in manifest.items() if key != "seal"})


def refresh_files(run: RunFolder) -> None:
    """List the bundle's files anew, and give the result its new id where something was measured since.

    To be called before a report is made, whose tables print the id, and after.

    Raises:
        InputError: no run there.
    """
    held = read_json(run.manifest)
    if not isinstance(held, dict):
        raise InputError(f"expected a run directory, found no manifest.json of one in {run.path}: make one with `quantkit run`")
    fresh = {**held, "files": list_files(run.path, held.get("tiers", {}))}
    _write(run, {**fresh, "result_id": result_id_of(fresh)} if "result_id" in held else fresh)


def list_files(folder: Path, tiers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every file that the manifest lists, by its relative path: sha256 and size. Not logs, parts, and what is listed apart.

    A tier's file is listed by the hash that it had when it was measured, as long as its size is the same: what happened to it since
    must not be blessed, and hashing a ladder takes minutes.
    """
    known = {(f"quants/{record['file']}", record["size_bytes"]): record["sha256"] for record in tiers.values()}
    return _list(folder, lambda name: not is_apart(name), known)


def is_bundle_file(name: str) -> bool:
    """Whether a file of a run directory, by its relative path, belongs to the bundle and must be listed, here or apart."""
    return name not in _NOT_LISTED and name.split("/")[0] not in _NOT_IN_BUNDLE


def is_apart(name: str) -> bool:
    """Whether a file of the bundle may name a machine: the speeds, and the page and the card that show them."""
    return name in _CARDS or name.startswith("report/speed.") or (name.startswith("report/") and name.endswith("/report.html"))


def _list(folder: Path, wanted: Callable[[str], bool], known: Mapping[tuple[str, int], str]) -> dict[str, dict[str, Any]]:
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, size_bytes = path.relative_to(folder).as_posix(), path.stat().st_size
        if is_bundle_file(name) and wanted(name):
            out[name] = {"sha256": known.get((name, size_bytes)) or sha256_file(path), "size_bytes": size_bytes}
    return out


def _write(run: RunFolder, manifest: Mapping[str, Any]) -> None:
    facts = {key: value for key, value in manifest.items() if key != "seal"}
    write_json(run.manifest, {**facts, "seal": seal_of(facts)})
    apart = _list(run.path, is_apart, {})
    if apart and "result_id" in facts:
        write_json(run.path / APART, {"result_id": facts["result_id"], "files": apart})
    else:
        (run.path / APART).unlink(missing_ok=True)


def _is_evidence(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return bool(rest) and folder not in _NOT_EVIDENCE and name.rsplit("/", 1)[-1] not in _COMPUTED


def _protocol_facts(protocol: Protocol) -> dict[str, Any]:
    return {"name": protocol.name, "protocol_id": protocol.protocol_id, "eval_id": protocol.eval_id, "plan_id": protocol.plan_id,
            "imatrix_id": protocol.imatrix_id, "mtp_id": protocol.mtp_id, "derived": list(protocol.derived)}


def base_facts(base: Subject | PackBase) -> dict[str, Any]:
    """What a manifest says of the base: name, hash, size, type and bits a weight."""
    if isinstance(base, PackBase):
        return dataclasses.asdict(base)
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
