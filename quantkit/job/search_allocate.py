"""From costs to plans: budgets one after another, smallest first, and whatever an allocation rests on is measured before it stands.

    window     types from somewhat below the budget's mean bits on; widened where an allocation takes the lowest of them
    measuring  the choices that are predicted are measured, dearest first, until what is left predicted is at most
               search.max_screen_loss of the plan's predicted KLD; then the allocation is solved again, until nothing changes
    ladder     a group never gets fewer bits than in a smaller budget

Two chains of plans come out: `measured`, on the costs as they are, and `smoothed`, on costs that a line through each group's
measured types gives. The selection chunks choose between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.core.errors import InputError
from quantkit.job.progress import Progress
from quantkit.job.search_budget import Budget
from quantkit.job.sensitivity import Pair, Sensitivity
from quantkit.measure.allocate import Allocation, Option, allocate
from quantkit.measure.search_stats import smooth_costs
from quantkit.spec.plan_records import ALIGNMENT
from quantkit.spec.plan_rules import bits
from quantkit.spec.protocol import SearchSpec

MEASURED, SMOOTHED = "measured", "smoothed"
_BITS_BELOW = 1.6  # of the budget's mean: lower types come in when an allocation asks for them
_MAX_ROUNDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A budget's plan in one chain: the type of each group, the solver's answer, what the ladder's order cost, and what screening
    may have cost: how much less the sum could be, were every predicted cost lower by the usual error of predictions.
    """

    chain: str
    types: Mapping[str, str]
    allocation: Allocation
    monotone_loss: float
    screen_loss: float

    def describe(self, name: str) -> str:
        """One line for people."""
        return (f"{name}, {self.chain}: predicted KLD {self.allocation.cost:.6f}, within {self.allocation.gap:.2%} of the best sum "
                f"of these costs; the order of the ladder costs {self.monotone_loss:.1%}, screening {self.screen_loss:.1%} at most")


