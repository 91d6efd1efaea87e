"""Relative errors of tensors in every type: what `job/tensor_check.py` takes for sound, and what it must catch.

usage: python benchmarks/tensor_errors.py MODEL.gguf IMATRIX.gguf [--blocks 0,3] [--types Q4_K,IQ2_S]

All matrices of some blocks are quantized to one type after another, the rest stays as it is. Columns: the largest error of a tensor
and of any 256 columns of a matrix, over the tensors, with the importances and (where the type allows) without; `zeroed` is the
smallest error over the tensors of their worst 256 columns when the first 256 importances are 0 and nobody notices.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import quantize
from quantkit.job.evaluation import n_cores
from quantkit.job.tensor_check import measure_error
from quantkit.spec.blocks import block_of
from quantkit.spec.gguf_header import GgufHeader, TensorInfo, read_header
from quantkit.spec.imatrix_file import floored, read_imatrix
from quantkit.spec.quantizable import WRITABLE_TYPES, is_quantizable
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

Importances = Mapping[str, npt.NDArray[np.float32]]
_ZEROED = 256


class Errors(NamedTuple):
    """Over some tensors: the largest error of one, the largest and the smallest of a tensor's worst 256 columns."""

    tensor: float
    run: float
    least_run: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("imatrix", type=Path)
    parser.add_argument("--blocks", default="0,3,4", help="blocks whose matrices are quantized")
    parser.add_argument("--types", default="", help="tensor types; all that quantize if empty")
    arguments = parser.parse_args()
    header = read_header(arguments.model)
    blocks = {int(block) for block in arguments.blocks.split(",")}
    architecture = str(header.metadata["general.architecture"])
    chosen = [t for t in header.tensors if block_of(t.name) in blocks and is_quantizable(t.name, t.shape, architecture)]
    matrix = read_imatrix(arguments.imatrix)
    values = {t.name: floored(matrix.entries[t.name], 0.001).values for t in chosen if t.name in matrix.entries}
    names = arguments.types.split(",") if arguments.types else sorted(
        (name for name in WRITABLE_TYPES if TENSOR_TYPES[name].is_quantized), key=lambda n: -bits(n))
    print("| type | bpw | tensors | tensor | run | tensor, no imatrix | run, no imatrix | zeroed |")
    print("| --- " + "| ---: " * 7 + "|")
    with WorkerPool(1) as pool:
        for name in names:
            own = [t for t in chosen if t.shape[0] % TENSOR_TYPES[name].block_size == 0]
            if own:
                print_row(pool, header, name, own, values)


def print_row(pool: WorkerPool, header: GgufHeader, name: str, tensors: list[TensorInfo], values: Importances) -> None:
    """Measure one type."""
    used = {t.name: values[t.name] for t in tensors if t.name in values}
    errors = errors_of(pool, header, name, tensors, used)
    plain = None if TENSOR_TYPES[name].needs_imatrix else errors_of(pool, header, name, tensors, {})
    zeros = {t.name: zeroed(values[t.name], t.shape[0]) for t in tensors if t.name in used}
    lost = errors_of(pool, header, name, [t for t in tensors if t.name in zeros], zeros)
    cells = [name, f"{bits(name):.2f}", str(len(tensors)), f"{errors.tensor:.4f}", f"{errors.run:.4f}",
             f"{plain.tensor:.4f}" if plain else "", f"{plain.run:.4f}" if plain else "", f"{lost.least_run:.4f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def bits(name: str) -> float:
    """Bits per weight of a type."""
    return 8 * TENSOR_TYPES[name].type_size / TENSOR_TYPES[name].block_size


def zeroed(values: npt.NDArray[np.float32], n_column: int) -> npt.NDArray[np.float32]:
    """Importances whose first 256 columns were never hit."""
    out = values.reshape(-1, n_column).copy()
    out[:, :_ZEROED] = 0
    return out.ravel()


def errors_of(pool: WorkerPool, header: GgufHeader, name: str, tensors: list[TensorInfo], values: Importances) -> Errors:
    """Quantize some tensors to a type and measure them."""
    kept = {t.name for t in header.tensors} - {t.name for t in tensors}
    types = {t.name: t.type.id for t in header.tensors if t.name in kept} | dict.fromkeys((t.name for t in tensors),
                                                                                         TENSOR_TYPES[name].id)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "q.gguf"
        pool.call(f"quantize {name}", quantize, source=header.parts[0], target=target, ftype=FTYPES["Q8_0"].id, n_threads=n_cores(),
                  patterns={f"^{n.replace('.', chr(92) + '.')}$": i for n, i in types.items()}, imatrix=values, metadata={})
        written = read_header(target)
        found = {t.name: t for t in written.tensors}
        measured = [measure_error(header, t, written, found[t.name]) for t in tensors]
    runs = [error.worst_run_error for error in measured]
    return Errors(max(error.relative_error for error in measured), max(runs), min(runs))


if __name__ == "__main__":
    main()
