"""llama.cpp as a library: loading it safely, catching what it says, and the facts of this build.

Runs in worker processes only; the parent never imports this module's callers. Leaves out everything about models.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import EnvironmentFault
from quantkit.core.units import MIB

PINNED_VERSION = "0.3.36"

# Set before native code loads: an abort must not spawn a debugger, waiting threads must not spin, and numpy's own threads
# must not compete with llama.cpp's.
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}

_BUFFER_LINE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output)\s+buffer size\s*=\s*([0-9.]+) MiB")
_DEBUG, _WARN, _ERROR, _CONT = 1, 3, 4, 5  # ggml_log_level


class Expected(NamedTuple):
    """One default value or size that tells whether the ctypes structs follow the library."""

    what: str
    expected: int
    found: int


class BufferSize(NamedTuple):
    """One line of the library's own memory account."""

    device: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What the arithmetic depends on besides the files: part of every result."""

    backend: str
    llama_cpp_python: str
    llama_cpp_commit: str
    system_info: str


class LogTap:
    """Receives llama.cpp's log: every line goes to file descriptor 2, the last ones and the errors are kept.

    The library's C callback may come from any of its threads.
    """

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=400)
        self.errors: collections.deque[str] = collections.deque(maxlen=20)
        self.buffers: list[BufferSize] = []
        self.all_lines: list[str] | None = None
        self._partial = ""
        self._level = 0

    def receive(self, level: int, text: bytes | None) -> None:
        """Take one piece of log text; pieces of level 5 continue the line before, debug text is dropped."""
        if level != _CONT:
            self._level = level
        if text is None or self._level == _DEBUG:
            return
        with contextlib.suppress(OSError):  # a full disk under the log takes its text, not what is read from it here
            os.write(2, text)
        self._partial += text.decode(errors="replace")
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            self._keep(line)

    def _keep(self, line: str) -> None:
        if not line.strip(" ."):
            return
        self.lines.append(line)
        if self.all_lines is not None:
            self.all_lines.append(line)
        if self._level == _ERROR or (self._level == _WARN and "failed" in line):
            self.errors.append(line.strip())
        if match := _BUFFER_LINE.search(line):
            self.buffers.append(BufferSize(match[1], match[2], int(float(match[3]) * MIB)))

    def last_error(self) -> str:
        """The library's own words about the last failure, or its last line."""
        if self.errors:
            return " / ".join(line for line in list(self.errors)[-3:])
        return self.lines[-1].strip() if self.lines else "no message"

    def forget(self) -> None:
        """Start a new command with a clean slate."""
        self.lines.clear()
        self.errors.clear()
        self.buffers.clear()


tap = LogTap()
_callback: Any = None


def load_library() -> Any:
    """Import llama_cpp, check that its structs are the pinned version's, route its log to `tap`; returns the module.

    Raises:
        EnvironmentFault: another version, a foreign libllama, or structs that do not fit the library.
    """
    global _callback
    if path := os.environ.get("LLAMA_CPP_LIB_PATH"):
        raise EnvironmentFault(f"expected the libllama inside llama-cpp-python {PINNED_VERSION}, but LLAMA_CPP_LIB_PATH points "
                               f"to {path}, whose structs may differ: unset it")
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentFault(f"llama-cpp-python {PINNED_VERSION} cannot be loaded ({error}): install it again") from error
    if _callback is None:
        check_bindings(llama_cpp)
        _callback = llama_cpp.llama_log_callback(lambda level, text, _: tap.receive(level, text))
        llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
    return llama_cpp


def check_bindings(llama_cpp: Any) -> None:
    """Compare the binding with what the pinned version is known to have: version, struct sizes, default values.

    A struct that drifted by one field still loads, and shifts every later value; the defaults show it.

    Raises:
        EnvironmentFault: names the first value that differs.
    """
    version = importlib.metadata.version("llama-cpp-python")
    if version != PINNED_VERSION:
        raise EnvironmentFault(f"expected llama-cpp-python {PINNED_VERSION}, found {version}: its structs follow one llama.cpp "
                               f"commit; install the pinned version")
    for check in binding_facts(llama_cpp):
        if check.expected != check.found:
            raise EnvironmentFault(f"llama-cpp-python does not fit its library: expected {check.what} = {check.expected}, "
                                   f"found {check.found}; install llama-cpp-python {PINNED_VERSION} again")


