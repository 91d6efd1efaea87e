"""What a weight of each type costs to make, on one thread: the table of `quantkit/job/quantize_cost.py`.

usage: python benchmarks/quantize_types.py [--rows 64] [--columns 2048] [--repeats 3]

Normal weights and random importances go through ggml_quantize_chunk, the library's own loop; the best of some repeats counts.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import numpy as np

from quantkit.job.quantize_cost import NS_A_WEIGHT
from quantkit.spec.quantizable import WRITABLE_TYPES
from quantkit.spec.tensor_types import TENSOR_TYPES


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    import llama_cpp

    lib = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.rglob("libggml-base.so"))))
    lib.ggml_quantize_init.argtypes = [ctypes.c_int]
    quantize, pointer, n = lib.ggml_quantize_chunk, ctypes.c_void_p, ctypes.c_int64
    quantize.restype, quantize.argtypes = ctypes.c_size_t, [ctypes.c_int, pointer, pointer, n, n, n, pointer]
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((args.rows, args.columns)) * 0.02).astype(np.float32)
    importances = np.abs(rng.standard_normal(args.columns)).astype(np.float32) + np.float32(0.1)
    out = np.zeros(weights.nbytes, np.uint8)
    print("| type | ns a weight | in the table |\n| :--- | ---: | ---: |")
    found = {}
    for name in WRITABLE_TYPES:
        kind = TENSOR_TYPES[name]
        lib.ggml_quantize_init(kind.id)
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            quantize(kind.id, weights.ctypes.data, out.ctypes.data, 0, args.rows, args.columns, importances.ctypes.data)
            times.append(time.perf_counter() - start)
        found[name] = min(times) / weights.size * 1e9
    for name, ns in sorted(found.items(), key=lambda item: -item[1]):
        print(f"| {name} | {ns:.1f} | {NS_A_WEIGHT.get(name, '')} |")


if __name__ == "__main__":
    main()
