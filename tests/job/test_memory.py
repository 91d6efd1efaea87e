"""The layout of an audit: groups as large as memory allows, panels where nothing fits beside base."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantkit.engine.settings import ContextSettings
from quantkit.job.memory import free_memory_bytes, plan_layout
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from tests.gguf_factory import tiny_model

SETTINGS = ContextSettings(n_ctx=512, n_batch=512, n_ubatch=512, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return describe_model(read_header(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf")[0]))


def cost_of(model: ModelInfo) -> int:
    """The bound of base and one tier, halved."""
    return plan_layout(model, [model], SETTINGS, n_workers=1, n_chunk=10, memory_bytes=1 << 40).bound_bytes // 2


def test_everything_sits_together_where_memory_allows(model: ModelInfo) -> None:
    layout = plan_layout(model, [model] * 5, SETTINGS, n_workers=2, n_chunk=10, memory_bytes=1 << 40)
    assert layout.groups == ((0, 1, 2, 3, 4),)
    assert not layout.uses_panels
    assert "base and 5 tiers side by side" in layout.describe()


def test_groups_are_as_large_as_memory_allows(model: ModelInfo) -> None:
    one = cost_of(model)
    layout = plan_layout(model, [model] * 5, SETTINGS, n_workers=1, n_chunk=10, memory_bytes=3 * one)
    assert layout.groups == ((0, 1), (2, 3), (4,))
    assert layout.bound_bytes == 3 * one


def test_a_group_can_be_limited(model: ModelInfo) -> None:
    assert plan_layout(model, [model] * 3, SETTINGS, n_workers=1, n_chunk=10, memory_bytes=1 << 40, max_group=1).groups == (
        (0,), (1,), (2,))


def test_base_rows_go_to_disk_where_nothing_fits_beside_base(model: ModelInfo) -> None:
    layout = plan_layout(model, [model] * 3, SETTINGS, n_workers=2, n_chunk=10, memory_bytes=cost_of(model),
                         scratch_bytes=1 << 40)
    assert layout.uses_panels
    assert layout.panel_n_chunk == 5  # all chunks of each worker
    assert layout.groups == ((0, 1, 2),)
    row_bytes = 255 * 4 * (model.n_vocab or 0)
    small = plan_layout(model, [model] * 3, SETTINGS, n_workers=2, n_chunk=10, memory_bytes=1, scratch_bytes=8 * row_bytes)
    assert small.panel_n_chunk == 2  # half of the free space, shared by two workers


def test_the_bound_grows_with_workers_by_private_memory_alone(model: ModelInfo) -> None:
    one, two = (plan_layout(model, [model], SETTINGS, n_workers=n, n_chunk=10, memory_bytes=1 << 40).bound_bytes for n in (1, 2))
    assert one < two < 2 * one
    assert 2 * one - two == 2 * model.header.file_bytes  # mapped once


def test_a_context_of_250k_tokens_vocabulary_and_32k_positions_needs_a_block_and_not_a_chunk(model: ModelInfo) -> None:
    large = dataclasses.replace(model, n_vocab=250_000)
    layout = plan_layout(large, [large], dataclasses.replace(SETTINGS, n_ctx=32_768), n_workers=1, n_chunk=4, memory_bytes=1 << 40)
    assert layout.bound_bytes < 2 * (512 * 250_000 * 4 * 2 + (1 << 27))


def test_free_memory_is_told(tmp_path: Path) -> None:
    assert free_memory_bytes() > 1 << 26
