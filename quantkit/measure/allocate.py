"""Where to spend bytes: one option for each item, the least total cost, within a budget. The multiple-choice knapsack.

    minimise  Σ_i Σ_o cost[i][o] · x[i][o]      so that  Σ_o x[i][o] = 1 for each i,  Σ size · x <= budget,  x in {0, 1}

Solved exactly by branch and bound (HiGHS, through scipy); the solver's proven lower bound on the cost comes with the answer, so a
search that was cut short says how far from the best it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quantkit.core.errors import InputError

_TIME_LIMIT_S = 30.0
_SCALE = 1e6  # the solver's tolerances are absolute, about 1e-6


class Option(NamedTuple):
    """One way of storing an item: padded bytes, and what it costs in nats."""

    size_bytes: int
    cost: float


class Allocation(NamedTuple):
    """The option of each item by index, their sums, and a lower bound on the cost of any allocation within the budget."""

    picks: tuple[int, ...]
    size_bytes: int
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much better than this anything can be, as a fraction of the cost; 0 is proven best."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


def allocate(items: Sequence[Sequence[Option]], budget_bytes: int, *, tolerance: float = 0.0) -> Allocation:
    """The cheapest allocation within a budget.

    Args:
        items: the options of each item, at least one.
        budget_bytes: the most that all items together may weigh.
        tolerance: with one above 0, allocations below budget · (1 − tolerance) are passed over while there is one above:
            bytes that are there are spent.

    Raises:
        InputError: the smallest options together exceed the budget.
    """
    smallest = sum(min(option.size_bytes for option in options) for options in items)
    if smallest > budget_bytes:
        raise InputError(f"expected a budget of at least {smallest} bytes, the least that the types allowed take, got "
                         f"{budget_bytes}: allow lower types, or lower the floors")
    largest = sum(max(option.size_bytes for option in options) for options in items)
    least = int(np.ceil(min(budget_bytes, largest) * (1 - tolerance))) if tolerance else 0
    return _solve(items, least, budget_bytes) or _require(_solve(items, 0, budget_bytes))


def _solve(items: Sequence[Sequence[Option]], least: int, most: int) -> Allocation | None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    owner = np.repeat(np.arange(len(items)), [len(options) for options in items])
    cost = np.array([option.cost for options in items for option in options])
    size = np.array([option.size_bytes for options in items for option in options], np.float64)
    unit = max(1.0, most / 1e5)  # of the size row's numbers, so that the solver's tolerance stays below a byte
    scale = _SCALE / max(float(cost.max(initial=0.0)), 1e-300)
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    for slack in (0.0, 1.0, 32.0):  # a sum that rounding let through is tried again a little tighter
        result = milp(cost * scale, integrality=np.ones(len(owner)), bounds=Bounds(0, 1), constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(size[None, :] / unit, least / unit, (most - slack) / unit)],
            options={"mip_rel_gap": 0.0, "time_limit": _TIME_LIMIT_S})
        if result.x is None:
            return None
        starts = np.searchsorted(owner, np.arange(len(items) + 1))
        picks = tuple(int(np.argmax(result.x[a:b])) for a, b in pairwise(starts))
        total = sum(options[pick].size_bytes for options, pick in zip(items, picks, strict=True))
        if total <= most:
            value = float(sum(options[pick].cost for options, pick in zip(items, picks, strict=True)))
            return Allocation(picks, total, value, min(value, float(result.mip_dual_bound) / scale))
    return None


def _require(found: Allocation | None) -> Allocation:
    if found is None:
        raise InputError(f"the solver found no allocation within {_TIME_LIMIT_S:.0f} s: decide tensors together with search.n_band")
    return found
