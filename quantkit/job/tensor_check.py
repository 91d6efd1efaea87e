"""Is what was written what was meant? Types, sizes, and the relative error of each tensor's sampled rows.

    relative error = sqrt( Σ (w_q − w)² / Σ w² )        over the sampled rows; 0 is exact, 1 is what a tensor of zeros has

Zero importances zero the weights of K- and I-quants without a word from the library (llama.cpp#20460); a tensor, or 256 columns
of it, that came out as zeros cannot pass: the error is bounded per type, over the tensor and over each run of 256 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.spec.gguf_header import GgufHeader, TensorInfo, read_header

_N_SAMPLED_ROWS = 32
_COLUMNS = 256

# About three times the error of normally distributed weights without importances, at most 0.9: heavy tails and importances
# raise it, zeros bring it to 1. Measured figures: docs/LOG.md.
ERROR_BOUNDS: Mapping[str, float] = {
    "F32": 0.0, "F16": 0.01, "BF16": 0.02, "Q8_0": 0.03, "Q6_K": 0.08, "Q5_K": 0.15, "Q5_0": 0.18, "Q5_1": 0.15, "Q4_K": 0.3,
    "Q4_0": 0.35, "Q4_1": 0.3, "IQ4_NL": 0.3, "IQ4_XS": 0.3, "Q3_K": 0.5, "IQ3_S": 0.5, "IQ3_XXS": 0.6, "MXFP4": 0.5,
}
_BOUND_BELOW_3_BITS = 0.9
_BOUND_OF_A_RUN = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Relative error of a tensor's sampled rows, over all columns and in the worst run of 256 columns."""

    name: str
    type: str
    relative_error: float
    worst_run_error: float


def check_quantized(source: GgufHeader, target: Path, expected_types: Mapping[str, str]) -> list[TensorError]:
    """Validate a written file against its plan and its source.

    Args:
        source: the base's header.
        target: the new file.
        expected_types: tensor name to type, for every tensor.

    Returns:
        The error of every tensor whose type changed.

    Raises:
        GgufError: the header is not sound (a zero header, offsets out of bounds).
        EngineError: tensors, shapes or types other than planned; values that are not finite; an error above its bound.
    """
    written = read_header(target)
    found = {tensor.name: tensor for tensor in written.tensors}
    wrong = [f"{name} {found[name].type.name if name in found else 'missing'} instead of {type_}"
             for name, type_ in expected_types.items() if name not in found or found[name].type.name != type_]
    wrong += [f"{name} is not planned" for name in found if name not in expected_types]
    if wrong:
        raise EngineError(f"{target.name}: expected the plan's tensors, found {len(wrong)} others, the first: {wrong[0]}")
    errors = []
    for tensor in source.tensors:
        if found[tensor.name].shape != tensor.shape:
            raise EngineError(f"{target.name}: expected shape {tensor.shape} for {tensor.name}, found {found[tensor.name].shape}")
        if found[tensor.name].type.name != tensor.type.name:
            errors.append(_measure(source, tensor, written, found[tensor.name]))
    return errors


def _measure(source: GgufHeader, tensor: TensorInfo, written: GgufHeader, quantized: TensorInfo) -> TensorError:
    rows = np.unique(np.linspace(0, tensor.n_rows - 1, _N_SAMPLED_ROWS).astype(np.int64))
    w, w_q = read_rows(source, tensor, rows), read_rows(written, quantized, rows)
    if not np.isfinite(w_q).all():
        raise EngineError(f"{tensor.name} holds values that are not finite as {quantized.type.name}")
    error = _relative_error(w_q - w, w)
    starts = range(0, w.shape[1], _COLUMNS)
    worst = max(_relative_error(w_q[:, i:i + _COLUMNS] - w[:, i:i + _COLUMNS], w[:, i:i + _COLUMNS]) for i in starts)
    bound = ERROR_BOUNDS.get(quantized.type.name, _BOUND_BELOW_3_BITS)
    if error > bound or worst > _BOUND_OF_A_RUN:
        raise EngineError(f"{tensor.name} lost its weights as {quantized.type.name}: expected a relative error of at most {bound} "
                          f"(in any 256 columns {_BOUND_OF_A_RUN}), found {error:.3f} ({worst:.3f}); zeros among its importances "
                          "do that")
    return TensorError(name=tensor.name, type=quantized.type.name, relative_error=error, worst_run_error=worst)


def _relative_error(difference: npt.NDArray[np.float64], w: npt.NDArray[np.float64]) -> float:
    norm = float(np.sqrt(np.sum(w * w)))
    return float(np.sqrt(np.sum(difference * difference))) / norm if norm > 0 else 0.0


def read_rows(header: GgufHeader, tensor: TensorInfo, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Some rows of a tensor, dequantized: (n, ne0) float64. Nothing else of the file is read."""
    import gguf

    row_bytes = tensor.type.row_bytes(tensor.shape[0])
    data = np.memmap(header.parts[tensor.part], np.uint8, "r", tensor.offset, (tensor.n_rows, row_bytes))
    raw = np.ascontiguousarray(data[rows])
    if tensor.type.name == "F32":
        return raw.view(np.float32).astype(np.float64)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.type.id))
    return values.astype(np.float64)
