"""Damage to JSON values: keys and items that are missing, doubled or renamed, and values of another kind, size or place."""

from __future__ import annotations

import copy
import random
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e308, float("nan"), float("inf"), "", "x", "..",
    "../../etc/passwd", "/etc/passwd", "a/b", "\0", "\x1b[2J", "<script>alert(1)</script>", "|", "---", "=cmd()", "\ud800",
    "ö" * 300, "9" * 5000, [], {}, [[]], [None], {"x": 1}, {"": None}, [1, "2", 3.0], "0" * 64, "first", "spread")


def damage_json(value: Any, rng: random.Random, n: int = 1) -> Any:
    """A copy with n changes, each at a random place."""
    out = copy.deepcopy(value)
    for _ in range(n):
        holders = [holder for holder in _holders(out) if holder]
        if not holders:
            return out
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("x", "", "..", "a/b", "../x", "<b>"))] = holder.pop(key)
            case 1:
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
            case 2:
                other = rng.choice(holders)
                holder[key] = copy.deepcopy(other[rng.choice(list(other) if isinstance(other, dict) else range(len(other)))])
            case _:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return out


def _holders(value: Any) -> list[Any]:
    found: list[Any] = []
    if isinstance(value, dict | list):
        found.append(value)
        for item in value.values() if isinstance(value, dict) else value[:50]:
            found += _holders(item)
    return found
