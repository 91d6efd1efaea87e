"""Small models with an MTP head, of an architecture that llama.cpp drafts with; headers and random tensors, nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gguf_factory import Tensors, model_tensors, tiny_gguf


def headed_model(path: Path, *, n_block: int = 2, n_nextn: int = 1, arch: str = "qwen35", type_name: str = "BF16", n_part: int = 1,
                 metadata: Mapping[str, Any] | None = None, tensors: Tensors | None = None, alignment: int = 32,
                 seed: int = 0, n_embd: int = 64) -> list[Path]:
    """A model of n_block trunk blocks and n_nextn NextN blocks; `metadata` and `tensors` add to it, None takes a key out."""
    keys: dict[str, Any] = {
        "general.type": "model", "general.name": "headed", "general.file_type": 32, f"{arch}.block_count": n_block + n_nextn,
        f"{arch}.embedding_length": n_embd, f"{arch}.context_length": 512, f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.dimension_sections": [3, 3, 2, 0], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ü"],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.add_bos_token": False,
    }
    if n_nextn:
        keys[f"{arch}.nextn_predict_layers"] = n_nextn
    keys |= metadata or {}
    shapes = model_tensors(n_embd=n_embd, n_block=n_block, n_nextn=n_nextn, type_name=type_name)
    kept = {key: value for key, value in keys.items() if value is not None}
    return tiny_gguf(path, {**shapes, **(tensors or {})}, kept, arch=arch, n_part=n_part, alignment=alignment, seed=seed)
