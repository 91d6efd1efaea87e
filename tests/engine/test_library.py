"""Loading the library safely: drifted structs are found, its words are kept."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.core.errors import EnvironmentFault
from quantkit.engine import library
from quantkit.engine.library import BufferSize, LogTap, binding_facts, check_bindings, environment_for_workers


class Struct(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int)]


def drifted(llama_cpp: Any, **changes: Any) -> SimpleNamespace:
    """A binding whose context defaults are changed."""
    def context() -> Any:
        params = llama_cpp.llama_context_default_params()
        for name, value in changes.items():
            setattr(params, name, value)
        return params
    return SimpleNamespace(llama_context_default_params=context, llama_model_default_params=llama_cpp.llama_model_default_params,
                           llama_model_quantize_default_params=llama_cpp.llama_model_quantize_default_params)


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp")


def test_the_pinned_binding_passes(llama_cpp: Any) -> None:
    check_bindings(llama_cpp)
    assert [fact for fact in binding_facts(llama_cpp) if fact.expected != fact.found] == []


def test_a_shifted_field_is_named(llama_cpp: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"expected context.n_batch = 2048, found 512"):
        check_bindings(drifted(llama_cpp, n_batch=512))


def test_a_struct_with_one_field_less_is_named(llama_cpp: Any) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = llama_cpp.llama_model_quantize_params._fields_[:-1]

    binding = drifted(llama_cpp)
    binding.llama_model_quantize_default_params = lambda: ctypes.cast(
        ctypes.pointer(llama_cpp.llama_model_quantize_default_params()), ctypes.POINTER(Shorter)).contents
    facts = {fact.what: fact for fact in binding_facts(llama_cpp)}
    assert facts["sizeof(llama_model_quantize_params)"].found == 64
    assert ctypes.sizeof(Shorter) == 56
    with pytest.raises(AttributeError):
        check_bindings(binding)  # the field that is checked last is the one that is gone


def test_another_version_is_refused(llama_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.3.35")
    with pytest.raises(EnvironmentFault, match=r"expected llama-cpp-python 0\.3\.36, found 0\.3\.35"):
        check_bindings(llama_cpp)


def test_a_foreign_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    with pytest.raises(EnvironmentFault, match="LLAMA_CPP_LIB_PATH points to /somewhere"):
        library.load_library()


def test_a_users_own_setting_is_kept() -> None:
    assert environment_for_workers({"OMP_WAIT_POLICY": "active", "X": "1"}) == {
        "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "active", "OPENBLAS_NUM_THREADS": "1", "X": "1"}


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> LogTap:
    monkeypatch.setattr(os, "write", lambda *_: 0)
    return LogTap()


def test_pieces_of_a_line_are_put_together(tap: LogTap) -> None:
    tap.receive(2, b"loading ")
    tap.receive(5, b"tensors\nsecond")
    tap.receive(2, b" line\n")
    assert list(tap.lines) == ["loading tensors", "second line"]


def test_the_last_error_is_the_librarys_own(tap: LogTap) -> None:
    tap.receive(2, b"fine\n")
    assert tap.last_error() == "fine"
    tap.receive(4, b"cannot open file\n")
    tap.receive(2, b"more\n")
    assert tap.last_error() == "cannot open file"
    tap.forget()
    assert tap.last_error() == "no message"


def test_buffer_sizes_are_read_from_the_log(tap: LogTap) -> None:
    tap.receive(2, b"load_tensors:   CPU_REPACK model buffer size =    1.50 MiB\n")
    tap.receive(2, b"sched_reserve:        CPU compute buffer size =    6.00 MiB\nthe output of buffer sizes\n")
    assert tap.buffers == [BufferSize("CPU_REPACK", "model", 1572864), BufferSize("CPU", "compute", 6291456)]
