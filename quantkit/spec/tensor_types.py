"""Tensor types and ftypes of the pinned llama.cpp: one table each.

A tensor type is how one tensor is stored. An ftype is the mix a file is named after. Both are small integers in a GGUF and they
are easily confused: 8 is Q8_0 as a tensor type and Q5_0 as an ftype. Which tensors of a mix get which type is not told here.

Source: ggml/include/ggml.h (ids), ggml/src/ggml-common.h (blocks), include/llama.h and src/llama-quant.cpp (ftypes, fallbacks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """How one tensor is stored: `block_size` elements of a row share `type_size` bytes."""

    name: str
    id: int
    block_size: int
    type_size: int
    is_quantized: bool
    needs_imatrix: bool

    def row_bytes(self, ne0: int) -> int:
        """Bytes of one row of `ne0` elements.

        Raises:
            ValueError: the row is not a whole number of blocks.
        """
        n_block, rest = divmod(ne0, self.block_size)
        if rest:
            raise ValueError(f"expected a row divisible by {self.block_size} for {self.name}, got {ne0} elements")
        return n_block * self.type_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ftype:
    """The mix a file is named after. `default_type` is "" where the library reads such files and cannot make them."""

    name: str
    id: int
    default_type: str


# name, id, elements of a block, bytes of a block, quantized
_TYPES = (
    ("F32", 0, 1, 4, False),
    ("F16", 1, 1, 2, False),
    ("Q4_0", 2, 32, 18, True),
    ("Q4_1", 3, 32, 20, True),
    ("Q5_0", 6, 32, 22, True),
    ("Q5_1", 7, 32, 24, True),
    ("Q8_0", 8, 32, 34, True),
    ("Q8_1", 9, 32, 36, True),
    ("Q2_K", 10, 256, 84, True),
    ("Q3_K", 11, 256, 110, True),
    ("Q4_K", 12, 256, 144, True),
    ("Q5_K", 13, 256, 176, True),
    ("Q6_K", 14, 256, 210, True),
    ("Q8_K", 15, 256, 292, True),
    ("IQ2_XXS", 16, 256, 66, True),
    ("IQ2_XS", 17, 256, 74, True),
    ("IQ3_XXS", 18, 256, 98, True),
    ("IQ1_S", 19, 256, 50, True),
    ("IQ4_NL", 20, 32, 18, True),
    ("IQ3_S", 21, 256, 110, True),
    ("IQ2_S", 22, 256, 82, True),
    ("IQ4_XS", 23, 256, 136, True),
    ("I8", 24, 1, 1, False),
    ("I16", 25, 1, 2, False),
    ("I32", 26, 1, 4, False),
    ("I64", 27, 1, 8, False),
    ("F64", 28, 1, 8, False),
    ("IQ1_M", 29, 256, 56, True),
    ("BF16", 30, 1, 2, False),
    ("TQ1_0", 34, 256, 54, True),
    ("TQ2_0", 35, 256, 66, True),
    ("MXFP4", 39, 32, 17, True),
    ("NVFP4", 40, 64, 36, True),
    ("Q1_0", 41, 128, 18, True),
    ("Q2_0", 42, 64, 18, True),
)

# Q2_K needs one too inside a Q2_K_S file; token_embd and output never do (tensor_requires_imatrix).
_NEEDS_IMATRIX = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}

# name, id, default tensor type (llama_ftype_get_default_type)
_FTYPES = (
    ("F32", 0, "F32"),
    ("F16", 1, "F16"),
    ("Q4_0", 2, "Q4_0"),
    ("Q4_1", 3, "Q4_1"),
    ("Q8_0", 7, "Q8_0"),
    ("Q5_0", 8, "Q5_0"),
    ("Q5_1", 9, "Q5_1"),
    ("Q2_K", 10, "Q2_K"),
    ("Q3_K_S", 11, "Q3_K"),
    ("Q3_K_M", 12, "Q3_K"),
    ("Q3_K_L", 13, "Q3_K"),
    ("Q4_K_S", 14, "Q4_K"),
    ("Q4_K_M", 15, "Q4_K"),
    ("Q5_K_S", 16, "Q5_K"),
    ("Q5_K_M", 17, "Q5_K"),
    ("Q6_K", 18, "Q6_K"),
    ("IQ2_XXS", 19, "IQ2_XXS"),
    ("IQ2_XS", 20, "IQ2_XS"),
    ("Q2_K_S", 21, "Q2_K"),
    ("IQ3_XS", 22, "IQ3_S"),
    ("IQ3_XXS", 23, "IQ3_XXS"),
    ("IQ1_S", 24, "IQ1_S"),
    ("IQ4_NL", 25, "IQ4_NL"),
    ("IQ3_S", 26, "IQ3_S"),
    ("IQ3_M", 27, "IQ3_S"),
    ("IQ2_S", 28, "IQ2_XS"),
    ("IQ2_M", 29, "IQ2_S"),
    ("IQ4_XS", 30, "IQ4_XS"),
    ("IQ1_M", 31, "IQ1_M"),
    ("BF16", 32, "BF16"),
    ("TQ1_0", 36, "TQ1_0"),
    ("TQ2_0", 37, "TQ2_0"),
    ("MXFP4_MOE", 38, "MXFP4"),
    ("NVFP4", 39, ""),
    ("Q1_0", 40, "Q1_0"),
    ("Q2_0", 41, "Q2_0"),
)

TENSOR_TYPES: Mapping[str, TensorType] = MappingProxyType({
    name: TensorType(name=name, id=id_, block_size=block_size, type_size=type_size, is_quantized=is_quantized,
                     needs_imatrix=name in _NEEDS_IMATRIX)
    for name, id_, block_size, type_size, is_quantized in _TYPES
})
TENSOR_TYPES_BY_ID: Mapping[int, TensorType] = MappingProxyType({t.id: t for t in TENSOR_TYPES.values()})

FTYPES: Mapping[str, Ftype] = MappingProxyType({
    name: Ftype(name=name, id=id_, default_type=default_type) for name, id_, default_type in _FTYPES
})
FTYPES_BY_ID: Mapping[int, Ftype] = MappingProxyType({f.id: f for f in FTYPES.values()})

# What the library stores instead where a row is not divisible by the block; F16 where the row does not fit this one either.
# A type that is no key here has no fallback: the library refuses the tensor. (tensor_type_fallback)
FALLBACKS: Mapping[str, str] = MappingProxyType({
    "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ2_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL",
    "Q2_0": "Q4_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    "Q4_0": "F16", "Q4_1": "F16", "Q5_0": "F16", "Q5_1": "F16", "Q8_0": "F16", "Q8_1": "F16", "IQ4_NL": "F16", "MXFP4": "F16",
})
