from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantkit.spec.quantizable import KEPT, WRITABLE_TYPES, is_quantizable, kept_reason, n_dims, needs_imatrix
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES


@pytest.mark.parametrize(("shape", "expected"), [((), 1), ((4,), 1), ((256, 1), 1), ((256, 2), 2), ((256, 1, 4), 3)])
def test_trailing_ones_are_no_dimension(shape: tuple[int, ...], expected: int) -> None:
    assert expected == n_dims(shape)


@pytest.mark.parametrize(("name", "shape", "expected"), [
    ("blk.0.attn_q.weight", (256, 256), None),
    ("blk.0.ffn_up_exps.weight", (256, 64, 4), None),
    ("output.weight", (256, 4096), None),
    ("blk.4.nextn.eh_proj.weight", (512, 256), None),
    ("blk.0.ssm_alpha.weight", (256, 48), None),
    ("blk.0.ssm_ba.weight", (256, 48), None),
    ("blk.0.attn_norm.weight", (256,), "norm"),
    ("blk.0.attn_q.bias", (256,), "bias"),
    ("blk.0.ssm_a", (48,), "1-D"),
    ("blk.0.ssm_dt.bias", (48,), "bias"),
    ("blk.0.ssm_a", (16, 48), "no weight"),
    ("blk.0.ssm_conv1d.weight", (4, 256), "short convolution"),
    ("blk.0.ffn_gate_inp.weight", (256, 8), "expert gate"),
    ("blk.0.attn_q_norm.weight", (256, 4), "norm"),
    ("position_embd.weight", (256, 512), "position embedding"),
    ("blk.0.time_mix_w1.weight", (256, 32), "small RWKV matrix"),
    ("blk.0.weight", (256, 1), "1-D"),
])
def test_kept_reason(name: str, shape: tuple[int, ...], expected: str | None) -> None:
    assert expected == kept_reason(name, shape, "qwen35")


def test_one_architecture_keeps_more() -> None:
    assert not is_quantizable("blk.0.ssm_beta.weight", (256, 48), "glm5-next")
    assert is_quantizable("blk.0.ssm_beta.weight", (256, 48), "qwen35")


@pytest.mark.parametrize(("name", "type_name", "ftype", "expected"), [
    ("blk.0.ffn_up.weight", "IQ1_M", "IQ1_M", True),
    ("blk.0.ffn_up.weight", "IQ3_XXS", "Q4_K_M", True),
    ("blk.0.ffn_up.weight", "IQ3_S", "IQ3_S", False),
    ("blk.0.ffn_up.weight", "Q2_K", "Q2_K", False),
    ("blk.0.ffn_up.weight", "Q2_K", "Q2_K_S", True),
    ("output.weight", "Q2_K", "Q2_K_S", False),
    ("token_embd.weight", "IQ2_S", "IQ2_S", False),
    ("token_embd.weight", "IQ2_XXS", "IQ2_XXS", True),  # not asked for, and then ggml aborts
])
def test_needs_imatrix(name: str, type_name: str, ftype: str, expected: bool) -> None:
    assert expected == needs_imatrix(name, type_name, ftype)


def test_every_default_type_can_be_written() -> None:
    assert {f.default_type for f in FTYPES.values() if f.default_type} <= WRITABLE_TYPES
    assert {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"} == TENSOR_TYPES.keys() - WRITABLE_TYPES


DRY_RUN = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.dry_run = True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), b"unused", params))
"""


# what this architecture's loader asks for before it looks at any tensor
GLM5_NEXT = {
    "attention.key_length_mla": 32, "attention.value_length_mla": 32, "attention.q_lora_rank": 8, "attention.kv_lora_rank": 8,
    "ssm.conv_kernel": 4, "kda.head_dim": 32, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "attention.indexer.head_count": 1, "attention.indexer.key_length": 32, "attention.indexer.top_k": 4,
    "attention.indexer.kpool": 2, "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 1,
}


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["llama", "glm5-next"])
def test_the_library_agrees_with_the_table(tmp_path: Path, architecture: str) -> None:
    names = [kept.text if kept.whole else f"blk.0.{kept.text}" for kept in KEPT]
    names += [name if name.endswith("weight") else f"{name}.x.weight" for name in names]
    names += ["abcde", "abcdef", "weight", "output.weight", "token_embd.weight", "v.weight"]
    names += ["blk.0.weight.scale", "blk.0.ffn_up.bias"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (32, 2))
    shapes |= {"one.weight": (32,), "flat.weight": (32, 1), "experts.weight": (32, 1, 2)}
    path = tmp_path / "names.gguf"
    write_names(path, shapes, architecture)

    done = subprocess.run([sys.executable, "-c", DRY_RUN, str(path)], capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    said = {match[1]: "->" in match[2] for match in re.finditer(r"^\[ *\d+/ *\d+\] (\S+) +- (.*)$", log, re.MULTILINE)}

    assert done.returncode == 0, log
    assert {name: is_quantizable(name, shape, architecture) for name, shape in shapes.items()} == said


def write_names(path: Path, shapes: dict[str, tuple[int, ...]], architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(8)
    for key, value in GLM5_NEXT.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.hyper_connection.epsilon", 1e-6)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape[::-1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
