"""Small GGUFs for tests: whole models, files from a tensor list, and malformed bytes.

    tiny_model(path)                     a random llama that llama.cpp loads, about 100 kB: shapes, experts, tying, MTP blocks
    tiny_gguf(path, tensors, metadata)   any tensors and keys, single or split, written by the gguf library
    raw_gguf(...)                        bytes packed by hand, so that every field can lie; `raw_key`, `raw_tensor`, `raw_text`

A tensor is `name: (shape, type)`: the shape in ggml's order (the row length ne0 first, as llama.cpp prints it), the type by its
upper-case name. Data are random, from a fixed seed, so equal calls give equal bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, tuple[Sequence[int], str]]

_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}


def tiny_gguf(path: Path, tensors: Tensors, metadata: Mapping[str, Any] | None = None, *, arch: str = "llama", n_part: int = 1,
              alignment: int = 32, big_endian: bool = False, seed: int = 0) -> list[Path]:
    """Write a GGUF with the gguf library.

    Args:
        path: ends in `.gguf`; with `n_part` above 1 the files are `NAME-00001-of-0000N.gguf` and so on.
        tensors: what to hold; float and quantized types are filled with random weights, integer types with zeros.
        metadata: further keys; bool, int (uint32), float (float32), str, or a list of these; `general.architecture` is `arch`.
        n_part: how many files the tensors are dealt to, in order and evenly; each file must get at least one.
        seed: of the random weights.

    Returns:
        The files, in order.
    """
    import gguf

    per_part = -(-len(tensors) // n_part) if n_part > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_part, use_temp_file=False,
                             endianess=gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, *_value_types(value))
    rng = np.random.default_rng(seed)
    for name, (shape, type_name) in tensors.items():
        writer.add_tensor(name, _random_data(rng, shape, type_name), raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if n_part == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_part:05d}.gguf") for i in range(n_part)]


def tiny_model(path: Path, *, n_embd: int = 64, n_ff: int = 128, n_block: int = 2, n_nextn: int = 0, n_expert: int = 0,
               tied: bool = False, type_name: str = "BF16", add_bos: bool = False, n_part: int = 1, seed: int = 0,
               metadata: Mapping[str, Any] | None = None) -> list[Path]:
    """Write a random llama with a vocabulary of 260 byte tokens. llama.cpp loads it where `n_nextn` is 0.

    `n_block` counts the trunk; `n_nextn` blocks with nextn tensors follow and are counted in `block_count`, as in real files.
    `metadata` adds keys, or replaces them.
    """
    tensors = model_tensors(n_embd=n_embd, n_ff=n_ff, n_block=n_block, n_nextn=n_nextn, n_expert=n_expert, tied=tied,
                            type_name=type_name)
    keys = model_metadata(n_embd=n_embd, n_ff=n_ff, n_block=n_block, n_nextn=n_nextn, n_expert=n_expert, type_name=type_name,
                          add_bos=add_bos)
    return tiny_gguf(path, tensors, {**keys, **(metadata or {})}, n_part=n_part, seed=seed)


def model_tensors(*, n_embd: int = 64, n_ff: int = 128, n_block: int = 2, n_nextn: int = 0, n_expert: int = 0,
                  tied: bool = False, type_name: str = "BF16") -> dict[str, tuple[Sequence[int], str]]:
    """The tensors of `tiny_model`: matrices of one type, norms F32."""
    n_vocab = len(_vocabulary())
    tensors: dict[str, tuple[Sequence[int], str]] = {"token_embd.weight": ((n_embd, n_vocab), type_name)}
    if not tied:
        tensors["output.weight"] = ((n_embd, n_vocab), type_name)
    tensors["output_norm.weight"] = ((n_embd,), "F32")
    for i in range(n_block + n_nextn):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{norm}.weight"] = ((n_embd,), "F32")
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{i}.{matrix}.weight"] = ((n_embd, n_embd), type_name)
        if n_expert:
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = ((n_embd, n_expert), "F32")
        for matrix, (n_in, n_out) in {"gate": (n_embd, n_ff), "up": (n_embd, n_ff), "down": (n_ff, n_embd)}.items():
            shape = (n_in, n_out, n_expert) if n_expert else (n_in, n_out)
            tensors[f"blk.{i}.ffn_{matrix}{'_exps' if n_expert else ''}.weight"] = (shape, type_name)
    for i in range(n_block, n_block + n_nextn):
        tensors[f"blk.{i}.nextn.eh_proj.weight"] = ((2 * n_embd, n_embd), type_name)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            tensors[f"blk.{i}.nextn.{norm}.weight"] = ((n_embd,), "F32")
    return tensors


def model_metadata(*, n_embd: int = 64, n_ff: int = 128, n_block: int = 2, n_nextn: int = 0, n_expert: int = 0,
                   type_name: str = "BF16", add_bos: bool = False) -> dict[str, Any]:
    """The keys of `tiny_model`."""
    tokens = _vocabulary()
    keys = {
        "general.type": "model", "general.name": "tiny",
        "llama.block_count": n_block + n_nextn, "llama.context_length": 512, "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": n_embd // 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (len(tokens) - 256), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.add_bos_token": add_bos,
    }
    if type_name in _FILE_TYPES:
        keys["general.file_type"] = _FILE_TYPES[type_name]
    if n_expert:
        keys |= {"llama.expert_count": n_expert, "llama.expert_used_count": 2}
    if n_nextn:
        keys["llama.nextn_predict_layers"] = n_nextn
    return keys


def raw_gguf(keys: Iterable[bytes] = (), tensors: Iterable[bytes] = (), *, magic: bytes = b"GGUF", version: int = 3,
             n_keys: int | None = None, n_tensors: int | None = None, order: str = "<", alignment: int = 32,
             data: bytes = b"") -> bytes:
    """A GGUF packed by hand, header, padding and data; counts can be made to lie.

    Args:
        keys: `raw_key` results. tensors: `raw_tensor` results.
        n_keys: the count to write instead of the true one; n_tensors too.
        data: what follows the padded header.
    """
    keys, tensors = list(keys), list(tensors)
    head = magic + struct.pack(order + "IQQ", version, len(tensors) if n_tensors is None else n_tensors,
                               len(keys) if n_keys is None else n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment if tensors else 0) + data


def raw_text(text: str | bytes, order: str = "<") -> bytes:
    """A GGUF string: its length in bytes, then the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack(order + "Q", len(raw)) + raw


