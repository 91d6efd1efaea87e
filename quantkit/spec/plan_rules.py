"""Which type the rules of a protocol name for each tensor, before shapes and importances are looked at.

Rules have ranks: those that hold in every tier 0, a tier's own 1, a tier's own with a layer range 2. Of the rules that name a
type (`type`) the highest rank wins, and two of one rank that name different types for one tensor contradict each other. The
order inside a rank never matters. Rules that name a floor (`at_least`), of any rank, then raise the type, by bits per weight,
and never lower it.

    kept      what the library leaves alone (`spec.quantizable`) and `ssm_dt`: no rule reaches it
    gates     `ssm_alpha`, `ssm_beta`, `ssm_ba`: their errors add up along a sequence, so never below Q8_0, unless an exact rule has
              the tensor's whole name: whoever writes `blk.0.ssm_alpha.weight` means it, as in another publisher's plan
    MTP       the whole block gets `mtp_type` and rules pass it by; with `mtp_type` "" it is treated like the trunk, where rules
              without a layer range match it
    tied      without an output matrix `token_embd` is the output: rules that match either name apply, the higher type wins

Layer ranges count trunk layers (`spec.layers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from quantkit.core.errors import PlanError
from quantkit.spec.gguf_header import TensorInfo
from quantkit.spec.layers import layer_range
from quantkit.spec.model import ModelInfo, block_of
from quantkit.spec.protocol import PlanSpec, Rule, Tier
from quantkit.spec.quantizable import MAX_DIMS, WRITABLE_TYPES, kept_reason, n_dims
from quantkit.spec.tensor_types import TENSOR_TYPES

GATE_FLOOR = "Q8_0"

_GATE = re.compile(r"\.ssm_(alpha|beta|ba)\.weight$")
_DT = re.compile(r"\.ssm_dt\.weight$")
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


class Choice(NamedTuple):
    """A type and what chose it. `exact`: the protocol names this type for this tensor, it is no default and no floor.

    `by_name`: and it does so by the tensor's whole name, without a wildcard.
    """

    type: str
    rule: str
    exact: bool
    by_name: bool = False


class Ranked(NamedTuple):
    """A rule with its rank and the words for it in a plan."""

    rule: Rule
    rank: int
    label: str


class RuleUse(NamedTuple):
    """What a rule came to: how many tensors it reaches, and of how many it decides the type."""

    label: str
    rule: Rule
    is_own: bool
    n_reached: int
    n_decided: int


def bits(type_name: str) -> float:
    """Bits per weight of a tensor type, for comparing two."""
    tensor_type = TENSOR_TYPES[type_name]
    return 8 * tensor_type.type_size / tensor_type.block_size


def kept_by_plan(tensor: TensorInfo, architecture: str) -> str | None:
    """Why a tensor keeps its type in every plan; None if rules may choose.

    Besides what the library leaves alone these are `ssm_dt` and, because it writes three dimensions only, 4-D tensors.
    """
    if reason := kept_reason(tensor.name, tensor.shape, architecture):
        return reason
    return "ssm_dt" if _DT.search(tensor.name) else "4-D" if n_dims(tensor.shape) > MAX_DIMS else None


def choose_types(model: ModelInfo, tier: Tier, spec: PlanSpec) -> dict[str, Choice]:
    """A type for each tensor that is not kept.

    Raises:
        PlanError: a rule that matches nothing or only what keeps its type, rules that contradict, a type with no quantizer.
    """
    _check_types(tier, spec)
    free = {t.name: t for t in model.header.tensors if kept_by_plan(t, model.architecture) is None}
    by_mtp = {name for name in free if spec.mtp_type and model.roles[name] == "mtp"}
    matches: dict[str, list[Ranked]] = {name: [] for name in free}
    for ranked in _ranked(tier, spec):
        matched = [t.name for t in model.header.tensors if _matches(ranked.rule, t.name, model)]
        reached = [name for name in matched if name in free and name not in by_mtp]
        if not reached:
            _refuse_idle(ranked, matched, by_mtp, model, tier)
        for name in reached:
            matches[name].append(ranked)
    choices = {name: raise_gate(name, _choose(name, rules, model, tier)) for name, rules in matches.items()
               if name not in by_mtp}
    return choices | {name: raise_gate(name, Choice(spec.mtp_type, "mtp_type", True)) for name in by_mtp}


def count_rule_uses(model: ModelInfo, tier: Tier, spec: PlanSpec) -> list[RuleUse]:
    """Every rule of a tier with what it came to, those that hold in every tier first.

    A floor below the type that a tensor has anyway decides nothing, and neither does a rule that a higher rank overrules.

    Raises:
        PlanError: as `choose_types`.
    """
    choices = choose_types(model, tier, spec)
    named = [name for name, choice in choices.items() if choice.rule != "mtp_type"]
    decided = [re.sub(r"^gate floor \S+, above | \(tied: the embedding is the output\)$", "", choices[name].rule) for name in named]
    return [RuleUse(label=ranked.label, rule=ranked.rule, is_own=ranked.rank > 0, n_decided=decided.count(ranked.label),
                    n_reached=sum(_matches(ranked.rule, name, model) for name in named)) for ranked in _ranked(tier, spec)]


def _ranked(tier: Tier, spec: PlanSpec) -> Iterator[Ranked]:
    for i, rule in enumerate(spec.rules, 1):
        yield Ranked(rule, 0, f"common rule {i}: {_words(rule)}")
    for i, rule in enumerate(tier.rules, 1):
        yield Ranked(rule, 2 if rule.layers else 1, f"rule {i}: {_words(rule)}")


def _words(rule: Rule) -> str:
    layers = f" in layers {rule.layers}" if rule.layers else ""
    floor = f" at least {rule.at_least}" if rule.at_least else ""
    return rule.match + layers + floor


def _matches(rule: Rule, name: str, model: ModelInfo) -> bool:
    names = [name, _OUTPUT] if model.tied_embeddings and name == _EMBEDDING else [name]
    if not any(fnmatchcase(n, rule.match) for n in names):
        return False
    return not rule.layers or (model.roles[name] == "trunk" and block_of(name) in layer_range(rule.layers, model.n_trunk_block))


def _choose(name: str, rules: Sequence[Ranked], model: ModelInfo, tier: Tier) -> Choice:
    tied = model.tied_embeddings and name == _EMBEDDING
    sides = [_EMBEDDING, _OUTPUT] if tied else [name]
    exact = [choice for side in sides if (choice := _exact(side, name, rules, tier))]
    # of equal bits the first, the tensor's own name, stays
    choice = max(exact, key=lambda c: bits(c.type), default=Choice(tier.default, "default", False))
    floors = [r for r in rules if r.rule.at_least]
    if floors:
        floor = max(floors, key=lambda r: (bits(r.rule.at_least), r.rule.at_least))
        if bits(floor.rule.at_least) > bits(choice.type):
            choice = Choice(floor.rule.at_least, floor.label, False)
    return choice._replace(rule=f"{choice.rule} (tied: the embedding is the output)") if tied else choice


def _exact(side: str, name: str, rules: Sequence[Ranked], tier: Tier) -> Choice | None:
    """The type named by the highest rank that names one for this name of the tensor."""
    named = [r for r in rules if r.rule.type and fnmatchcase(side, r.rule.match)]
    for rank in {r.rank for r in named}:
        one_rank = [r for r in named if r.rank == rank]
        for other in one_rank[1:]:
            if other.rule.type != one_rank[0].rule.type:
                raise PlanError(f"tier {tier.name}: two rules contradict each other for {name}: {one_rank[0].label} = "
                                f"{one_rank[0].rule.type}, {other.label} = {other.rule.type}; narrow one of them")
    if not named:
        return None
    best = max(named, key=lambda r: r.rank)
    return Choice(best.rule.type, best.label, True, by_name=not set(best.rule.match) & set("*?["))


def raise_gate(name: str, choice: Choice) -> Choice:
    """A choice for a gate raised to its floor; any other tensor's as it is."""
    if _GATE.search(name) and not choice.by_name and bits(choice.type) < bits(GATE_FLOOR):
        return Choice(GATE_FLOOR, f"gate floor {GATE_FLOOR}, above {choice.rule}", False)
    return choice


