"""Sizes beyond 32 bits and vocabularies of 250,000 tokens: counted exactly, held in parts."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.units import GIB
from quantkit.engine.lockstep import scratch_array
from quantkit.job.memory import plan_layout
from quantkit.measure.articles import chunk_indices
from quantkit.measure.scoring import Scorer
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import context_memory
from quantkit.spec.model import describe_model
from quantkit.spec.plan_records import tensor_size
from tests.gguf_factory import raw_gguf, raw_key, raw_tensor, raw_text
from tests.job.test_memory import SETTINGS
from tests.spec.plan_models import resolve, tiny

N_VOCAB, N_CTX = 250_000, 32_768


def test_scratch_of_a_large_vocabulary_and_a_long_context_is_counted_in_64_bits(monkeypatch: pytest.MonkeyPatch,
                                                                                tmp_path: Path) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", lambda handle, start, size: asked.append(size))
    monkeypatch.setattr(np, "memmap", lambda file, kind, mode, shape: np.empty(0, kind))
    scratch_array(tmp_path, (3, N_CTX // 2 - 1, N_VOCAB))
    assert asked == [3 * 16_383 * 250_000 * 4]
    assert asked[0] > 1 << 35


def test_panels_of_a_large_vocabulary_and_a_long_context_fit_the_disk() -> None:
    model = dataclasses.replace(tiny(), n_vocab=N_VOCAB)
    settings = dataclasses.replace(SETTINGS, n_ctx=N_CTX)
    row_bytes = 16_383 * 4 * N_VOCAB
    layout = plan_layout(model, [model], settings, n_workers=2, n_chunk=100, memory_bytes=1, scratch_bytes=12 * row_bytes + 1)
    assert (layout.uses_panels, layout.panel_n_chunk) == (True, 3)  # half of the space, for two workers
    assert plan_layout(model, [model], settings, n_workers=2, n_chunk=100, memory_bytes=1, scratch_bytes=1).panel_n_chunk == 1


def test_250000_tokens_are_scored_exactly_and_in_bounded_memory() -> None:
    rng = np.random.default_rng(0)
    base, tier = (rng.normal(0, 3, (2, N_VOCAB)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, N_VOCAB, 2).astype(np.int32)
    targets[0] = N_VOCAB - 1
    scorer = Scorer()
    tracemalloc.start()
    scores = scorer.score(base, targets, [tier])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log_p = base.astype(np.longdouble) - np.log(np.exp(base.astype(np.longdouble)).sum(axis=1, keepdims=True))
    log_q = tier.astype(np.longdouble) - np.log(np.exp(tier.astype(np.longdouble)).sum(axis=1, keepdims=True))
    assert scores.base.nll == pytest.approx((-log_p[np.arange(2), targets]).astype(float), rel=1e-12)
    assert scores.tiers[0].kld == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1).astype(float), rel=1e-12)
    assert peak < 4 << 20


def test_places_of_chunks_are_counted_in_64_bits() -> None:
    """A number of chunks times twice a place among them passes 32 bits long before either does."""
    assert chunk_indices("spread", 3, 1 << 22).tolist() == [699_050, 2_097_152, 3_495_253]
    assert chunk_indices("spread", 1 << 20, 1 << 30)[-1] == (1 << 30) - 512


def test_a_header_with_250000_tokens_and_a_tensor_above_4_gib_is_read_in_bounded_memory(tmp_path: Path) -> None:
    tokens = b"".join(raw_text(f"token {i}") for i in range(N_VOCAB))
    keys = [raw_key("general.architecture", 8, raw_text("llama")), raw_key("llama.block_count", 4, struct.pack("<I", 0)),
            raw_key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, N_VOCAB) + tokens)]
    tensors = [raw_tensor("token_embd.weight", (16_384, N_VOCAB), 30),
               raw_tensor("output_norm.weight", (16_384,), 0, 16_384 * N_VOCAB * 2)]
    path = tmp_path / "huge.gguf"
    head = raw_gguf(keys, tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 16_384 * N_VOCAB * 2 + 16_384 * 4)  # a hole of 7.6 GiB
    tracemalloc.start()
    header = read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.tensors[0].size_bytes == 8_192_000_000
    assert header.tensors[1].offset == len(head) + 8_192_000_000
    assert header.file_bytes > 7 * GIB
    assert describe_model(header).n_vocab == N_VOCAB
    assert peak < 16 << 20


def test_planned_sizes_of_huge_matrices_are_exact() -> None:
    assert tensor_size((16_384, N_VOCAB, 64), "Q4_K") == 16_384 // 256 * 144 * N_VOCAB * 64
    model = tiny(more={"token_embd.weight": ((16_384, N_VOCAB), "BF16"), "output.weight": ((16_384, N_VOCAB), "BF16")})
    plan = resolve(model, default="Q8_0", ftype="Q8_0")
    large = [row.size_bytes for row in plan.rows if row.name in ("token_embd.weight", "output.weight")]
    assert large == [16_384 // 32 * 34 * N_VOCAB] * 2
    assert plan.tensor_bytes > sum(large) > 1 << 33


def test_the_cache_of_a_million_tokens_is_counted_in_64_bits() -> None:
    small, large = (context_memory(tiny(), n, "F16").kv_bytes for n in (1 << 10, 1 << 24))
    assert large == small << 14
    assert large > 1 << 32
