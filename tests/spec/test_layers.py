from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.spec.layers import is_layers, layer_range


@pytest.mark.parametrize(("layers", "n_layer", "expected"), [
    ("", 4, [0, 1, 2, 3]),
    ("2", 4, [2]),
    ("1-2", 4, [1, 2]),
    ("2-9", 4, [2, 3]),
    ("7", 4, []),
    ("first 1/8", 64, list(range(8))),
    ("last 1/8", 64, list(range(56, 64))),
    ("first 1/8", 4, [0]),
    ("last 1/8", 4, [3]),
    ("first 1/8", 30, [0, 1, 2, 3]),
    ("last 3/4", 4, [1, 2, 3]),
    ("first 1/1", 3, [0, 1, 2]),
])
def test_layers(layers: str, n_layer: int, expected: list[int]) -> None:
    assert is_layers(layers)
    assert list(layer_range(layers, n_layer)) == expected


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1,2", "first", "first 1", "first 0/8", "first 9/8", "middle 1/8", "1/8",
                                  " 1", "1 ", "first  1/8", "first 1/0", "²", "٣", "1000000000000000000000"])
def test_what_names_no_layers(text: str) -> None:
    assert not is_layers(text)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 16))
def test_shares_lie_in_the_model_and_meet(n_layer: int, a: int, b: int) -> None:
    part, whole = min(a, b), max(a, b)
    first, last = layer_range(f"first {part}/{whole}", n_layer), layer_range(f"last {part}/{whole}", n_layer)
    assert len(first) == len(last) >= n_layer * part / whole
    assert (first.start, last.stop) == (0, n_layer)
    assert set(first) | set(last) <= set(range(n_layer))
