"""The plan of any file: its tensor types as a protocol of one tier, whose exact rules give a base the same types.

    default     the type that holds most parameters of what a plan may choose
    a glob      where every block has one type for a tensor:       blk.*.attn_v.weight = Q6_K
    layers      where runs of trunk blocks differ:                 blk.*.ffn_down.weight in layers 0-3 = Q6_K
    a name      outside the blocks, in an MTP block that differs, and where a glob does not reach: a tensor named in full is meant

Everything but the plan is the template's, so files made from one base by any publisher's plan may be compared. What a plan never
chooses (norms, biases, ...) is left to the base.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from quantkit.core.errors import PlanError
from quantkit.spec.gguf_header import GgufHeader, TensorInfo
from quantkit.spec.model import ModelInfo, block_of, describe_model, type_shares
from quantkit.spec.plan import Plan, resolve_plan
from quantkit.spec.plan_records import ALIGNMENT, tensor_size
from quantkit.spec.plan_rules import kept_by_plan
from quantkit.spec.protocol import Protocol, Rule, Tier, parse_protocol, write_protocol
from quantkit.spec.quantizable import WRITABLE_TYPES
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

_BLOCK = re.compile(r"blk\.[0-9]+\.")
_NOT_WORD = re.compile(r"[^A-Za-z0-9._-]+")
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_LONGEST_NAME = 80
_OTHER_BASE = "give the base that it was made of"


class Difference(NamedTuple):
    """A tensor with one type in a file and another by a plan."""

    name: str
    in_file: str
    planned: str
    rule: str


def extract_protocol(model: ModelInfo, template: Protocol) -> Protocol:
    """A protocol whose one tier has a file's tensor types.

    Args:
        model: the file, anyone's.
        template: gives everything but the plan.

    Raises:
        PlanError: types that llama.cpp cannot write, or a file that holds an MTP head alone.
    """
    if model.is_head_only:
        raise PlanError(f"expected a whole model, got {model.header.path}, which is an MTP head: take the plan of the model")
    free = _free_tensors(model)
    if strange := [f"{t.name} ({t.type.name})" for t in free if t.type.name not in WRITABLE_TYPES or not _has_mix(t.type.name)]:
        raise PlanError(f"expected types that llama.cpp can write in {model.header.path}, got {_names(strange)}: take another file")
    if not free:
        raise PlanError(f"expected matrices in {model.header.path}, got none that a plan could choose a type for: take "
                        "another file")
    default = type_shares(free)[0].type
    protocol = _protocol(model, template, default, _rules(model, free, default, ()))
    if floored := [d.name for d in differences(model, apply_to_base(protocol, as_base(model)))]:
        protocol = _protocol(model, template, default, _rules(model, free, default, floored))
    return protocol


def _protocol(model: ModelInfo, template: Protocol, default: str, rules: Iterable[Rule]) -> Protocol:
    tier = Tier(name=_word(model), ftype=_ftype(model, default), default=default, rules=tuple(rules))
    plan = dataclasses.replace(template.plan, ladder="guarded", rules=(), tiers=(tier,), on_substitute="mark",
                               mtp_type="" if model.n_nextn else template.plan.mtp_type)
    made = dataclasses.replace(template, name=f"from-{tier.name}"[:_LONGEST_NAME], plan=plan,
                               title=f"Tensor types of {model.header.parts[0].name}")
    return parse_protocol(write_protocol(made))  # checked like one that was written by hand


def apply_to_base(protocol: Protocol, base: ModelInfo) -> Plan:
    """The plan that an extracted protocol gives a base.

    Raises:
        PlanError: see `resolve_plan`.
    """
    return resolve_plan(base, protocol.plan.tiers[0], protocol.plan, None)


def differences(model: ModelInfo, plan: Plan) -> list[Difference]:
    """Tensors whose type in a plan is not the file's; empty where the plan gives the file again.

    Tensors that only one of the two has are not compared.
    """
    types = {t.name: t.type.name for t in model.header.tensors}
    return [Difference(row.name, types[row.name], row.type, row.rule) for row in plan.rows
            if types.get(row.name, row.type) != row.type]


def require_same_tensors(model: ModelInfo, base: ModelInfo) -> None:
    """Refuse a base that is not the one the file was made from, as far as names and shapes tell.

    Raises:
        PlanError: tensors that only one of them has, or of other shapes. The MTP block may be missing from the file.
    """
    ours, theirs = ({t.name: t.shape for t in m.header.tensors} for m in (base, model))
    where = f"{model.header.path} is not of the base {base.header.path}"
    if missing := [name for name in theirs if name not in ours]:
        raise PlanError(f"{where}: expected its {len(theirs)} tensors there, missing {_names(missing)}; {_OTHER_BASE}")
    if extra := [name for name in ours if name not in theirs and base.roles[name] != "mtp"]:
        raise PlanError(f"{where}: the base has tensors that the file lacks, {_names(extra)}; {_OTHER_BASE}")
    if other := [f"{name} {theirs[name]}, in the base {ours[name]}" for name in theirs if theirs[name] != ours[name]]:
        raise PlanError(f"{where}: expected equal shapes, got {_names(other)}; {_OTHER_BASE}")


def as_base(model: ModelInfo) -> ModelInfo:
    """What the file's base looks like to a plan: the same header with BF16 where a quantized type stands."""
    header = model.header
    end, tensors = header.data_offset[0], []
    for t in header.tensors:
        kind = TENSOR_TYPES["BF16"] if t.type.is_quantized else t.type
        size_bytes = tensor_size(t.shape, kind.name)
        tensors.append(TensorInfo(name=t.name, shape=t.shape, type=kind, offset=end, size_bytes=size_bytes, part=0))
        end += size_bytes + -size_bytes % ALIGNMENT
    return describe_model(GgufHeader(
        path=header.path, parts=header.parts[:1], version=header.version, big_endian=header.big_endian, alignment=ALIGNMENT,
        metadata={**header.metadata, "general.alignment": ALIGNMENT}, tensors=tuple(tensors),
        data_offset=header.data_offset[:1], part_alignment=(ALIGNMENT,), file_bytes=end))


