"""No file reaches native code before the reader saw its header: by what the source says, and by trying every command."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quantkit.engine
from quantkit.core.errors import GgufError
from quantkit.engine import fit, model, quantizer, smoke, vetted
from quantkit.engine.worker import WorkerState
from quantkit.spec.gguf_header import read_header
from tests.gguf_factory import tiny_gguf, tiny_model

_NATIVE = {"llama_model_load_from_file", "llama_model_load_from_splits", "llama_model_quantize", "Llama", "ModelSettings"}
_STATE = WorkerState()


def test_every_native_call_that_opens_a_file_takes_its_path_from_the_gate() -> None:
    """`native_path(s)` is called in the same function, and nothing outside engine/ opens a model natively."""
    engine = Path(quantkit.engine.__file__).parent
    found: list[str] = []
    for path in sorted(engine.parent.rglob("*.py")):
        text = path.read_text("utf-8")
        if not any(name in text for name in _NATIVE):
            continue
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        inner = {node for function in functions for node in ast.walk(function) if node is not function}
        for function in set(functions) - inner:
            calls = {node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                     for node in ast.walk(function) if isinstance(node, ast.Call)}
            if native := calls & _NATIVE:
                assert path.parent == engine, f"{path}: {native}"
                assert calls & {"native_path", "native_paths"}, f"{path} {function.name}: {native} without the gate"
                found += native
    assert set(found) == _NATIVE


@pytest.mark.parametrize("command", [
    lambda path: model.Model(path),
    lambda path: model.Model(path, vocab_only=True),
    lambda path: model.Model(path, splits=(path, path)),
    lambda path: fit.simulate(_STATE, path, [64], "F16", 64),
    lambda path: fit.require_loadable(_STATE, path),
    lambda path: quantizer.dry_run(_STATE, source=path, ftype=7, imatrix_names=()),
    lambda path: list(quantizer.quantize(_STATE, source=path, target=Path("x"), ftype=7, n_threads=1, patterns={}, imatrix={},
                                         metadata={})),
    lambda path: quantizer.dequantize(_STATE, source=path, target=Path("x"), n_threads=1),
    lambda path: smoke.answer_prompt(_STATE, path=path, prompt="", n_predict=1, n_threads=1),
])
def test_a_file_with_a_damaged_header_never_reaches_the_library(command: Callable[[Path], Any], tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("native code was given the file")

    params = SimpleNamespace()
    lib = SimpleNamespace(llama_model_default_params=lambda: params, llama_max_devices=lambda: 1,
                          **dict.fromkeys(_NATIVE, opened))
    for module in (model, fit, quantizer, smoke):
        monkeypatch.setattr(module, "load_library", lambda: lib)
    monkeypatch.setattr(quantizer, "Arguments", lambda *_, **__: SimpleNamespace(params=params))
    path = tiny_model(tmp_path / "m.gguf")[0]
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 8 + data[16:])  # 2^64 - 1 tensors
    with pytest.raises(GgufError, match="tensors"):
        command(path)


def test_a_header_is_read_once_and_again_when_a_shard_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny_gguf(tmp_path / "m.gguf", {"a": ((32,), "F32"), "b": ((32,), "F32")}, n_part=2)
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return real(path)

    real = read_header
    monkeypatch.setattr(vetted, "read_header", counted)
    for _ in range(3):
        assert vetted.native_path(parts[0]) == os.fsencode(parts[0])
    assert read == [parts[0]]
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    with pytest.raises(GgufError, match="ends at byte"):
        vetted.native_path(parts[0])
    assert len(read) == 2


def test_files_that_make_up_one_model_are_judged_each_by_itself(tmp_path: Path) -> None:
    one = tiny_gguf(tmp_path / "one.gguf", {"a": ((32,), "F32")})[0]
    two = tiny_gguf(tmp_path / "two.gguf", {"b": ((32,), "F32")})[0]
    assert vetted.native_paths([one, two]) == [os.fsencode(one), os.fsencode(two)]
    two.write_bytes(b"GGUF")
    with pytest.raises(GgufError, match=r"two\.gguf"):
        vetted.native_paths([one, two])
