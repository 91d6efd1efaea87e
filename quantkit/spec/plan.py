"""Plans: every tensor of a base gets a type, and whatever cannot be carried out is refused before any work.

`resolve_plan` follows a protocol's rules (`spec.plan_rules`), `stock_plan` types that the library itself chose. Both then look
at shapes and importances, so that nothing is left to the library: its fallbacks are silent, its mix counts tensors and skips
those that a pattern names, and it ignores patterns wherever a file's own type is not a quantized one.

A type whose blocks do not divide a row becomes llama.cpp's fallback, and the plan shows it. A type that needs importances which
the matrix lacks becomes the next one that needs none, and the plan shows that too, unless the protocol names the type for that
very tensor: then it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.core.errors import ImatrixError, PlanError
from quantkit.spec.gguf_header import TensorInfo
from quantkit.spec.model import ModelInfo, require_consistent
from quantkit.spec.plan_records import ALIGNMENT, Change, Override, Plan, PlanRow, as_mapping, tensor_size
from quantkit.spec.plan_rules import Choice, choose_types, kept_by_plan
from quantkit.spec.protocol import PlanSpec, Tier
from quantkit.spec.quantizable import MAX_DIMS, READABLE_SOURCES, kept_reason, n_dims, needs_imatrix
from quantkit.spec.tensor_types import FALLBACKS, FTYPES, TENSOR_TYPES

__all__ = ["Override", "Plan", "PlanRow", "as_mapping", "require_base", "resolve_plan", "stock_plan"]

# The nearest type above that needs no importances; Q2_K itself needs them inside a Q2_K_S file.
_WITHOUT_IMATRIX = {"IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "Q2_K", "IQ3_XXS": "Q3_K",
                    "Q2_K": "Q3_K"}


_LARGEST_BLOCK = 256
_SMALL_BLOCKS_OF_MIX = {"MXFP4": {"Q8_0"}, "Q5_0": {"Q5_1"}}  # llama_tensor_get_type_impl


def resolve_plan(model: ModelInfo, tier: Tier, spec: PlanSpec, imatrix: Mapping[str, int] | None) -> Plan:
    """The plan of a tier by the protocol's rules.

    Args:
        model: the base.
        tier, spec: from the protocol.
        imatrix: tensor name → number of importances; empty if there is no matrix. None: not known yet, plan as if it held
            every tensor.

    Raises:
        PlanError: the plan cannot be carried out as written; names tensors and rules.
        ImatrixError: an entry whose length is not the tensor's ne0 * ne2.
        GgufError: the base contradicts itself.
    """
    require_base(model)
    choices = choose_types(model, tier, spec)
    return _finish(model, tier, choices, imatrix, fail_on_change=spec.on_substitute == "fail")


def stock_plan(model: ModelInfo, tier: Tier, types: Mapping[str, str], imatrix: Mapping[str, int] | None, *,
               mtp_type: str = "", on_substitute: str = "mark") -> Plan:
    """The plan of a tier whose types are llama.cpp's own mix, learned by a dry run.

    Args:
        model: the base.
        tier: its ftype is the mix.
        types: tensor name → type as the dry run told it, for every tensor.
        imatrix: as in `resolve_plan`.
        mtp_type: pins the matrices of the MTP block; "" leaves them to the mix.
        on_substitute: "fail" refuses a tensor that does not get the type it was meant to have.

    Raises:
        PlanError, ImatrixError, GgufError: as `resolve_plan`.
    """
    require_base(model)
    if missing := [t.name for t in model.header.tensors if t.name not in types]:
        raise PlanError(f"tier {tier.name}: expected a type for every tensor from the dry run, got none for {_names(missing)}: "
                        "run it again, and if it comes back, report it")
    choices = {}
    for t in model.header.tensors:
        if kept_reason(t.name, t.shape, model.architecture) or n_dims(t.shape) > MAX_DIMS:
            continue
        if mtp_type and model.roles[t.name] == "mtp":
            choices[t.name] = Choice(mtp_type, "mtp_type", True)
        else:
            choices[t.name] = Choice(types[t.name], "stock", False)
    return _finish(model, tier, choices, imatrix, fail_on_change=on_substitute == "fail", mix=FTYPES[tier.ftype].default_type)


def require_base(model: ModelInfo) -> None:
    """Refuse a file that no tier can be made from, whatever the plan.

    Raises:
        GgufError: it contradicts itself.
        PlanError: its alignment is not 32, it is quantized already, or of a type that llama.cpp cannot quantize from.
    """
    require_consistent(model)
    if model.header.alignment != ALIGNMENT:
        raise PlanError(f"expected general.alignment = {ALIGNMENT} in {model.header.path}, got {model.header.alignment}: "
                        "llama.cpp would write a file that cannot be loaded; write the base again with that alignment first")
    if quantized := [f"{t.name} ({t.type.name})" for t in model.header.tensors if t.type.is_quantized]:
        raise PlanError(f"expected a base of F32, F16 or BF16 tensors in {model.header.path}, got {_names(quantized)}: "
                        "quantizing twice loses more than once; start from the unquantized file")
    unreadable = [f"{t.name} ({t.type.name})" for t in model.header.tensors if t.type.name not in READABLE_SOURCES
                  and not kept_reason(t.name, t.shape, model.architecture)]
    if unreadable:
        raise PlanError(f"expected F32, F16 or BF16 matrices in {model.header.path}, got {_names(unreadable)}: "
                        "llama.cpp cannot quantize from them; convert the model again")


def _finish(model: ModelInfo, tier: Tier, choices: Mapping[str, Choice], imatrix: Mapping[str, int] | None, *,
            fail_on_change: bool, mix: str = "") -> Plan:
    """Rows from choices: shapes, importances, sizes, and what depends on all of them together."""
    if imatrix is not None:
        _check_lengths(model, tier, choices, imatrix)
    rows = tuple(_row(t, model, tier, choices.get(t.name), imatrix, mix) for t in model.header.tensors)
    plan = Plan(tier=tier.name, ftype=tier.ftype, rows=rows)
    _check_importances(plan, choices, imatrix)
    if fail_on_change and (changed := [*plan.substituted, *plan.no_imatrix]):
        raise PlanError(f"tier {tier.name}: on_substitute = 'fail', and {len(changed)} tensors cannot have their type: "
                        + "; ".join(f"{row.name} {row.rule}" for row in changed[:5]) + ": give them types that fit by rules, or "
                                                                                       "allow substitutes")
    _check_unquantized(plan)
    return plan


def _row(tensor: TensorInfo, model: ModelInfo, tier: Tier, choice: Choice | None, imatrix: Mapping[str, int] | None,
         mix: str) -> PlanRow:
    library_keeps = kept_reason(tensor.name, tensor.shape, model.architecture)
    change: Change = ""
    if choice is None:
        reason = kept_by_plan(tensor, model.architecture)
        choice = Choice(tensor.type.name, f"keep: {reason}", False)
    type_name = wanted = choice.type
    rule = choice.rule
    if tensor.shape[0] % TENSOR_TYPES[wanted].block_size:
        type_name, change = _fallback(tensor, wanted, tier), "substituted"
        rule = f"substituted from {wanted}, {tensor.shape[0]} is not divisible by {TENSOR_TYPES[wanted].block_size} ({rule})"
    elif rule == "stock" and _stock_fell_back(tensor, wanted, mix):
        change, rule = "substituted", f"stock, substituted for rows of {tensor.shape[0]}"
    if _lacks(tensor, model, imatrix) and needs_imatrix(tensor.name, type_name, tier.ftype):
        while needs_imatrix(tensor.name, type_name, tier.ftype):
            type_name = _WITHOUT_IMATRIX[type_name]
        change, rule = "no imatrix", f"no imatrix for {wanted} ({rule})"
    return PlanRow(name=tensor.name, shape=tensor.shape, role=model.roles[tensor.name], source_type=tensor.type.name,
                   type=type_name, rule=rule, wanted=wanted, change=change, quantizable=library_keeps is None,
                   size_bytes=tensor_size(tensor.shape, type_name))


def _lacks(tensor: TensorInfo, model: ModelInfo, imatrix: Mapping[str, int] | None) -> bool:
    """Whether there are no importances; a complete matrix lacks embeddings too that are looked up and never multiplied."""
    if imatrix is None:
        is_output = model.tied_embeddings and tensor.name == "token_embd.weight"
        return model.roles[tensor.name] == "embedding" and not is_output
    return tensor.name not in imatrix


def _fallback(tensor: TensorInfo, wanted: str, tier: Tier) -> str:
    """The type that llama.cpp stores instead (tensor_type_fallback)."""
    ne0, block_size = tensor.shape[0], TENSOR_TYPES[wanted].block_size
    if wanted not in FALLBACKS:
        raise PlanError(f"tier {tier.name}: expected rows divisible by {block_size} for {wanted}, got {ne0} in {tensor.name}, "
                        "and llama.cpp has no other type for it: give it a type by a rule")
    second = FALLBACKS[wanted]
    return "F16" if ne0 % TENSOR_TYPES[second].block_size else second


def _stock_fell_back(tensor: TensorInfo, type_name: str, mix: str) -> bool:
    """Whether the library's answer is a fallback already: a type of small blocks that the mix itself would not use.

    Q8_0 for the attention of eight experts counts too where rows do not fit; other tensors of that mix then do anyway.
    """
    if not tensor.shape[0] % _LARGEST_BLOCK or type_name == mix:
        return False
    return type_name in {"F16", *FALLBACKS.values()} - _SMALL_BLOCKS_OF_MIX.get(mix, set())


def _check_lengths(model: ModelInfo, tier: Tier, choices: Mapping[str, Choice], imatrix: Mapping[str, int]) -> None:
    for t in model.header.tensors:
        expected = t.shape[0] * (t.shape[2] if len(t.shape) > 2 else 1)
        if t.name in choices and imatrix.get(t.name, expected) != expected:
            raise ImatrixError(f"tier {tier.name}: expected {expected} importances for {t.name} (ne0 * ne2), got "
                               f"{imatrix[t.name]}: the matrix is from another model; collect it from this base")


def _check_importances(plan: Plan, choices: Mapping[str, Choice], imatrix: Mapping[str, int] | None) -> None:
    """A type that the protocol names for a tensor is not changed behind its back; without any matrix nothing is."""
    lacking = plan.no_imatrix
    if lacking and imatrix is not None and not imatrix:
        raise PlanError(f"tier {plan.tier} needs an importance matrix, and there is none: {len(lacking)} tensors, the first "
                        f"{lacking[0].name} at {lacking[0].wanted}; collect one with `quantkit imatrix`, or pass --imatrix")
    named = [row for row in lacking if choices[row.name].exact]
    if named:
        raise PlanError(f"tier {plan.tier}: the protocol asks for types that need importances, and there are none for "
                        f"{_names([f'{row.name} ({row.wanted})' for row in named])}: collect a matrix that covers them (an untied "
                        "embedding never has any), or ask for Q2_K or more")


def _check_unquantized(plan: Plan) -> None:
    """llama.cpp ignores every override in a file whose own type is F32, F16 or BF16."""
    own = FTYPES[plan.ftype].default_type
    if TENSOR_TYPES[own].is_quantized:
        return
    other = [f"{row.name} ({row.type})" for row in plan.rows if row.quantizable and row.type != own]
    if other:
        raise PlanError(f"tier {plan.tier}: llama.cpp ignores tensor types in a file of ftype {plan.ftype}, but the plan has "
                        f"others for {_names(other)}: take the rule, default or mtp_type out, or use a quantized ftype")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