def _check_types(tier: Tier, spec: PlanSpec) -> None:
    named: Mapping[str, str] = {"default": tier.default, "mtp_type": spec.mtp_type} | {
        r.label: r.rule.type or r.rule.at_least for r in _ranked(tier, spec)}
    for where, type_name in named.items():
        if type_name and type_name not in WRITABLE_TYPES:
            raise PlanError(f"tier {tier.name}, {where}: expected a type that llama.cpp can write "
                            f"({', '.join(sorted(WRITABLE_TYPES))}), got {type_name}: choose one of them")


def _refuse_idle(ranked: Ranked, matched: Sequence[str], by_mtp: set[str], model: ModelInfo, tier: Tier) -> None:
    """Refuse a rule without effect; an optional one only if it aims at matrices that keep their type."""
    where = f"tier {tier.name}, {ranked.label}"
    kept = [t for t in model.header.tensors if t.name in matched and (n_dims(t.shape) > 1 or not ranked.rule.optional)]
    if kept and by_mtp.isdisjoint(matched):
        first = kept[0]
        raise PlanError(f"{where}: expected tensors that can be quantized, got {len(kept)} that keep their type, the first "
                        f"{first.name} ({kept_by_plan(first, model.architecture)}, {first.type.name}): take the rule out")
    if ranked.rule.optional or model.is_head_only:
        return
    if matched:
        raise PlanError(f"{where}: expected tensors of the trunk, got a glob that matches the MTP block only, whose type is "
                        "plan.mtp_type: set that, or mark the rule optional")
    layers = f" in the {model.n_trunk_block} trunk layers" if ranked.rule.layers else ""
    raise PlanError(f"{where}: expected a glob over whole tensor names, got one that matches none of the "
                    f"{len(model.header.tensors)}{layers}: correct it, or mark the rule optional")
