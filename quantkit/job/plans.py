"""Plans of a ladder: by the protocol's rules, or llama.cpp's own mix learned by asking it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import dry_run
from quantkit.job.foreign import read_imatrix
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, resolve_plan, stock_plan
from quantkit.spec.protocol import Protocol, Tier
from quantkit.spec.quantizable import is_quantizable
from quantkit.spec.tensor_types import FTYPES


def resolve_ladder(base: Path, protocol: Protocol, tiers: Sequence[str] | None, imatrix: Path | None) -> list[Plan]:
    """Plans of some tiers of a protocol, or of all.

    Args:
        imatrix: the matrix that the tiers will be quantized with; None: not known yet, plan as if it held every tensor.

    Raises:
        PlanError, ProtocolError, ImatrixError, GgufError: what cannot be carried out, before any work.
    """
    model = describe_model(read_header(base))
    lengths = read_imatrix(imatrix).lengths() if imatrix is not None else None
    chosen = choose_tiers(protocol, tiers)
    with WorkerPool(1) as pool:
        return [resolve_tier(pool, model, protocol, tier, lengths) for tier in chosen]


def choose_tiers(protocol: Protocol, names: Sequence[str] | None) -> list[Tier]:
    """The protocol's tiers of those names, in the protocol's order; all of them for None.

    Raises:
        ProtocolError: a name that the protocol does not have; lists those it has.
    """
    if names is None:
        return list(protocol.plan.tiers)
    wanted = {protocol.plan.tier(name).name for name in names}
    return [tier for tier in protocol.plan.tiers if tier.name in wanted]


def resolve_tier(pool: WorkerPool, model: ModelInfo, protocol: Protocol, tier: Tier, imatrix: Mapping[str, int] | None) -> Plan:
    """One tier's plan; the engine is asked only for the ladder `stock`."""
    spec = protocol.plan
    if spec.ladder != "stock":
        return resolve_plan(model, tier, spec, imatrix)
    names = tuple(imatrix) if imatrix is not None else tuple(
        t.name for t in model.header.tensors if is_quantizable(t.name, t.shape, model.architecture))
    types = pool.call(f"dry run {tier.name}", dry_run, source=model.header.parts[0], ftype=FTYPES[tier.ftype].id,
                      imatrix_names=names)
    return stock_plan(model, tier, types, imatrix, mtp_type=spec.mtp_type, on_substitute=spec.on_substitute)
