"""What a header says about a model, and where it contradicts itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import (
    ModelInfo,
    TypeShare,
    bits_per_weight,
    block_of,
    describe_model,
    is_mtp,
    require_consistent,
    role_of,
    type_shares,
)
from tests.gguf_factory import (
    Tensors,
    model_metadata,
    model_tensors,
    raw_gguf,
    raw_key,
    raw_tensor,
    raw_text,
    tiny_gguf,
    tiny_model,
)


def described(path: Path) -> ModelInfo:
    return describe_model(read_header(path))


def test_hybrid_with_an_mtp_head(shared: Path) -> None:
    info = described(shared / "models" / "tiny-qwen35-mtp-BF16.gguf")
    expected: dict[str, Any] = {
        "name": "Tiny Qwen35 MTP", "architecture": "qwen35", "ftype_name": "BF16", "n_block": 5, "n_nextn": 1,
        "n_trunk_block": 4, "is_head_only": False, "tied_embeddings": False, "recurrent_blocks": (0, 1, 2),
        "is_recurrent": True, "n_expert": 0, "n_params": 6_704_088, "n_embd": 256, "n_ctx_train": 2048,
        "n_vocab": 4096, "tokenizer_model": "gpt2", "tokenizer_pre": "qwen35", "add_bos": False, "problems": (), "notes": (),
    }
    assert expected == {name: getattr(info, name) for name in expected}
    template = info.header.metadata["tokenizer.chat_template"]
    assert hashlib.sha256(str(template).encode()).hexdigest() == info.chat_template_sha256
    assert {"mtp"} == {role for name, role in info.roles.items() if name.startswith("blk.4.")}
    roles = {"token_embd.weight": "embedding", "output.weight": "output", "output_norm.weight": "trunk", "blk.0.ssm_a": "trunk"}
    assert roles == {name: info.roles[name] for name in roles}


def test_experts_and_tied_embeddings(moe_model: Path) -> None:
    info = described(moe_model)
    expected: dict[str, Any] = {"architecture": "qwen3moe", "n_block": 2, "n_nextn": 0, "tied_embeddings": True, "n_expert": 4,
                                "n_expert_used": 2, "add_bos": True, "is_recurrent": False, "chat_template_sha256": None,
                                "problems": ()}
    assert expected == {name: getattr(info, name) for name in expected}
    assert "output" not in info.roles.values()


@pytest.mark.parametrize("ftype", ["Q8_0", "Q4_K_M", "IQ2_S", "IQ1_M"])
def test_stock_tiers(shared: Path, ftype: str) -> None:
    info = described(shared / "oracle" / f"stock-{ftype}.gguf")
    assert (ftype, ()) == (info.ftype_name, info.notes)


def test_types_of_a_stock_tier(shared: Path) -> None:
    expected = (TypeShare(type="Q4_K", n_tensors=36, n_params=5_019_648, size_bytes=5_019_648 * 144 // 256),
                TypeShare(type="Q6_K", n_tensors=5, n_params=1_671_168, size_bytes=1_671_168 * 210 // 256),
                TypeShare(type="F32", n_tensors=30, n_params=13_272, size_bytes=13_272 * 4))
    assert expected == type_shares(described(shared / "oracle" / "stock-Q4_K_M.gguf").header.tensors)


def test_bits_per_weight_by_hand(tmp_path: Path) -> None:
    """512 Q8_0 weights of the trunk (8.5 bits), 32 F32 (32), beside an F16 embedding, a Q4_0 output and an MTP block."""
    tensors: Tensors = {
        "token_embd.weight": ((32, 8), "F16"), "output.weight": ((32, 8), "Q4_0"), "output_norm.weight": ((32,), "F32"),
        "blk.0.ffn_up.weight": ((32, 16), "Q8_0"), "blk.1.ffn_up.weight": ((32, 16), "F32"),
        "blk.1.nextn.eh_proj.weight": ((64, 32), "F32"), "blk.1.nextn.shared_head_head.weight": ((32, 8), "Q8_0"),
    }
    (path,) = tiny_gguf(tmp_path / "a.gguf", tensors, {"llama.block_count": 2, "llama.nextn_predict_layers": 1})
    info = described(path)
    n_bits = 256 * 16 + 256 * 4.5 + 32 * 32 + 512 * 8.5 + 512 * 32 + 2048 * 32 + 256 * 8.5
    n_bits_core = 512 * 8.5 + 32 * 32
    assert n_bits / (256 + 256 + 32 + 512 + 512 + 2048 + 256) == info.bpw
    assert n_bits_core / (512 + 32) == info.bpw_core
    assert bits_per_weight([]) is None


@pytest.mark.parametrize(("name", "block", "role"), [
    ("token_embd.weight", None, "embedding"), ("per_layer_token_embd.weight", None, "embedding"),
    ("output.weight", None, "output"), ("output_norm.weight", None, "trunk"),
    ("blk.0.attn_output.weight", 0, "trunk"), ("blk.3.ssm_a", 3, "trunk"),
    ("blk.4.attn_q.weight", 4, "mtp"), ("blk.40.attn_q.weight", 40, "mtp"), ("blk.4.nextn.embed_tokens.weight", 4, "mtp"),
    ("nextn.pre_projection.weight", None, "mtp"), ("rope_freqs.weight", None, "trunk"), ("v.blk.7.ln1.weight", None, "trunk"),
])
def test_roles_by_name(name: str, block: int | None, role: str) -> None:
    assert block == block_of(name)
    assert role == role_of(name, 4)
    assert (role == "mtp") is is_mtp(name, 4)


def nextn_case(path: Path, *, key: bool, counted: bool, tensors: bool) -> ModelInfo:
    """Two trunk blocks; the head is told by the key or not, counted in block_count or not, there or not."""
    metadata = model_metadata(n_block=2, n_nextn=0) | {"llama.block_count": 3 if counted else 2}
    if key:
        metadata["llama.nextn_predict_layers"] = 1
    tiny_gguf(path, model_tensors(n_block=2, n_nextn=int(tensors)), metadata)
    return described(path)


@pytest.mark.parametrize(("key", "counted", "tensors", "n_trunk", "expected"), [
    (False, False, False, 2, None),
    (True, True, True, 2, None),
    (True, True, False, 2, "is 1 and llama.block_count is 3, so nextn tensors are expected in block 2, but found in no block: "
                           "the MTP head was dropped"),
    (True, False, True, 2, "expected in block 1, but found in block 2: the block count leaves the MTP blocks out"),
    (True, False, False, 1, "expected in block 1, but found in no block"),
    (False, True, True, 2, "is 0 and llama.block_count is 3, so nextn tensors are expected in no block, but found in block 2: "
                           "llama.cpp takes these blocks for trunk blocks"),
    (False, True, False, 2, "llama.block_count is 3, but there are no tensors in block 2"),
    (False, False, True, 2, "expected in no block, but found in block 2: the block count leaves the MTP blocks out"),
])
def test_three_witnesses_of_an_mtp_head(tmp_path: Path, key: bool, counted: bool, tensors: bool, n_trunk: int,
                                        expected: str | None) -> None:
    info = nextn_case(tmp_path / "a.gguf", key=key, counted=counted, tensors=tensors)
    assert (n_trunk, int(tensors)) == (info.n_trunk_block, info.n_nextn)
    if expected is None:
        require_consistent(info)
    else:
        with pytest.raises(GgufError, match=expected):
            require_consistent(info)


def test_several_mtp_blocks(tmp_path: Path) -> None:
    (path,) = tiny_model_file(tmp_path, n_block=3, n_nextn=2)
    info = described(path)
    require_consistent(info)
    expected = {"n_block": 5, "n_nextn": 2, "n_trunk_block": 3}
    assert expected == {name: getattr(info, name) for name in expected}
    assert {3, 4} == {block_of(name) for name, role in info.roles.items() if role == "mtp"}


def test_head_only_file(tmp_path: Path) -> None:
    """A head split off keeps its block number and the counts; that its trunk is elsewhere is no contradiction."""
    tensors = {n: t for n, t in model_tensors(n_block=2, n_nextn=1).items() if block_of(n) in (None, 2)}
    (path,) = tiny_gguf(tmp_path / "head.gguf", tensors, model_metadata(n_block=2, n_nextn=1))
    info = described(path)
    require_consistent(info)
    expected = {"is_head_only": True, "n_trunk_block": 2, "n_nextn": 1}
    assert expected == {name: getattr(info, name) for name in expected}


def test_missing_and_stray_blocks(tmp_path: Path) -> None:
    tensors = {n: t for n, t in model_tensors(n_block=6).items() if block_of(n) not in (1, 2, 4)}
    (path,) = tiny_gguf(tmp_path / "a.gguf", tensors, model_metadata(n_block=5))
    problems = ("llama.block_count is 5, but there are no tensors in blocks 1, 2, 4",
                "llama.block_count is 5, but there are tensors in block 5")
    assert problems == described(path).problems


def test_count_under_another_prefix(tmp_path: Path) -> None:
    (path,) = tiny_model_file(tmp_path, metadata={"general.nextn_predict_layers": 1})
    expected = "expected the key llama.nextn_predict_layers, got 'general.nextn_predict_layers', which llama.cpp does not read"
    assert [expected] == list(described(path).problems)


def test_no_block_count(tmp_path: Path) -> None:
    metadata = {k: v for k, v in model_metadata().items() if k != "llama.block_count"}
    (path,) = tiny_gguf(tmp_path / "a.gguf", model_tensors(), metadata)
    info = described(path)
    expected = "expected a key llama.block_count, got none; the tensor names tell blocks 0 to 1"
    assert [expected] == list(info.problems)
    assert info.n_block == 2


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("llama.block_count", "2", "expected llama.block_count to be of type int, got the str '2'"),
    ("llama.block_count", 100_000, "expected llama.block_count to be from 0 to 512, got 100000"),
    ("llama.nextn_predict_layers", 1.0, "llama.nextn_predict_layers to be of type int, got the float 1.0"),
    ("general.file_type", "15", "expected general.file_type to be of type int, got the str '15'"),
    ("general.name", 7, "expected general.name to be of type str, got the int 7"),
    ("tokenizer.ggml.tokens", "abc", "expected tokenizer.ggml.tokens to be of type ArrayValue, got the str 'abc'"),
    ("tokenizer.ggml.add_bos_token", 1, "tokenizer.ggml.add_bos_token to be of type bool, got the int 1"),
    ("tokenizer.chat_template", ["a"], "tokenizer.chat_template to be of type str, got an array of 1 string"),
    ("llama.expert_count", True, "llama.expert_count to be of type int, got the bool True"),
])
def test_value_of_another_type_names_the_key(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    (path,) = tiny_model_file(tmp_path, metadata={key: value})
    with pytest.raises(GgufError, match=expected):
        described(path)


def test_block_number_beyond_reason(tmp_path: Path) -> None:
    (path,) = tiny_gguf(tmp_path / "a.gguf", {"blk.99999999999999999999.attn_q.weight": ((4,), "F32")})
    with pytest.raises(GgufError, match="the number of blocks in the tensor names to be from 0 to 512"):
        described(path)


def test_not_a_model(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"key general\.architecture, got a file of general\.type 'imatrix'"):
        described(shared / "oracle" / "imatrix-tiny.gguf")
    (tmp_path / "a.gguf").write_bytes(raw_gguf())
    with pytest.raises(GgufError, match=r"key general\.architecture, got none"):
        described(tmp_path / "a.gguf")


def test_name_of_the_mix_and_fact(tmp_path: Path) -> None:
    (path,) = tiny_model_file(tmp_path, type_name="Q4_0", metadata={"general.file_type": 7})
    info = described(path)
    assert info.ftype_name == "Q8_0"
    (note,) = info.notes
    assert note.startswith("general.file_type says Q8_0, of default type Q8_0, but most parameters are Q4_0 (99.")


@pytest.mark.parametrize(("file_type", "expected"), [(1024 + 32, "BF16"), (39, "NVFP4"), (5, None)])
def test_ftype_names(tmp_path: Path, file_type: int, expected: str | None) -> None:
    (path,) = tiny_model_file(tmp_path, metadata={"general.file_type": file_type})
    assert expected == described(path).ftype_name


def test_experts_per_block(tmp_path: Path) -> None:
    (path,) = tiny_model_file(tmp_path, n_expert=4, metadata={"llama.expert_used_count": [1, 3]})
    assert described(path).n_expert_used == 3


def test_vocabulary_that_does_not_fit(tmp_path: Path) -> None:
    (path,) = tiny_model_file(tmp_path, metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    expected = "the vocabulary has 2 tokens, but token_embd.weight has 260 rows"
    assert [expected] == list(described(path).notes)


def test_layout_that_the_library_refuses(tmp_path: Path) -> None:
    path = tmp_path / "gap.gguf"
    keys = [raw_key("general.architecture", 8, raw_text("x")), raw_key("x.block_count", 4, bytes(4))]
    path.write_bytes(raw_gguf(keys, [raw_tensor("a"), raw_tensor("b", offset=256)], data=bytes(384)))
    with pytest.raises(GgufError, match=r"tensor 'b' starts at byte 416, but llama\.cpp expects it at byte 288"):
        require_consistent(described(path))


def test_big_endian_is_named(tmp_path: Path) -> None:
    (path,) = tiny_gguf(tmp_path / "a.gguf", model_tensors(), model_metadata(), big_endian=True)
    with pytest.raises(GgufError, match=r"big-endian, which llama\.cpp does not load"):
        require_consistent(described(path))


def test_split_model_is_described_whole(tmp_path: Path) -> None:
    parts = tiny_model_file(tmp_path, n_part=3)
    (whole,) = tiny_model_file(tmp_path)
    split, single = described(parts[1]), described(whole)
    require_consistent(split)
    assert (single.n_params, single.bpw, single.roles) == (split.n_params, split.bpw, split.roles)


def tiny_model_file(folder: Path, **arguments: Any) -> list[Path]:
    return tiny_model(folder / "m.gguf", **arguments)
