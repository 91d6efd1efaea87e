"""Which architectures the pinned llama.cpp can draft with from NextN blocks, and how many blocks in a chain.

A head of any other architecture is loaded, counted in the file's size and never run: an MTP context on it would decode with the
trunk's graph, which looks like a head that is never right.

Source: `graph_mtp` and the asserts on n_layer_nextn in src/models/*.cpp of the pinned commit.
"""

from __future__ import annotations

from quantkit.spec.model import ModelInfo

_CHAIN = 64

#: Architecture to the largest number of NextN blocks that its draft graph runs, one draft position each.
MAX_NEXTN = {
    "bailingmoe3": 1, "cohere2moe": 1, "deepseek2": 1, "deepseek32": 1, "deepseek4": 1, "glm-dsa": 1, "glm4moe": 1, "glm5-next": 1,
    "mistral4": 1, "nemotron_h_moe": 1, "qwen35": 1, "qwen35moe": 1, "qwen3next": 1,
    "hy_v3": _CHAIN, "mimo2": _CHAIN, "step35": _CHAIN,
}

#: The metadata keys below the architecture's name that hold one value for each block, MTP blocks included.
#: Source: get_key_or_arr(..., n_layer_all) and get_arr(..._PATTERN) in src/llama-model.cpp and src/models/*.cpp.
PER_BLOCK_KEYS = frozenset({
    "attention.compress_ratios", "attention.head_count", "attention.head_count_kv", "attention.recurrent_layers",
    "attention.sliding_window_pattern", "expert_feed_forward_length", "expert_used_count", "feed_forward_length",
    "swiglu_clamp_exp", "swiglu_clamp_shexp",
})


def cannot_draft(head: ModelInfo) -> str | None:
    """Why the pinned llama.cpp cannot draft with a model's NextN blocks; None where it can."""
    if head.n_nextn == 0:
        return "no MTP head"
    most = MAX_NEXTN.get(head.architecture)
    if most is None:
        return (f"llama.cpp has no draft graph for the architecture {head.architecture}: its {head.n_nextn} NextN block(s) are "
                "counted in the file's size and never run")
    if head.n_nextn > most:
        return (f"llama.cpp drafts with {most} NextN block of the architecture {head.architecture}, and this file has "
                f"{head.n_nextn}: they cannot be chained")
    return None
