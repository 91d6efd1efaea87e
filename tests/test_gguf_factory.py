"""The factory's models are real enough for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gguf_factory import tiny_model


def test_equal_calls_give_equal_bytes(tmp_path: Path) -> None:
    (a,), (b,) = tiny_model(tmp_path / "a.gguf"), tiny_model(tmp_path / "b.gguf")
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.engine
@pytest.mark.parametrize("arguments", [{}, {"tied": True, "add_bos": True}, {"n_expert": 4}, {"n_embd": 288}, {"n_part": 3},
                                       {"type_name": "Q4_0"}], ids=str)
def test_models_load(tmp_path: Path, arguments: dict[str, Any]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tiny_model(tmp_path / "m.gguf", **arguments)[0]
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    tokens = model.tokenize(b"ab")
    model.eval(tokens)
    assert (260, len(tokens)) == (model.n_vocab(), model.n_tokens)
    assert (tokens[0] == 256) is bool(arguments.get("add_bos"))
    model.close()
