"""Which card each tier fits, for tables: the smallest of 8, 12, 16, 24, 32 and 48 GiB at 8k and 32k tokens of context.

A model that was trained for less is told about at the length that it was trained for.
"""

from __future__ import annotations

from typing import NamedTuple

from quantkit.report.table import TableRow
from quantkit.spec.base_facts import BaseFacts
from quantkit.spec.memory_fit import CARDS_GIB, WeightMemory, smallest_card, weight_memory
from quantkit.spec.plan import Plan


class CardFit(NamedTuple):
    """One context length: the smallest card that holds a tier, None where none of the sizes does."""

    n_ctx: int
    card_gib: int | None

    @property
    def text(self) -> str:
        """For a cell."""
        return f"> {CARDS_GIB[-1]} GiB" if self.card_gib is None else f"{self.card_gib} GiB"


def card_fits(row: TableRow, plan: Plan | None, base: BaseFacts) -> list[CardFit]:
    """The smallest cards of one file, one for each context length that was estimated."""
    weights = file_weights(row, plan, base)
    return [CardFit(m.n_ctx, smallest_card(weights, m)) for m in base.memory]


def file_weights(row: TableRow, plan: Plan | None, base: BaseFacts) -> WeightMemory:
    """Where a file's tensors go: by its plan; of a file without one, all of it on the card, which is an upper bound."""
    if plan is None:
        return WeightMemory(card_bytes=row.size_bytes, ram_bytes=0, mtp_bytes=0)
    return weight_memory(((r.role, r.size_bytes) for r in plan.rows), tied_embeddings=base.tied_embeddings)


def short_n_ctx(n_ctx: int) -> str:
    """`8k`, `32k`."""
    return f"{n_ctx // 1024}k" if n_ctx % 1024 == 0 else f"{n_ctx:,}"
