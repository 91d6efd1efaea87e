"""Is what was written what was meant? Types, sizes, and the relative error of each tensor's sampled rows.

    relative error = sqrt( Σ (w_q − w)² / Σ w² )        over the sampled rows; 0 is exact, 1 is what a tensor of zeros has

Zero importances zero the weights of K- and I-quants without a word from the library (llama.cpp#20460); a tensor, or 256 columns
of it, that came out as zeros cannot pass: the error is bounded per type, over the tensor and over each run of 256 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.spec.gguf_header import GgufHeader, TensorInfo, read_header
from quantkit.spec.tensor_types import TensorType

Maps = dict[Path, npt.NDArray[np.uint8]]  # files that stay open while many tensors are read

_N_SAMPLED_ROWS = 32
_COLUMNS = 256
_FEW_BITS = {"Q1_0": (1, 2, -1), "Q2_0": (2, 1, -1)}  # bits, and value = scale * (factor * q + offset)

_NEGLIGIBLE = 1e-3  # a run of columns this much smaller than the tensor's average one may be lost: no scale can hold both


class ErrorBound(NamedTuple):
    """The largest relative error of a sound tensor, and of any 256 columns of a matrix in it."""

    tensor: float
    run: float


# Three times the largest error measured on trained weights at 4 bits and more, twice at 3 bits, 1.5 times below (docs/LOG.md,
# benchmarks/tensor_errors.py). 256 columns of zeros have an error of 1; in IQ3_XXS, IQ2_XS and IQ2_S 0.89, 0.76 and 0.71.
BOUNDS: Mapping[str, ErrorBound] = {name: ErrorBound(*bounds) for name, bounds in {
    "F32": (0.0, 0.0), "F16": (0.01, 0.02), "BF16": (0.01, 0.02), "Q8_0": (0.02, 0.02), "Q6_K": (0.07, 0.08), "Q5_K": (0.11, 0.12),
    "Q5_0": (0.17, 0.25), "Q5_1": (0.16, 0.17), "Q4_K": (0.23, 0.24), "Q4_0": (0.30, 0.34), "Q4_1": (0.24, 0.25),
    "IQ4_NL": (0.26, 0.35), "IQ4_XS": (0.26, 0.35), "NVFP4": (0.32, 0.33), "MXFP4": (0.37, 0.38), "Q3_K": (0.36, 0.38),
    "IQ3_S": (0.36, 0.46), "IQ3_XXS": (0.45, 0.53), "Q2_K": (0.50, 0.52), "IQ2_S": (0.49, 0.53), "IQ2_XS": (0.55, 0.58),
    "IQ2_XXS": (0.61, 0.66), "IQ1_M": (0.80, 0.83), "IQ1_S": (0.84, 0.87),
    # made for weights of two or three values, which nothing else has; they use no importances
    "Q2_0": (0.90, 0.95), "Q1_0": (0.85, 0.90), "TQ2_0": (0.95, 0.97), "TQ1_0": (0.95, 0.97),
}.items()}
ERROR_BOUNDS: Mapping[str, float] = {name: bound.tensor for name, bound in BOUNDS.items()}


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
        raise EngineError(f"{target.name}: expected the plan's tensors, found {len(wrong)} others, the first: {wrong[0]}; write "
                          "it again")
    errors: list[TensorError] = []
    maps: Maps = {}
    for tensor in source.tensors:
        if found[tensor.name].shape != tensor.shape:
            raise EngineError(f"{target.name}: expected shape {tensor.shape} for {tensor.name}, found "
                              f"{found[tensor.name].shape}; write it again")
        if found[tensor.name].type.name != tensor.type.name:
            errors.append(measure_error(source, tensor, written, found[tensor.name], maps))
            _check_error(errors[-1])
    return errors


def measure_error(source: GgufHeader, tensor: TensorInfo, written: GgufHeader, quantized: TensorInfo,
                  maps: Maps | None = None) -> TensorError:
    """The relative errors of a tensor: over all sampled rows, and in the worst run of 256 columns of a matrix in it.

    Sampled are 32 rows spread over the tensor, but no fewer than two of each expert.

    Raises:
        EngineError: a weight that is not finite.
    """
    n_matrix = tensor.shape[2] if len(tensor.shape) > 2 else 1
    n_rows = tensor.n_rows // n_matrix
    each = np.unique(np.linspace(0, n_rows - 1, max(2, _N_SAMPLED_ROWS // n_matrix)).astype(np.int64))
    rows = (np.arange(n_matrix)[:, None] * n_rows + each).ravel()
    w = read_rows(source, tensor, rows, maps).reshape(n_matrix, len(each), -1)
    w_q = read_rows(written, quantized, rows, maps).reshape(w.shape)
    if not np.isfinite(w_q).all():
        raise EngineError(f"{tensor.name} holds values that are not finite as {quantized.type.name}: make the file again")
    whole, lost = float(np.sum(w * w)), float(np.sum((w_q - w) ** 2))
    return TensorError(name=tensor.name, type=quantized.type.name, relative_error=float(np.sqrt(lost / whole)) if whole else 0.0,
                       worst_run_error=_worst_run(w, w_q) if whole else 0.0)


def _check_error(error: TensorError) -> None:
    bound = BOUNDS[error.type]
    if error.relative_error > bound.tensor or error.worst_run_error > bound.run:
        raise EngineError(f"{error.name} lost its weights as {error.type}: expected a relative error of at most {bound.tensor} (in "
                          f"any 256 columns {bound.run}), found {error.relative_error:.3f} ({error.worst_run_error:.3f}); zeros "
                          "among its importances do that; collect the matrix again on more text")


def _worst_run(w: npt.NDArray[np.float64], w_q: npt.NDArray[np.float64]) -> float:
    """The largest relative error of 256 columns of a matrix; w and w_q are (n_matrix, n_row, n_column)."""
    starts = np.arange(0, w.shape[2], _COLUMNS)
    of_run = np.add.reduceat(np.sum(w * w, axis=1), starts, axis=1)
    lost = np.add.reduceat(np.sum((w_q - w) ** 2, axis=1), starts, axis=1)
    return float(np.sqrt(np.max(lost / np.maximum(of_run, _NEGLIGIBLE**2 * of_run.mean()))))


def read_rows(header: GgufHeader, tensor: TensorInfo, rows: npt.NDArray[np.int64],
              maps: Maps | None = None) -> npt.NDArray[np.float64]:
    """Some rows of a tensor, dequantized: (n, ne0) float64. Nothing else of the file is read; `maps` keeps it open."""
    row_bytes = tensor.type.row_bytes(tensor.shape[0])
    path = header.parts[tensor.part]
    if maps is None or (part := maps.get(path)) is None:
        part = np.memmap(path, np.uint8, "r").view(np.ndarray)
        if maps is not None:
            maps[path] = part
    data = part[tensor.offset:tensor.offset + tensor.n_rows * row_bytes].reshape(tensor.n_rows, row_bytes)
    return dequantize(data[rows], tensor.type)


def dequantize(raw: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float64]:
    """Rows of bytes as numbers: (n, row_bytes) uint8 to (n, ne0) float64.

    Source: ggml/src/ggml-quants.c, dequantize_row_q1_0 and dequantize_row_q2_0; the others are the gguf library's.
    """
    import gguf

    if kind.name == "F32":
        return raw.view(np.float32).astype(np.float64)
    if kind.name in _FEW_BITS:
        n_bits, factor, offset = _FEW_BITS[kind.name]
        blocks = raw.reshape(len(raw), -1, kind.type_size)
        scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float64)
        shifts = np.arange(0, 8, n_bits, dtype=np.uint8)
        q = (blocks[:, :, 2:, None] >> shifts & (2**n_bits - 1)).reshape(*blocks.shape[:2], kind.block_size)
        few: npt.NDArray[np.float64] = scale * (factor * q.astype(np.float64) + offset)
        return few.reshape(len(raw), -1)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    return values.astype(np.float64)