def raw_key(key: str | bytes, type_id: int, value: bytes, order: str = "<") -> bytes:
    """A metadata pair of any type id and value bytes; `raw_key("k", 4, struct.pack("<I", 7))` is a uint32, 8 is a string."""
    return raw_text(key, order) + struct.pack(order + "I", type_id) + value


def raw_tensor(name: str | bytes, shape: Sequence[int] = (32,), type_id: int = 0, offset: int = 0, *, n_dims: int | None = None,
               order: str = "<") -> bytes:
    """A row of the tensor table, F32 by default; the offset counts from the start of the data."""
    dims = struct.pack(f"{order}I{len(shape)}Q", len(shape) if n_dims is None else n_dims, *shape)
    return raw_text(name, order) + dims + struct.pack(order + "IQ", type_id, offset)


def _vocabulary() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as, and four special tokens."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))] + ["<s>", "</s>", "<unk>", "<pad>"]


def _random_data(rng: np.random.Generator, shape: Sequence[int], type_name: str) -> npt.NDArray[Any]:
    """Random weights of a type, as the gguf library takes them: rows last first, quantized ones as bytes."""
    import gguf

    if type_name.startswith("I") and not type_name.startswith("IQ"):
        return np.zeros(shape[::-1], dtype=type_name.lower().replace("i", "int"))
    weights = rng.standard_normal(math.prod(shape), dtype=np.float32).reshape(shape[::-1]) / np.float32(8)
    if type_name in ("F32", "F64"):
        return weights.astype(np.float64 if type_name == "F64" else np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    try:
        return np.asarray(gguf.quants.quantize(weights, kind))
    except NotImplementedError:  # the library reads this type and cannot make it: blocks of zeros are valid
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        return np.zeros((*weights.shape[:-1], shape[0] // block_size * type_size), dtype=np.uint8)


def _value_types(value: Any) -> tuple[Any, Any]:
    import gguf

    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
             str: gguf.GGUFValueType.STRING}
    if isinstance(value, list):
        kind = kinds[type(value[0])]
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32 if kind == gguf.GGUFValueType.UINT32 else kind
    return kinds[type(value)], None
