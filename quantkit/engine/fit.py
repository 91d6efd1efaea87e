"""Memory of a context as llama.cpp itself counts it, without allocating weights or cache. Worker processes only.

`no_alloc` builds the model and the context with empty buffers; it aborts under the default mmap mode and works with `load_mode`
NONE. The sizes are read from the log: the cache's own buffers are empty then and say 0, so its summary line is taken instead.

    llama_kv_cache: size = 2048.00 MiB ( 32768 cells,  16 layers,  1/1 seqs), K (f16): ...
    llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers, ...
    sched_reserve:        CPU compute buffer size =   515.00 MiB
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.core.errors import EngineError, GgufError
from quantkit.core.units import MIB
from quantkit.engine.library import load_library, tap
from quantkit.engine.vetted import native_path
from quantkit.engine.worker import WorkerState
from quantkit.spec.memory_fit import ContextMemory
from quantkit.spec.tensor_types import TENSOR_TYPES

_CACHE_LINE = re.compile(r"^llama_(kv_cache|memory_recurrent)[a-z0-9_]*: size =\s*([0-9.]+) MiB \(")
_STATE_LINE = re.compile(r" state buffer size =\s*([0-9.]+) MiB")
_LOAD_MODE_NONE = 0


def simulate(state: WorkerState, path: Path, n_ctx: Sequence[int], kv_type: str, n_ubatch: int) -> list[ContextMemory]:
    """Command: the memory of contexts of some lengths, one sequence, flash attention on, as this build would allocate it.

    Args:
        path: a GGUF, or the first part of a split one; its tensors are not read.
        kv_type: of keys and values.

    Raises:
        EngineError: the library refuses the file or the context.
    """
    state.close()
    lib = load_library()
    model = _load_empty(lib, path)
    if not model:
        raise EngineError(f"llama.cpp cannot simulate {path}: {tap.last_error()}; make or fetch the file again")
    try:
        return [_simulate_context(lib, model, path, n, kv_type, n_ubatch) for n in n_ctx]
    finally:
        lib.llama_model_free(model)


def require_loadable(state: WorkerState, path: Path) -> None:
    """Command: let the library read a model's header and tensor table as it would to run it; takes no memory for tensors.

    A tensor too many or too few is noticed by nobody else: the library quantizes such a file and refuses the result.

    Raises:
        GgufError: it would not load; holds the library's words.
    """
    state.close()
    lib = load_library()
    model = _load_empty(lib, path)
    if not model:
        raise GgufError(f"{path}: llama.cpp cannot load it ({tap.last_error()}): convert the model again, with the converter that "
                        "belongs to this llama.cpp")
    lib.llama_model_free(model)


def _load_empty(lib: Any, path: Path) -> Any:
    """A model without weights; null where the library refuses the file."""
    params = lib.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = _LOAD_MODE_NONE
    params.n_gpu_layers = 0
    return lib.llama_model_load_from_file(native_path(path), params)


def _simulate_context(lib: Any, model: Any, path: Path, n_ctx: int, kv_type: str, n_ubatch: int) -> ContextMemory:
    params = lib.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_ubatch = n_ubatch
    params.n_seq_max = 1
    params.type_k = params.type_v = TENSOR_TYPES[kv_type].id
    params.flash_attn_type = 1
    tap.forget()
    tap.all_lines = []
    context = lib.llama_init_from_model(model, params)
    lines, tap.all_lines = tap.all_lines, None
    if not context:
        raise EngineError(f"llama.cpp cannot simulate a context of {n_ctx} tokens with a {kv_type} cache for {path}: "
                          f"{tap.last_error()}; choose a shorter context or another cache type")
    compute = sum(b.size_bytes for b in tap.buffers if b.kind in {"compute", "output"})
    lib.llama_free(context)
    kv, recurrent = read_cache_sizes(lines)
    return ContextMemory(n_ctx=n_ctx, kv_type=kv_type, kv_bytes=kv, recurrent_bytes=recurrent, compute_bytes=compute,
                         source="llama.cpp")


def read_cache_sizes(lines: Sequence[str]) -> tuple[int, int]:
    """Bytes of the KV caches and of the recurrent states, from llama.cpp's log; each to 0.01 MiB, as it prints them."""
    sizes = {"kv_cache": 0.0, "memory_recurrent": 0.0}
    for line in lines:
        if match := _CACHE_LINE.search(line):
            sizes[match[1]] += float(match[2])
        elif match := _STATE_LINE.search(line):
            sizes["kv_cache"] += float(match[1])
    return round(sizes["kv_cache"] * MIB), round(sizes["memory_recurrent"] * MIB)
