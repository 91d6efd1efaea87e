"""The call to `llama_model_quantize`, and its dry run. Worker processes only.

The library writes a zero header first and the real one last, so callers give a temporary path, validate, then rename.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.library import load_library, tap
from quantkit.engine.vetted import native_path
from quantkit.engine.worker import WorkerState

_PROGRESS_POLL_S = 0.1
_TENSOR_LINE = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-\s+\[.*?\],\s+type\s+=\s+(\S+),\s+size\s+=.*?(?:\((\S+)\))?$")
_KV_INT, _KV_STR = 0, 3  # llama_model_kv_override_type
_KV_STR_BYTES = 127
_ALL_F32 = 0  # llama_ftype


class QuantizeProgress(NamedTuple):
    """How far a quantization is."""

    n_done: int
    n_tensors: int


class Arguments:
    """`llama_model_quantize_params` with the arrays it points to, kept alive together; every array ends with its terminator."""

    def __init__(self, lib: Any, *, ftype: int, n_threads: int, patterns: Mapping[str, int],
                 imatrix: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, int | str]) -> None:
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = ftype, n_threads
        fields = dict(type(params)._fields_)
        self._overrides = (lib.llama_model_tensor_override * (len(patterns) + 1))()
        for slot, (pattern, type_id) in zip(self._overrides, patterns.items(), strict=False):
            slot.pattern, slot.type = pattern.encode(), type_id
        if patterns:
            params.tt_overrides = ctypes.cast(self._overrides, fields["tt_overrides"])
        self._values = {name: np.ascontiguousarray(values, np.float32) for name, values in imatrix.items()}
        self._imatrix = (lib.llama_model_imatrix_data * (len(imatrix) + 1))()
        for slot, (name, values) in zip(self._imatrix, self._values.items(), strict=False):
            slot.name, slot.size = name.encode(), values.size
            slot.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if imatrix:
            params.imatrix = ctypes.cast(self._imatrix, fields["imatrix"])
        self._metadata = (lib.llama_model_kv_override * (len(metadata) + 1))()
        for slot, (key, value) in zip(self._metadata, metadata.items(), strict=False):
            _set_override(slot, key, value)
        if metadata:
            params.kv_overrides = ctypes.cast(self._metadata, fields["kv_overrides"])
        self.params = params


def _set_override(slot: Any, key: str, value: int | str) -> None:
    slot.key = key.encode()
    if isinstance(value, int):
        if not 0 <= value < 2**32:
            raise InputError(f"metadata {key}: expected 0 <= value < 2^32 (the library stores 32 bits), got {value}: choose a "
                             "smaller one")
        slot.tag, slot.value.val_i64 = _KV_INT, value
        return
    raw = value.encode()
    if len(raw) > _KV_STR_BYTES:
        raise InputError(f"metadata {key}: expected at most {_KV_STR_BYTES} bytes, got {len(raw)}: shorten it")
    slot.tag, slot.value.val_str = _KV_STR, raw


def dry_run(state: WorkerState, *, source: Path, ftype: int, imatrix_names: tuple[str, ...]) -> dict[str, str]:
    """Command: the types that llama.cpp's own mix gives every tensor, by asking it; writes no file.

    Args:
        imatrix_names: the entries that an imatrix would have; some mixes differ with one (`has_imatrix`).

    Returns:
        Tensor name to tensor type, in upper case as in TENSOR_TYPES.

    Raises:
        EngineError: the library refused; or its log could not be read completely.
    """
    lib = load_library()
    one = np.ones(1, np.float32)
    arguments = Arguments(lib, ftype=ftype, n_threads=1, patterns={}, imatrix=dict.fromkeys(imatrix_names, one), metadata={})
    arguments.params.dry_run = True
    tap.all_lines = []
    try:
        status = lib.llama_model_quantize(native_path(source), b"", ctypes.byref(arguments.params))
        lines = tap.all_lines
    finally:
        tap.all_lines = None
    if status != 0:
        raise EngineError(f"llama.cpp cannot plan {source.name}: {tap.last_error()}; convert the model again")
    found, n_tensors = {}, -1
    for line in lines:
        if match := _TENSOR_LINE.match(line):
            n_tensors = int(match[2])
            found[match[3]] = (match[5] or match[4]).upper()
    if len(found) != n_tensors:
        raise EngineError(f"expected {n_tensors} tensors in the log of llama.cpp's dry run, read {len(found)}: run it again")
    return found


def quantize(state: WorkerState, *, source: Path, target: Path, ftype: int, n_threads: int, patterns: Mapping[str, int],
             imatrix: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, int | str]) -> Iterator[QuantizeProgress]:
    """Command: write a quantized file; yields progress about ten times a second.

    Args:
        source: the unquantized GGUF, or the first part of a split one.
        target: a temporary path that nobody reads yet.
        patterns: one anchored regular expression per tensor, to the id of its type.
        imatrix: tensor name to (ne0 * n_expert,) float32 importances, finite and above zero.
        metadata: keys to add to the header.

    Raises:
        EngineError: the library's own words.
    """
    lib = load_library()
    arguments = Arguments(lib, ftype=ftype, n_threads=n_threads, patterns=patterns, imatrix=imatrix, metadata=metadata)
    status: list[int] = []
    vetted = native_path(source)  # here: an error in the thread would be lost

    def run() -> None:
        status.append(lib.llama_model_quantize(vetted, os.fsencode(target), ctypes.byref(arguments.params)))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        thread.join(_PROGRESS_POLL_S)
        if (progress := _read_progress()) is not None:
            yield progress
    if status != [0]:
        raise EngineError(f"llama.cpp cannot quantize {source.name}: {tap.last_error()}; read the step's log")


def dequantize(state: WorkerState, *, source: Path, target: Path, n_threads: int) -> None:
    """Command: write a file with every weight as F32, by llama.cpp's own conversion, which is exact for every type.

    Args:
        source: any GGUF, or the first part of a split one.
        target: a temporary path that nobody reads yet.

    Raises:
        EngineError: the library's own words.
    """
    lib = load_library()
    arguments = Arguments(lib, ftype=_ALL_F32, n_threads=n_threads, patterns={}, imatrix={}, metadata={})
    arguments.params.allow_requantize = True
    if lib.llama_model_quantize(native_path(source), os.fsencode(target), ctypes.byref(arguments.params)) != 0:
        raise EngineError(f"llama.cpp cannot write {source.name} as F32: {tap.last_error()}; read the step's log")


def _read_progress() -> QuantizeProgress | None:
    for line in reversed(tap.lines):
        if match := re.match(r"^\[\s*(\d+)/\s*(\d+)\]", line):
            return QuantizeProgress(int(match[1]), int(match[2]))
    return None
