"""Memory by formula: hand-computed caches, what the formulas refuse, and which card holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.core.errors import InputError
from quantkit.core.units import GIB, MIB
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import (
    RESERVE_BYTES,
    ContextMemory,
    WeightMemory,
    context_memory,
    model_weights,
    needed_bytes,
    smallest_card,
)
from quantkit.spec.model import ModelInfo, describe_model
from tests.gguf_factory import model_metadata, model_tensors, tiny_gguf
from tests.gguf_factory import tiny_model as write_tiny


def describe(path: Path, **options: Any) -> ModelInfo:
    return describe_model(read_header(write_tiny(path / "m.gguf", **options)[0]))


def context(**bytes_: int) -> ContextMemory:
    return ContextMemory(**{"n_ctx": 8192, "kv_type": "F16", "kv_bytes": 0, "recurrent_bytes": 0, "compute_bytes": 0,
                            "source": "header", **bytes_})  # type: ignore[arg-type]


def test_kv_cache_of_a_llama(tmp_path: Path) -> None:
    model = describe(tmp_path)  # 2 blocks, 2 heads of 32 for keys and for values
    assert context_memory(model, 1024).kv_bytes == 1024 * 2 * (64 + 64) * 2
    assert context_memory(model, 1024, "Q8_0").kv_bytes == 1024 * 2 * (68 + 68)
    assert context_memory(model, 1024).recurrent_bytes == 0
    assert not context_memory(model, 1024).is_bound


def test_a_context_is_rounded_up_to_256(tmp_path: Path) -> None:
    model = describe(tmp_path)
    assert context_memory(model, 1).kv_bytes == context_memory(model, 256).kv_bytes
    assert context_memory(model, 257).kv_bytes == context_memory(model, 512).kv_bytes


def test_mtp_block_has_no_part_in_the_trunks_cache(tmp_path: Path) -> None:
    assert context_memory(describe(tmp_path, n_nextn=1), 256).kv_bytes == context_memory(describe(tmp_path), 256).kv_bytes


def test_heads_may_differ_from_block_to_block(tmp_path: Path) -> None:
    model = describe(tmp_path, metadata={"llama.attention.head_count_kv": [2, 1]})
    assert context_memory(model, 256).kv_bytes == 256 * (128 + 64) * 2
    with pytest.raises(InputError, match=r"expected 2 numbers in llama\.attention\.head_count_kv"):
        context_memory(describe(tmp_path, metadata={"llama.attention.head_count_kv": [2]}), 256)


def test_mla_caches_keys_alone(tmp_path: Path) -> None:
    keys = {"llama.attention.key_length_mla": 32, "llama.attention.key_length": 576, "llama.attention.head_count_kv": 1}
    assert context_memory(describe(tmp_path, metadata=keys), 256).kv_bytes == 256 * 2 * 576 * 2


def test_recurrent_state_of_the_hybrid(tiny_model: Path) -> None:
    model = describe_model(read_header(tiny_model))
    found = context_memory(model, 8192)
    assert len(model.recurrent_blocks) == 3
    assert found.recurrent_bytes == 3 * 4 * (3 * (256 + 2 * 4 * 64) + 64 * 256)
    assert found.kv_bytes == 8192 * 1 * 2 * 64 * 2 * 2  # one attention block, two heads of 64


def test_a_sliding_window_makes_it_a_bound(tmp_path: Path) -> None:
    assert context_memory(describe(tmp_path, metadata={"llama.attention.sliding_window": 128}), 8192).is_bound


def test_what_the_formulas_do_not_describe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the memory of llama cannot be told from its header \(llama\.kda\.head_dim\)"):
        context_memory(describe(tmp_path, metadata={"llama.kda.head_dim": 128}), 256)
    with pytest.raises(InputError, match=r"cannot have a KV cache of type Q4_0: expected a row divisible by 32"):
        context_memory(describe(tmp_path, metadata={"llama.attention.key_length": 10}), 256, "Q4_0")
    tensors = model_tensors() | {"blk.0.ssm_a": ((64,), "F32")}
    path = tiny_gguf(tmp_path / "r.gguf", tensors, model_metadata())[0]
    with pytest.raises(InputError, match=r"expected llama\.ssm\.conv_kernel"):
        context_memory(describe_model(read_header(path)), 256)


def test_the_input_embedding_stays_in_ram_unless_it_is_the_output(tmp_path: Path) -> None:
    untied, tied = describe(tmp_path, n_nextn=1), describe(tmp_path, tied=True)
    total = sum(t.size_bytes for t in untied.header.tensors)
    weights = model_weights(untied)
    assert (weights.ram_bytes, weights.card_bytes + weights.ram_bytes) == (64 * 260 * 2, total)
    assert weights.mtp_bytes == sum(t.size_bytes for t in untied.header.tensors if t.name.startswith("blk.2."))
    assert model_weights(tied).ram_bytes == 0


def test_a_file_above_a_cards_size_does_not_fit_it() -> None:
    """16.79 GiB of weights on a 16 GiB card, even before any context."""
    weights = WeightMemory(card_bytes=int(16.79 * GIB), ram_bytes=0, mtp_bytes=0)
    assert smallest_card(weights, context()) == 24
    assert needed_bytes(weights, context(kv_bytes=3, recurrent_bytes=4, compute_bytes=5)) == weights.card_bytes + 12 + RESERVE_BYTES


def test_cards_hold_up_to_their_last_byte() -> None:
    room = 16 * GIB - RESERVE_BYTES - 100 * MIB
    full = WeightMemory(card_bytes=room, ram_bytes=0, mtp_bytes=0)
    over = WeightMemory(card_bytes=room + 1, ram_bytes=0, mtp_bytes=0)
    assert [smallest_card(weights, context(kv_bytes=100 * MIB)) for weights in (full, over)] == [16, 24]
    assert smallest_card(WeightMemory(card_bytes=60 * GIB, ram_bytes=0, mtp_bytes=0), context()) is None


def test_records_come_back_from_json() -> None:
    record = context(kv_bytes=7)
    assert ContextMemory.from_json(record.to_json()) == record
