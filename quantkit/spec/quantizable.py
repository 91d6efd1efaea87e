"""Which tensors the pinned llama.cpp will quantize, what it cannot write, and when it wants an importance matrix.

A mirror of the library's own rules as tables, so that a plan can be judged without the library. It says nothing about the types
that a mix would choose.

Source: src/llama-quant.cpp (tensor_allows_quantization, tensor_requires_imatrix), ggml/src/ggml.c (ggml_n_dims,
ggml_quantize_chunk, ggml_quantize_requires_imatrix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quantkit.spec.tensor_types import TENSOR_TYPES


class Kept(NamedTuple):
    """One test of the library's list of tensors it leaves alone."""

    text: str
    kind: str
    whole: bool = False  # the whole name, not a part of it
    architecture: str = ""  # "" means every architecture


KEPT: tuple[Kept, ...] = (
    Kept("_norm.weight", "norm"),
    Kept("ffn_gate_inp.weight", "expert gate"),
    Kept("ffn_gate_tid2eid.weight", "expert routing table"),
    Kept("altup", "small projection"),
    Kept("laurel", "small projection"),
    Kept("per_layer_model_proj", "small projection"),
    Kept("position_embd.weight", "position embedding", whole=True),
    Kept("token_types.weight", "token type embedding", whole=True),
    Kept("ssm_conv1d", "short convolution"),
    Kept("shortconv.conv.weight", "short convolution"),
    Kept("indexer.k_proj.weight", "indexer"),
    Kept("indexer.q_proj.weight", "indexer"),
    *(Kept(text, "architecture's own", architecture="glm5-next") for text in (
        "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate", "indexer_compressor_ape",
        "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight", "ssm_beta.weight", "attn_kv_a_mqa.weight",
        "attn_k_b.weight", "attn_v_b.weight")),
    *(Kept(f"time_mix_{text}.weight", "small RWKV matrix") for text in (
        "first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2", "decay_w1", "decay_w2", "lerp_fused")),
    Kept("attn_rel_b.weight", "relative position bias"),
    *(Kept(text, "vision") for text in (
        ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger")),
    Kept("a.rvq.codebook", "audio codebook"),
    Kept("mm.a.code_embd", "audio codebook"),
)

# ggml_quantize_chunk writes these; any other type aborts the process.
WRITABLE_TYPES = frozenset({
    "F32", "F16", "BF16", "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
})

# The library's loops over rows and experts stop at the third dimension, and a fourth makes it abort.
MAX_DIMS = 3

# llama_tensor_dequantize_impl reads these without asking for requantization.
READABLE_SOURCES = frozenset({"F32", "F16", "BF16"})

# The library asks for no importances here ...
_EXEMPT_NAMES = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "output.weight"})
# ... and then aborts on these types without them (ggml_quantize_requires_imatrix).
_ABORTS_WITHOUT_IMATRIX = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})


def n_dims(shape: Sequence[int]) -> int:
    """Dimensions as ggml counts them: trailing ones do not count, a scalar has one."""
    return max((i + 1 for i, n in enumerate(shape) if n > 1), default=1)


def kept_reason(name: str, shape: Sequence[int], architecture: str) -> str | None:
    """Why the library leaves a tensor as it is; None if it quantizes it.

    Args:
        name: the full tensor name.
        shape: ggml order, ne0 first.
        architecture: `general.architecture`; one entry of the table depends on it.

    Source: src/llama-quant.cpp, tensor_allows_quantization.
    """
    if n_dims(shape) < 2:
        return "bias" if name.endswith(".bias") else "norm" if name.endswith("_norm.weight") else "1-D"
    # the library compares an unsigned `size - 6` with "not found", so any name of five letters passes as well
    if not name.endswith("weight") and len(name) != len("weight") - 1:
        return "bias" if name.endswith(".bias") else "no weight"
    for kept in KEPT:
        found = name == kept.text if kept.whole else kept.text in name
        if found and kept.architecture in ("", architecture):
            return kept.kind
    return None


def is_quantizable(name: str, shape: Sequence[int], architecture: str) -> bool:
    """Whether the library quantizes a tensor of this name and shape."""
    return kept_reason(name, shape, architecture) is None


def needs_imatrix(name: str, type_name: str, ftype: str) -> bool:
    """Whether the library cannot write a tensor in this type without importances.

    Embedding and output are exempt from the library's question, but three types abort in ggml all the same. Q2_K needs
    importances inside a Q2_K_S file only.

    Source: src/llama-quant.cpp, tensor_requires_imatrix; ggml/src/ggml.c, ggml_quantize_requires_imatrix.
    """
    if name in _EXEMPT_NAMES:
        return type_name in _ABORTS_WITHOUT_IMATRIX
    return TENSOR_TYPES[type_name].needs_imatrix or (type_name == "Q2_K" and ftype == "Q2_K_S")
