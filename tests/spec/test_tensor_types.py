"""The tables agree with gguf's, with the library's own words, and with each other."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import pytest

from quantkit.spec.tensor_types import FALLBACKS, FTYPES, FTYPES_BY_ID, TENSOR_TYPES, TENSOR_TYPES_BY_ID

# ggml's block_q8_1 holds two halves (36 bytes); gguf's table still counts the two floats of old (40). No file stores Q8_1.
_GGUF_IS_WRONG = {"Q8_1"}


def test_types_equal_gguf() -> None:
    expected = {t.name: (int(t), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType if t.name not in _GGUF_IS_WRONG}
    actual = {t.name: (t.id, t.block_size, t.type_size) for t in TENSOR_TYPES.values()}
    assert expected == {name: actual[name] for name in expected}
    assert {"Q2_0"} | _GGUF_IS_WRONG >= actual.keys() - expected.keys()


def test_ftypes_equal_gguf() -> None:
    names = {t.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(t) for t in gguf.LlamaFileType if t.name != "GUESSED"}
    actual = {f.name: f.id for f in FTYPES.values()}
    assert names == {name: actual[name] for name in names}
    assert {"Q2_0"} >= actual.keys() - names.keys()


@pytest.mark.engine
def test_types_equal_the_library() -> None:
    """The loaded ggml prints every type's name, block and bytes; a library update that moves one fails here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = Path(llama_cpp.__file__).parent / "lib"
    ggml = ctypes.CDLL(str(next(folder.glob("*ggml-base.*"))))
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_is_quantized.restype = ctypes.c_bool
    expected = {}
    for id_ in range(43):
        if block := ggml.ggml_blck_size(id_):
            name = ggml.ggml_type_name(id_).decode().upper()
            expected[id_] = (name, block, ggml.ggml_type_size(id_), ggml.ggml_is_quantized(id_))
    actual = {t.id: (t.name, t.block_size, t.type_size, t.is_quantized) for t in TENSOR_TYPES.values()}
    assert expected == actual


def test_ids_are_unique() -> None:
    assert len(TENSOR_TYPES) == len(TENSOR_TYPES_BY_ID)
    assert len(FTYPES) == len(FTYPES_BY_ID)
    assert (TENSOR_TYPES_BY_ID[8].name, FTYPES_BY_ID[8].name) == ("Q8_0", "Q5_0")


def test_default_types_exist() -> None:
    assert {"NVFP4"} == {f.name for f in FTYPES.values() if f.default_type not in TENSOR_TYPES}


def test_fallbacks_have_a_smaller_block() -> None:
    for name, fallback in FALLBACKS.items():
        assert TENSOR_TYPES[fallback].block_size < TENSOR_TYPES[name].block_size


def test_row_bytes() -> None:
    assert TENSOR_TYPES["Q4_K"].row_bytes(512) == 288
    assert TENSOR_TYPES["BF16"].row_bytes(3) == 6
    with pytest.raises(ValueError, match="divisible by 256 for Q6_K, got 288"):
        TENSOR_TYPES["Q6_K"].row_bytes(288)
