"""Small models with MTP heads: with random tensors for headers and files, with chosen ones where llama.cpp shall run them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.spec.gguf_header import read_header
from tests.gguf_factory import Tensors, _value_types, model_metadata, model_tensors, tiny_gguf


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


def chained_model(path: Path, right: Sequence[bool], *, seed: int = 0) -> Path:
    """A mimo2 that llama.cpp runs, with a NextN block for each of `right`: one that is right guesses the trunk's choice.

    The trunk's blocks do next to nothing, so that the next token depends on the last one alone; a right head passes the embedding
    of its token on, as the trunk does, and one that is not right passes zeros on.
    """
    n_embd, n_ff, n_block, n_all = 64, 64, 2, 2 + len(right)
    rng = np.random.default_rng(seed)
    keys = {
        "general.type": "model", "general.name": "chained", "mimo2.block_count": n_all, "mimo2.nextn_predict_layers": len(right),
        "mimo2.context_length": 512, "mimo2.embedding_length": n_embd, "mimo2.feed_forward_length": n_ff,
        "mimo2.attention.head_count": 2, "mimo2.attention.head_count_kv": 2, "mimo2.attention.key_length": 32,
        "mimo2.attention.value_length": 32, "mimo2.attention.layer_norm_rms_epsilon": 1e-5, "mimo2.rope.dimension_count": 32,
        "mimo2.expert_feed_forward_length": n_ff, "mimo2.attention.sliding_window": 128,
        "mimo2.attention.sliding_window_pattern": [i % 2 == 1 for i in range(n_all)],
    }
    keys |= {key: value for key, value in model_metadata().items() if key.startswith("tokenizer.")}
    arrays = {"token_embd.weight": rng.standard_normal((260, n_embd)), "output.weight": 0.3 * rng.standard_normal((260, n_embd)),
              "output_norm.weight": np.ones(n_embd)}
    for i in range(n_all):
        for name, shape in {"attn_qkv": (3 * n_embd, n_embd), "attn_output": (n_embd, n_embd), "ffn_gate": (n_ff, n_embd),
                            "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}.items():
            arrays[f"blk.{i}.{name}.weight"] = 0.01 * rng.standard_normal(shape)
        arrays |= {f"blk.{i}.{norm}.weight": np.ones(n_embd) for norm in ("attn_norm", "ffn_norm")}
        if i >= n_block:
            passes = float(right[i - n_block])
            arrays[f"blk.{i}.nextn.eh_proj.weight"] = np.hstack([passes * np.eye(n_embd), np.zeros((n_embd, n_embd))])
            arrays |= {f"blk.{i}.nextn.{norm}.weight": np.ones(n_embd) for norm in ("enorm", "hnorm", "shared_head_norm")}
    _write_arrays(path, "mimo2", arrays, keys)
    return path


def with_zeros(source: Path, target: Path, name: str) -> Path:
    """A copy of a single-file model in which one tensor is all zeros."""
    shutil.copy(source, target)
    tensor = next(t for t in read_header(target).tensors if t.name == name)
    with target.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(tensor.size_bytes))
    return target


def _write_arrays(path: Path, arch: str, arrays: Mapping[str, npt.NDArray[Any]], keys: Mapping[str, Any]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch, use_temp_file=False)
    for key, value in keys.items():
        writer.add_key_value(key, value, *_value_types(value))
    for name, array in arrays.items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
