"""Look at every model of a repository from afar: what it is, and how its plan differs from llama.cpp's mix and from ours.

Only headers are read. A file's own mix is known by asking llama.cpp: the dry run over its header gives what the ftype in the header
would have meant, whatever types the file has.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.core.errors import EngineCrash, EngineError, GgufError, PlanError
from quantkit.core.files import temporary_folder
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import dry_run
from quantkit.job.hub.client import Hub
from quantkit.job.hub.headers import HeaderReader, ModelFiles, find_models, unlink_all
from quantkit.job.hub.looks import DiffGroup, ModelLook, PlanDiff, RepoLook, changes_since, keep_look, load_look
from quantkit.job.progress import Progress
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, resolve_plan, stock_plan
from quantkit.spec.plan_from import as_base
from quantkit.spec.protocol import Protocol, Tier
from quantkit.spec.quantizable import is_quantizable
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

_BLOCK = re.compile(r"^blk\.[0-9]+\.")


def look(repo_id: str, progress: Progress, *, revision: str | None = None, protocol: Protocol | None = None) -> RepoLook:
    """Read the headers of every GGUF of a repository; what was found is kept for the next look's changes.

    Args:
        revision: a commit, branch or tag; the default branch's head without one.
        protocol: compare with its tiers too, by ftype.

    Raises:
        InputError: no such repository.
        EnvironmentFault: the hub cannot be read.
    """
    hub = Hub(repo_id)
    commit = hub.require_head(revision)
    found = find_models(hub.list_files(commit))
    progress.start(f"headers of {repo_id}", len(found))
    looks = []
    with temporary_folder() as folder, WorkerPool() as pool:
        reader = HeaderReader(hub, commit, Path(folder))
        for i, model in enumerate(found):
            looks.append(_look_at(model, i, reader, pool, protocol))
            unlink_all(Path(folder).glob("*.gguf"))
            progress.advance()
    progress.finish()
    models = _with_stripped(looks)
    done = RepoLook(repo_id=repo_id, commit=commit, models=models, n_bytes_read=reader.n_bytes,
                    changes=changes_since(load_look(hub.endpoint, repo_id), models))
    keep_look(hub.endpoint, done)
    return done


def _look_at(files: ModelFiles, index: int, reader: HeaderReader, pool: WorkerPool, protocol: Protocol | None) -> ModelLook:
    empty = ModelLook(name=files.name, n_files=len(files.files), size_bytes=files.size_bytes, types={},
                      sha256=tuple(file.sha256 or file.blob_id for file in files.files))
    hollow = None
    try:
        hollow = reader.make_hollow(files, index)
        model = describe_model(read_header(hollow))
    except GgufError as error:
        return dataclasses.replace(empty, notes=(_of_remote(error, hollow, files),))
    notes = [*model.problems, *model.notes]
    stock = ours = None
    substituted: tuple[str, ...] = ()
    types = {t.name: t.type.name for t in model.header.tensors}
    try:
        if (plan := _stock(model, hollow, pool)) is not None:
            stock = _diff(types, plan, f"stock {plan.ftype}")
            substituted = tuple(f"{row.name} {row.type}" for row in plan.substituted if types[row.name] == row.type)
        if (plan := _ours(model, protocol)) is not None:
            ours = _diff(types, plan, plan.tier)
    except (EngineError, EngineCrash, PlanError, GgufError) as error:
        notes.append(f"not compared with a plan: {_of_remote(error, hollow, files)}")
    return dataclasses.replace(
        empty, architecture=model.architecture, ftype=model.ftype_name, n_params=model.n_params, bpw=model.bpw,
        bpw_core=model.bpw_core, mtp=_mtp(model), template_sha256=model.chat_template_sha256, types=types, stock=stock, ours=ours,
        substituted=substituted, notes=tuple(notes))


def _of_remote(error: Exception, hollow: Path | None, files: ModelFiles) -> str:
    """The words of an error, about the remote file and not about its hollow copy."""
    return str(error).replace(str(hollow), files.name) if hollow else str(error)


def _stock(model: ModelInfo, hollow: Path, pool: WorkerPool) -> Plan | None:
    """llama.cpp's own plan for the ftype in the header; None for an unquantized or unknown one."""
    ftype = FTYPES.get(model.ftype_name or "")
    if ftype is None or not ftype.default_type or not TENSOR_TYPES[ftype.default_type].is_quantized:
        return None
    names = tuple(t.name for t in model.header.tensors if is_quantizable(t.name, t.shape, model.architecture))
    uses_imatrix = TENSOR_TYPES[ftype.default_type].needs_imatrix or any(
        key.startswith("quantize.imatrix.") for key in model.header.metadata)
    types = pool.call(f"dry run {ftype.name}", dry_run, source=hollow, ftype=ftype.id, imatrix_names=names if uses_imatrix else ())
    tier = Tier(name=ftype.name, ftype=ftype.name, default=ftype.default_type, rules=())
    return stock_plan(as_base(model), tier, types, None)


def _ours(model: ModelInfo, protocol: Protocol | None) -> Plan | None:
    """The plan of the protocol's tier of the same ftype; None where it has none."""
    if protocol is None or protocol.plan.ladder == "stock":
        return None
    tier = next((t for t in protocol.plan.tiers if t.ftype == model.ftype_name), None)
    return None if tier is None else resolve_plan(as_base(model), tier, protocol.plan, None)


def _diff(types: Mapping[str, str], plan: Plan, name: str) -> PlanDiff:
    groups = Counter((_BLOCK.sub("blk.*.", row.name), types[row.name], row.type) for row in plan.rows
                     if types[row.name] != row.type)
    return PlanDiff(plan=name, n_different=sum(groups.values()), size_bytes=plan.size_bytes,
                    groups=tuple(DiffGroup(*key, n) for key, n in sorted(groups.items())))


def _mtp(model: ModelInfo) -> str:
    if model.is_head_only:
        return "head only"
    if model.n_nextn:
        return "present"
    return "stripped" if model.header.metadata.get(f"{model.architecture}.nextn_predict_layers") else "none"


def _with_stripped(models: Sequence[ModelLook]) -> tuple[ModelLook, ...]:
    """A file without a head is a stripped one where a sister of the same architecture has it."""
    heads = {m.architecture for m in models if m.mtp in ("present", "head only")}
    return tuple(dataclasses.replace(m, mtp="stripped") if m.mtp == "none" and m.architecture in heads else m for m in models)
