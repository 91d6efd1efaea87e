"""MTP heads as files of their own, at a tensor type: split off the base and quantized like any other model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quantkit.core.errors import PlanError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import read_build
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.mtp_files import split_model
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances, quantize_tier
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.model import type_shares
from quantkit.spec.plan import resolve_plan
from quantkit.spec.protocol import PlanSpec, Tier
from quantkit.spec.tensor_types import FTYPES

_NO_RULES = PlanSpec(ladder="guarded", on_substitute="mark", mtp_mode="inside", mtp_type="", rules=(), tiers=())


def head_file_name(stem: str, type_name: str) -> str:
    """What a head's file is called: `mtp-<name>-<type>.gguf`; stem is the base's name without its type."""
    return f"mtp-{stem}-{type_name}.gguf"


def make_head(run: RunFolder, pool: WorkerPool, base: Subject, type_name: str, target: Path, progress: Progress,
              importances: Importances | None = None) -> Subject:
    """A head's file: the one that stands if it is this base's at this type, or a new one.

    Every matrix of the file gets the type, the embedding and the output that a draft context needs included; norms stay.

    Args:
        type_name: a tensor type, or "" for the base's own.
        importances: for types that need them.

    Raises:
        InputError: the base has no head.
        PlanError: no ftype of llama.cpp has this type as its default, or the type needs importances that are not there.
        EngineError, EngineCrash: the library failed.
    """
    own = type_shares(base.model.header.tensors)[0].type
    kind = type_name or own
    build: BuildFacts = pool.call("build", read_build, n_gpu_layers=0)
    key = sha256_json({"base": base.sha256, "type": kind, "imatrix": importances.sha256 if importances else None,
                       "build": dataclasses.asdict(build)})
    record = run.record("mtp-head", target.stem)
    held = read_json(record)
    if isinstance(held, dict) and held.get("key") == key and target.exists() and sha256_file(target) == held.get("sha256"):
        progress.note(f"{target.name}: done already")
    elif kind == own:
        split_model(base.path, None, target, force=True)
    else:
        whole = run.parts / "mtp-head" / f"{target.stem}.whole.gguf"
        try:
            split_model(base.path, None, whole, force=True)
            _quantize(pool, read_subject(whole, "head"), kind, target, progress, importances)
        finally:
            whole.unlink(missing_ok=True)
    head = read_subject(target, f"head {kind}")
    write_json(record, {"key": key, "sha256": head.sha256})
    return head


def _quantize(pool: WorkerPool, source: Subject, kind: str, target: Path, progress: Progress,
              importances: Importances | None) -> None:
    tier = Tier(name=f"mtp-{kind}", ftype=_ftype_of(kind), default=kind, rules=())
    lengths = {name: len(values) for name, values in importances.values.items()} if importances else {}
    plan = resolve_plan(source.model, tier, _NO_RULES, lengths)
    for note in plan.notes():
        progress.note(f"{target.name}: {note}")
    quantize_tier(pool, source.model, plan, target, importances, progress, force=True)


def _ftype_of(kind: str) -> str:
    """The ftype to write into the header: the one named like the type, else the first mix built on it."""
    named = [ftype.name for ftype in FTYPES.values() if ftype.default_type == kind]
    if not named:
        raise PlanError(f"expected a type for an MTP head that llama.cpp has a mix of, got {kind}: choose "
                        "another plan.mtp_type")
    return kind if kind in named else named[0]
