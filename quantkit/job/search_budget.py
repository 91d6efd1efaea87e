"""Budgets of a search: how many bytes, which stock mix they are taken from, and the plan that must be beaten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from quantkit.core.errors import InputError
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import dry_run
from quantkit.spec.model import ModelInfo
from quantkit.spec.plan import Plan, stock_plan
from quantkit.spec.protocol import Protocol, Tier
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

HEADER_SLACK = 2048  # keys that quantizing adds: file type, version, and where the importances came from
_NO_RIVALS = {"TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"}  # for models trained so


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What the user asks for: the bytes of a tier's stock mix, a file size, or tensor bits per weight over the whole file."""

    kind: Literal["match", "size", "bpw"]
    tier: str = ""
    size_bytes: int = 0
    bpw: float = 0.0

    @property
    def name(self) -> str:
        """Of the tier that is made for it."""
        what = {"match": self.tier, "size": f"{self.size_bytes}-bytes", "bpw": f"{self.bpw:g}-bpw"}[self.kind]
        return f"search-{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Padded bytes of all tensors, and the stock plan: it gives the header's ftype, the tensors that no search decides, and the
    first incumbent if it fits.
    """

    name: str
    tensor_bytes: int
    stock: Plan

    @property
    def has_incumbent(self) -> bool:
        return self.stock.tensor_bytes <= self.tensor_bytes


class StockPlans:
    """llama.cpp's own mixes for one base and matrix, each asked for once; the MTP block has the protocol's type in all of them."""

    def __init__(self, pool: WorkerPool, model: ModelInfo, protocol: Protocol, lengths: Mapping[str, int]) -> None:
        self._pool, self._model, self._protocol, self._lengths = pool, model, protocol, lengths
        self.plan = cache(self._plan)

    def _plan(self, ftype: str) -> Plan:
        tier = Tier(name=ftype, ftype=ftype, default=FTYPES[ftype].default_type, rules=())
        types = self._pool.call(f"dry run {ftype}", dry_run, source=self._model.header.parts[0], ftype=FTYPES[ftype].id,
                                imatrix_names=tuple(self._lengths))
        return stock_plan(self._model, tier, types, self._lengths, mtp_type=self._protocol.plan.mtp_type)

    def below(self, tensor_bytes: int) -> Plan:
        """The largest mix that fits; the smallest there is where none does."""
        plans = [self.plan(name) for name, ftype in FTYPES.items()
                 if name not in _NO_RIVALS and ftype.default_type and TENSOR_TYPES[ftype.default_type].is_quantized]
        fitting = [plan for plan in plans if plan.tensor_bytes <= tensor_bytes]
        return max(fitting, key=lambda p: p.tensor_bytes) if fitting else min(plans, key=lambda p: p.tensor_bytes)


def make_budgets(wants: Sequence[Want], plans: StockPlans, model: ModelInfo, protocol: Protocol) -> list[Budget]:
    """Budgets, smallest first.

    Raises:
        InputError: a size that is below the header's, or a want twice.
        ProtocolError: a tier that the protocol does not have.
    """
    budgets = []
    for want in wants:
        if want.kind == "match":
            stock = plans.plan(protocol.plan.tier(want.tier).ftype)
            budgets.append(Budget(name=want.name, tensor_bytes=stock.tensor_bytes, stock=stock))
            continue
        if want.kind == "bpw":
            tensor_bytes = int(want.bpw * model.n_params / 8)
        else:
            tensor_bytes = want.size_bytes - model.header.data_offset[0] - HEADER_SLACK
        if tensor_bytes <= 0:
            raise InputError(f"expected a size beyond the header's {model.header.data_offset[0] + HEADER_SLACK} bytes, got "
                             f"{want.size_bytes}: give a larger one")
        budgets.append(Budget(name=want.name, tensor_bytes=tensor_bytes, stock=plans.below(tensor_bytes)))
    if len({b.name for b in budgets}) < len(budgets):
        raise InputError("expected every budget once, got one twice: leave one away")
    return sorted(budgets, key=lambda b: (b.tensor_bytes, b.name))
