"""The kinds of values that protocol keys hold: names, counts, shares, tensor types, layers. Each has words for a message."""

from __future__ import annotations

from typing import Annotated, Literal

from quantkit.spec.layers import is_layers
from quantkit.spec.tensor_types import FTYPES
from quantkit.spec.toml_records import Check, above, between, one_of

INT_MAX = 2**31 - 1  # llama.cpp's own counts are 32-bit

_MIXES = {f.name: f.default_type for f in FTYPES.values() if f.default_type}
_WRITABLE = set(_MIXES.values())  # what llama_model_quantize can write: not Q8_1 or Q8_K, which exist in memory only
_UNQUANTIZED = {"F32", "F16", "BF16"}


def _is_file_name(text: str) -> bool:
    return 0 < len(text.encode()) <= 200 and text.isprintable() and text[0] != "." and not set("/\\") & set(text)


def _is_word(text: str) -> bool:
    return 0 < len(text) <= 100 and text.isascii() and text[0].isalnum() and all(c.isalnum() or c in "._-" for c in text)


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


Count = Annotated[int, between(1, INT_MAX)]
CountOrZero = Annotated[int, between(0, INT_MAX)]
Seed = Annotated[int, between(0, 2**32 - 1)]
Share = Annotated[float, between(0, 1)]
Positive = Annotated[float, above(0, INT_MAX)]
Alpha = Annotated[float, above(0, 0.5)]
Word = Annotated[str, Check("letters, digits, '.', '_' and '-', at most 100 of them", _is_word)]
FileName = Annotated[str, Check("a file name without folders, at most 200 bytes", _is_file_name)]
Sha256 = Annotated[str, Check("a sha256 of 64 lower-case hex digits", _is_sha256)]
Glob = Annotated[str, Check("a glob over the full tensor name, at most 200 characters", lambda text: 0 < len(text) <= 200)]
Layers = Annotated[str, Check("'', a block such as '7', a range such as '0-3', 'first 1/8' or 'last 1/8'", is_layers)]
TypeName = Annotated[str, one_of(_WRITABLE, "a tensor type that llama.cpp can write, such as 'Q4_K'")]
TypeNameOrNone = Annotated[str, one_of({*_WRITABLE, ""}, "a tensor type that llama.cpp can write, such as 'Q4_K', or ''")]
QuantizedName = Annotated[str, one_of(_WRITABLE - _UNQUANTIZED, "a quantized tensor type, such as 'Q4_K'")]
FtypeName = Annotated[str, one_of(_MIXES, "an ftype that llama.cpp can write, such as 'Q4_K_M'")]
KvType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"]
ChunkSet = Literal["all", "spread", "first"]
Switch = Literal["off", "on"]
