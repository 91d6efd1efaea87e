"""Two files of one model, tensor by tensor: which hold other bytes, and how far apart their weights are.

    relative difference = sqrt( Σ (a − b)² / Σ b² )    over all weights, dequantized
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.units import MIB
from quantkit.job.tensor_check import read_rows
from quantkit.spec.gguf_header import GgufHeader, TensorInfo

_STEP_BYTES = 4 * MIB  # of weights as they are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor whose bytes differ; `relative_difference` of a's weights from b's, at least 0."""

    name: str
    type: str
    relative_difference: float


def compare_tensors(a: GgufHeader, b: GgufHeader) -> list[TensorDifference]:
    """Tensors of a that differ from those of b, in the order of the file.

    Raises:
        InputError: the files do not hold the same tensors in the same types.
    """
    others = {tensor.name: tensor for tensor in b.tensors}
    layout_a = {(t.name, t.shape, t.type.name) for t in a.tensors}
    layout_b = {(t.name, t.shape, t.type.name) for t in b.tensors}
    if layout_a != layout_b:
        name, shape, type_name = min(layout_a ^ layout_b)
        raise InputError(f"expected equal tensors in {a.path.name} and {b.path.name}, found {name} {shape} {type_name} in only "
                         "one: give two files of one model")
    pairs = [(tensor, others[tensor.name]) for tensor in a.tensors]
    return [TensorDifference(name=x.name, type=x.type.name, relative_difference=_difference(a, x, b, y)) for x, y in pairs
            if not _same_bytes(a, x, b, y)]


def _same_bytes(a: GgufHeader, tensor_a: TensorInfo, b: GgufHeader, tensor_b: TensorInfo) -> bool:
    pieces = zip(_pieces(a.parts[tensor_a.part], tensor_a), _pieces(b.parts[tensor_b.part], tensor_b), strict=True)
    return all(np.array_equal(x, y) for x, y in pieces)


def _pieces(path: Path, tensor: TensorInfo) -> Iterator[npt.NDArray[np.uint8]]:
    data = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.size_bytes,))
    for start in range(0, tensor.size_bytes, _STEP_BYTES):
        yield data[start:start + _STEP_BYTES]


def _difference(a: GgufHeader, tensor_a: TensorInfo, b: GgufHeader, tensor_b: TensorInfo) -> float:
    """The relative difference; infinite where b is zero everywhere and a is not."""
    step = max(1, _STEP_BYTES // tensor_a.type.row_bytes(tensor_a.shape[0]))
    squares, norm = 0.0, 0.0
    for start in range(0, tensor_a.n_rows, step):
        rows = np.arange(start, min(start + step, tensor_a.n_rows))
        x, y = read_rows(a, tensor_a, rows), read_rows(b, tensor_b, rows)
        squares += float(np.sum(np.square(x - y)))
        norm += float(np.sum(np.square(y)))
    if norm == 0:
        return float("inf") if squares else 0.0
    return float(np.sqrt(squares / norm))