@dataclass(slots=True)
class Planner:
    """Drafts plans for budgets."""

    sensitivity: Sensitivity
    spec: SearchSpec
    progress: Progress
    window: set[str] = field(default_factory=set)

    def draft(self, budgets: Sequence[Budget]) -> dict[str, list[Draft]]:
        """Both chains' plans of each budget, by its name. Budgets come smallest first.

        Raises:
            InputError: a budget that the smallest types exceed.
        """
        below: dict[str, Mapping[str, str]] = {}
        drafts: dict[str, list[Draft]] = {budget.name: [] for budget in budgets}
        for budget in budgets:
            self._settle(budget, below.get(MEASURED, {}))
        for budget in budgets:  # again: what a later budget measured may move an earlier one
            self._settle(budget, below.get(MEASURED, {}))
            for chain, cost in ((MEASURED, self._measured), (SMOOTHED, self._smoothed())):
                types, allocation = self._solve(budget, below.get(chain, {}), cost)
                free = self._solve(budget, {}, cost)[1].cost
                lowest = self._solve(budget, below.get(chain, {}), self._lower(cost))[1].cost
                below[chain] = types
                drafts[budget.name].append(Draft(
                    chain=chain, types=types, allocation=allocation,
                    monotone_loss=max(0.0, allocation.cost / free - 1) if free > 0 else 0.0,
                    screen_loss=max(0.0, 1 - lowest / allocation.cost) if allocation.cost > 0 else 0.0))
                self.progress.note(drafts[budget.name][-1].describe(budget.name))
        return drafts

    def _settle(self, budget: Budget, below: Mapping[str, str]) -> None:
        """Measure until the budget's allocation rests on measured costs."""
        mean = 8 * self.group_bytes(budget) / sum(g.n_elements for g in self.sensitivity.groups.values())
        self._widen(t for t in self.spec.types if bits(t) >= mean - _BITS_BELOW)
        while True:
            try:
                self._anchor(mean)
                self._solve(budget, below, self._measured)
                break
            except InputError:
                if not self._widen_once():
                    raise
        for _ in range(_MAX_ROUNDS):
            types, allocation = self._solve(budget, below, self._measured)
            if any(types[g.name] == self._lowest(g.name) != g.types[-1] for g in self.sensitivity.groups.values()):
                self._widen_once()
                self._anchor(mean)
                continue
            costs = [self.sensitivity.cost(Pair(group, type_)) for group, type_ in types.items()]
            predicted = sorted((c for c in costs if c.source == "predicted"), key=lambda c: c.kld)
            left = 0.0
            while predicted and left + predicted[0].kld <= self.spec.max_screen_loss * allocation.cost:
                left += predicted.pop(0).kld
            if not predicted:
                return
            self.sensitivity.measure([Pair(c.group, c.type) for c in predicted], f"trials for {budget.name}")
        self.progress.note(f"{budget.name}: the allocation still moved after {_MAX_ROUNDS} rounds of measuring")

    def _widen(self, types: Iterable[str]) -> None:
        self.window |= set(types)
        alone = {t for g in self.sensitivity.groups.values() if not set(g.types) & self.window for t in g.types[-1:]}
        self.window |= alone
        self.sensitivity.prepare(sorted(self.window, key=lambda t: (-bits(t), t)))

    def _widen_once(self) -> bool:
        rest = sorted((t for t in self.spec.types if t not in self.window), key=bits, reverse=True)
        if not rest:
            return False
        self._widen([t for t in rest if bits(t) == bits(rest[0])])
        return True

    def _anchor(self, mean: float) -> None:
        """Two measured types for every group, one where it has no more."""
        pairs = []
        for group in self.sensitivity.groups.values():
            types = self._types(group.name)
            known = self.sensitivity.known(group.name)
            for type_name in (min(types, key=lambda t: (abs(bits(t) - mean), t)), types[-1]):
                if len(known) < min(2, len(types)) and type_name not in known:
                    pairs.append(Pair(group.name, type_name))
        self.sensitivity.measure(pairs, "trials of anchors")

    def _types(self, group: str) -> list[str]:
        return [t for t in self.sensitivity.groups[group].types if t in self.window]

    def _lowest(self, group: str) -> str:
        return self._types(group)[-1]

    def group_bytes(self, budget: Budget) -> int:
        """What a budget leaves for the groups."""
        grouped = {name for g in self.sensitivity.groups.values() for name in g.tensors}
        fixed = sum(row.size_bytes + -row.size_bytes % ALIGNMENT for row in budget.stock.rows if row.name not in grouped)
        return budget.tensor_bytes - fixed

    def _measured(self, pair: Pair) -> float:
        return self.sensitivity.cost(pair).kld

    def _lower(self, cost: Callable[[Pair], float]) -> Callable[[Pair], float]:
        """Costs with every one that is not measured lowered by the usual error of predictions."""
        factor = math.exp(-self.sensitivity.prediction_error())
        return lambda pair: cost(pair) * (factor if self.sensitivity.cost(pair).source == "predicted" else 1.0)

    def _smoothed(self) -> Callable[[Pair], float]:
        found: dict[str, Mapping[str, float]] = {}
        for group in self.sensitivity.groups:
            known, errors = self.sensitivity.known(group), self.sensitivity.errors(group)
            measured = {t: kld for t, (_, kld) in known.items()}
            found[group] = smooth_costs(errors, measured)
        return lambda pair: found[pair.group][pair.type]

    def _solve(self, budget: Budget, below: Mapping[str, str], cost: Callable[[Pair], float]) -> tuple[dict[str, str], Allocation]:
        names = list(self.sensitivity.groups)
        choices = [[t for t in self._types(g) if g not in below or bits(t) >= bits(below[g])] for g in names]
        items = [[Option(self.sensitivity.size(Pair(g, t)), cost(Pair(g, t))) for t in own]
                 for g, own in zip(names, choices, strict=True)]
        allocation = allocate(items, self.group_bytes(budget), tolerance=self.spec.size_tolerance)
        return {g: own[pick] for g, own, pick in zip(names, choices, allocation.picks, strict=True)}, allocation