def _free_tensors(model: ModelInfo) -> list[TensorInfo]:
    return [t for t in model.header.tensors if kept_by_plan(t, model.architecture) is None]


def _has_mix(type_name: str) -> bool:
    return any(ftype.default_type == type_name for ftype in FTYPES.values())


def _ftype(model: ModelInfo, default: str) -> str:
    """The file's own ftype; where it is unknown, or of a float type, the first of the type that most quantized matrices have.

    In a file of a float ftype llama.cpp ignores all tensor types, so several float types need the name of a quantized one.
    """
    own = FTYPES.get(model.ftype_name or "")
    if own is not None and own.default_type and TENSOR_TYPES[own.default_type].is_quantized:
        return own.name
    types = [share.type for share in type_shares(_free_tensors(model))]
    quantized = [type_ for type_ in types if TENSOR_TYPES[type_].is_quantized]
    wanted = (quantized or [default if len(types) < 2 else "Q8_0"])[0]
    return next(ftype.name for ftype in FTYPES.values() if ftype.default_type == wanted)


def _rules(model: ModelInfo, free: Sequence[TensorInfo], default: str, by_name: Sequence[str]) -> Iterator[Rule]:
    families: dict[str, list[TensorInfo]] = defaultdict(list)
    for t in free:
        families[_escape(_BLOCK.sub("blk.*.", t.name, count=1))].append(t)
    names = [t.name for t in model.header.tensors]
    for glob, members in families.items():
        own = {t.name for t in members}
        if not own.isdisjoint(by_name) or {name for name in names if fnmatchcase(name, glob)} != own:
            yield from (_rule(_escape_all(t.name), t) for t in members if t.name in by_name or t.type.name != default)
        elif len({t.type for t in members}) == 1:
            yield from (_rule(glob, t) for t in members[:1] if t.type.name != default)
        else:
            yield from _ranged(glob, members, model, default)


def _ranged(glob: str, members: Sequence[TensorInfo], model: ModelInfo, default: str) -> Iterator[Rule]:
    """Runs of trunk blocks of one type; MTP blocks, which no range reaches, by name."""
    trunk = sorted((t for t in members if model.roles[t.name] == "trunk"), key=lambda t: block_of(t.name) or 0)
    runs: list[list[TensorInfo]] = []
    for t in trunk:
        if runs and runs[-1][0].type == t.type:
            runs[-1].append(t)
        else:
            runs.append([t])
    for run in runs:
        first, last = block_of(run[0].name), block_of(run[-1].name)
        if run[0].type.name != default:
            yield _rule(glob, run[0], f"{first}" if first == last else f"{first}-{last}")
    yield from (_rule(_escape_all(t.name), t) for t in members if t not in trunk and t.type.name != default)


def _rule(match: str, tensor: TensorInfo, layers: str = "") -> Rule:
    return Rule(match=match, layers=layers, type=tensor.type.name, at_least="", optional=False)


def _escape(pattern: str) -> str:
    """A name as a glob, but for the star that stands for the block."""
    head, star, rest = pattern.partition("blk.*.")
    return head + star + _escape_all(rest) if star and not head else _escape_all(pattern)


def _escape_all(name: str) -> str:
    return re.sub(r"[*?\[]", lambda match: f"[{match[0]}]", name)


def _word(model: ModelInfo) -> str:
    stem = _SHARD.sub("", model.header.parts[0].stem)
    return (_NOT_WORD.sub("-", stem).strip("._-") or "file")[:_LONGEST_NAME].rstrip("._-")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
