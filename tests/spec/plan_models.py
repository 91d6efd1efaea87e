"""Models for plan tests, made in memory: a header needs no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.spec.gguf_header import ArrayValue, GgufHeader, TensorInfo
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, resolve_plan
from quantkit.spec.protocol import PlanSpec, Rule, Tier
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.gguf_factory import Tensors, model_metadata, model_tensors


def model_of(tensors: Tensors, metadata: Mapping[str, Any], *, arch: str = "llama", alignment: int = 32) -> ModelInfo:
    """A model with these tensors, laid out one after the other."""
    infos, offset = [], 4096
    for name, (shape, type_name) in tensors.items():
        kind = TENSOR_TYPES[type_name]
        size_bytes = math.prod(shape[1:]) * kind.row_bytes(shape[0])
        infos.append(TensorInfo(name=name, shape=tuple(shape), type=kind, offset=offset, size_bytes=size_bytes, part=0))
        offset += -(-size_bytes // alignment) * alignment
    keys = {key: ArrayValue(element_type="string", n=len(value), values=None) if isinstance(value, list) else value
            for key, value in metadata.items()}
    path = Path("base.gguf")
    return describe_model(GgufHeader(path=path, parts=(path,), version=3, big_endian=False, alignment=alignment,
                                     metadata={"general.architecture": arch, **keys}, tensors=tuple(infos),
                                     data_offset=(4096,), part_alignment=(alignment,), file_bytes=offset))


def tiny(*, n_embd: int = 256, n_ff: int = 512, n_block: int = 8, n_nextn: int = 0, n_expert: int = 0, tied: bool = False,
         more: Tensors | None = None, without: str = "", alignment: int = 32) -> ModelInfo:
    """A llama of some blocks; `more` tensors are added or replace, those that contain `without` are left out."""
    sizes: dict[str, Any] = {"n_embd": n_embd, "n_ff": n_ff, "n_block": n_block, "n_nextn": n_nextn, "n_expert": n_expert}
    tensors = {**model_tensors(**sizes, tied=tied), **(more or {})}
    kept = {name: value for name, value in tensors.items() if not without or without not in name}
    return model_of(kept, model_metadata(**sizes), alignment=alignment)


def rule(match: str, type_: str = "", *, at_least: str = "", layers: str = "", optional: bool = False) -> Rule:
    return Rule(match=match, layers=layers, type=type_, at_least=at_least, optional=optional)


def resolve(model: ModelInfo, *rules: Rule, common: tuple[Rule, ...] = (), default: str = "Q4_K", ftype: str = "Q4_K_M",
            mtp_type: str = "", on_substitute: str = "mark", imatrix: Mapping[str, int] | None = None) -> Plan:
    """The plan of a tier T."""
    tier = Tier(name="T", ftype=ftype, default=default, rules=rules)
    spec = PlanSpec(ladder="guarded", on_substitute="fail" if on_substitute == "fail" else "mark", mtp_mode="inside",
                    mtp_type=mtp_type, rules=common, tiers=(tier,))
    return resolve_plan(model, tier, spec, imatrix)


def types(plan: Plan) -> dict[str, str]:
    """Tensor name → type."""
    return {row.name: row.type for row in plan.rows}


def rules(plan: Plan) -> dict[str, str]:
    """Tensor name → the rule that chose."""
    return {row.name: row.rule for row in plan.rows}


def lengths(model: ModelInfo, *, without: str = "") -> dict[str, int]:
    """What a complete importance matrix holds, or one without the tensors whose names contain a text."""
    return {t.name: t.shape[0] * (t.shape[2] if len(t.shape) > 2 else 1) for t in model.header.tensors
            if len(t.shape) > 1 and not (without and without in t.name)}
