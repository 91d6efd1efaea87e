"""Which files are worth their bytes: the Pareto front of size and loss, and who stands behind it beyond the noise.

    front       no other file is as small and loses less, by the numbers as they are
    dominated   another file is as small or smaller, and loses less beyond the noise
    tied        another file is smaller, and no more lossy beyond the noise: the bytes in between bought nothing measurable
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.spec.records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one file stands among the others; indices of those that it stands behind or beside, nearest in size first."""

    on_front: bool
    dominated_by: tuple[int, ...]
    tied_with: tuple[int, ...]


class Choice(NamedTuple):
    """One file: its size and its loss (lower is better)."""

    size_bytes: int
    loss: float


#: Whether file i loses less than file j beyond the noise.
IsBetter = Callable[[int, int], bool]


def find_standings(choices: Sequence[Choice], is_better: IsBetter) -> list[Standing]:
    """The standing of each file, in the order given. Of equal size and loss all are on the front."""
    out = []
    for i, (size, loss) in enumerate(choices):
        others = sorted((j for j in range(len(choices)) if j != i), key=lambda j: (-choices[j].size_bytes, j))
        no_larger = [j for j in others if choices[j].size_bytes <= size]
        ahead = [j for j in no_larger if choices[j].loss <= loss and choices[j] != choices[i]]
        dominated_by = tuple(j for j in no_larger if is_better(j, i))
        tied_with = tuple(j for j in no_larger if choices[j].size_bytes < size and j not in dominated_by and not is_better(i, j))
        out.append(Standing(on_front=not ahead, dominated_by=dominated_by, tied_with=tied_with))
    return out


def is_below(a: Estimate, b: Estimate) -> bool:
    """Whether a's whole 95 % interval lies below b's: stricter than a paired test, and False where there is no interval."""
    return a.hi is not None and b.lo is not None and a.hi < b.lo