def binding_facts(llama_cpp: Any) -> list[Expected]:
    """Sizes and defaults of the pinned version beside those found.

    Source: `*_default_params()` in src/llama-model.cpp, llama-context.cpp and llama-quant.cpp of the pinned commit.
    """
    model = llama_cpp.llama_model_default_params()
    context = llama_cpp.llama_context_default_params()
    quantize = llama_cpp.llama_model_quantize_default_params()
    n_types = 43  # GGML_TYPE_COUNT: "unset"
    return [
        Expected("sizeof(llama_model_params)", 80, ctypes.sizeof(model)),
        Expected("sizeof(llama_context_params)", 160, ctypes.sizeof(context)),
        Expected("sizeof(llama_model_quantize_params)", 64, ctypes.sizeof(quantize)),
        Expected("model.use_extra_bufts", 1, int(model.use_extra_bufts)),
        Expected("model.load_mtp", 0, int(model.load_mtp)),
        Expected("model.n_gpu_layers", -1, model.n_gpu_layers),
        Expected("context.n_ctx", 512, context.n_ctx),
        Expected("context.n_batch", 2048, context.n_batch),
        Expected("context.n_ubatch", 512, context.n_ubatch),
        Expected("context.type_k", 1, context.type_k),
        Expected("context.offload_kqv", 1, int(context.offload_kqv)),
        Expected("context.kv_unified", 0, int(context.kv_unified)),
        Expected("quantize.ftype", 7, quantize.ftype),
        Expected("quantize.output_tensor_type", n_types, quantize.output_tensor_type),
        Expected("quantize.token_embedding_type", n_types, quantize.token_embedding_type),
        Expected("quantize.quantize_output_tensor", 1, int(quantize.quantize_output_tensor)),
        Expected("quantize.max_buf_size", 8 << 30, quantize.max_buf_size),
    ]


def build_facts(llama_cpp: Any, n_gpu_layers: int = 0) -> BuildFacts:
    """The build and the CPU features it uses, as the library itself tells them."""
    info = " ".join(llama_cpp.llama_print_system_info().decode().split())
    offload = bool(llama_cpp.llama_supports_gpu_offload()) and n_gpu_layers != 0
    return BuildFacts(backend="GPU" if offload else "CPU", llama_cpp_python=PINNED_VERSION,
                      llama_cpp_commit=ggml_base(llama_cpp).ggml_commit().decode().removesuffix("-dirty"),
                      system_info=info.strip(" |"))


def ggml_base(llama_cpp: Any) -> Any:
    """The library under libllama, with the few functions that llama_cpp does not bind, typed.

    Raises:
        EnvironmentFault: it is not beside libllama.
    """
    folder = Path(llama_cpp.__file__).parent / "lib"
    found = [path for path in sorted(folder.glob("*ggml-base*")) if path.suffix in {".so", ".dylib", ".dll"}]
    if not found:
        raise EnvironmentFault(f"expected libggml-base in {folder}, found none: install llama-cpp-python {PINNED_VERSION} again")
    library = ctypes.CDLL(str(found[0]))
    library.ggml_commit.restype = ctypes.c_char_p
    library.ggml_op_name.restype = ctypes.c_char_p
    library.ggml_op_name.argtypes = [ctypes.c_int]
    library.ggml_backend_buffer_is_host.restype = ctypes.c_bool
    library.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
    library.ggml_backend_tensor_get.restype = None
    library.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return library


def environment_for_workers(base: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker starts with; a user's own setting of one of ours is kept."""
    return {**ENVIRONMENT, **base}
