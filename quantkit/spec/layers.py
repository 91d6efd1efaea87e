"""The layers a plan rule names, as numbers of trunk blocks: "", "7", "0-3", "first 1/8", "last 1/8"."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_SHARE = re.compile(r"(first|last) ([0-9]{1,6})/([0-9]{1,6})")


class _Share(NamedTuple):
    end: str
    part: int
    whole: int


def is_layers(text: str) -> bool:
    """Whether a text names layers."""
    return text == "" or _parse_range(text) is not None or _parse_share(text) is not None


def layer_range(layers: str, n_layer: int) -> range:
    """The trunk layers that a rule's `layers` names.

    "" is all of them, "7" one, "0-3" those from 0 to 3, "first 1/8" the first ⌈n_layer/8⌉ and "last 1/8" as many at the end,
    so that a small model has its one layer of each. The MTP block is never counted.

    Args:
        layers: a text that `is_layers` accepts.
        n_layer: trunk layers.

    Returns:
        Block numbers below n_layer; empty if the model is too shallow.
    """
    if (numbers := _parse_range(layers)) is not None:
        return range(min(numbers.start, n_layer), min(numbers.stop, n_layer))
    if (share := _parse_share(layers)) is not None:
        n = -(-n_layer * share.part // share.whole)
        return range(n) if share.end == "first" else range(n_layer - n, n_layer)
    return range(n_layer)


def _parse_range(text: str) -> range | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2] or match[1])
    return range(low, high + 1) if low <= high else None


def _parse_share(text: str) -> _Share | None:
    match = _SHARE.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return None
    return _Share(match[1], int(match[2]), int(match[3]))
