"""Splitting by bytes and merging: nothing above the limit, nothing lost, nothing overwritten."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.core.errors import GgufError, InputError
from quantkit.engine.library import load_library
from quantkit.engine.model import Model
from quantkit.engine.pool import WorkerPool
from quantkit.engine.worker import WorkerState
from quantkit.job.gguf_rewrite import tensor_sha256
from quantkit.job.progress import Silent
from quantkit.job.shards import HUB_LIMIT_BYTES, deal_tensors, merge_file, shard_path, split_file
from quantkit.job.standalone import quantize_to_file
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.gguf_raw import read_pairs, sources_of
from quantkit.spec.protocol import load_protocol
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.gguf_factory import tiny_gguf
from tests.gguf_factory import tiny_model as write_tiny

SIZE = 65_536


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "a model.gguf")[0]


def hashes(path: Path) -> list[tuple[str, str]]:
    return [(source.info.name, tensor_sha256(source)) for source in sources_of(read_header(path))]


def split(model: Path, max_bytes: int = SIZE, prefix: str = "shard", **options: Any) -> list[Path]:
    return [done.path for done in split_file(model, model.with_name(prefix), max_bytes, **options)]


def test_every_shard_is_below_the_limit_and_named_as_llama_cpp_does(model: Path) -> None:
    shards = split(model)
    assert [p.name for p in shards] == [f"shard-{i}-of-00005.gguf" for i in ("00001", "00002", "00003", "00004", "00005")]
    assert max(p.stat().st_size for p in shards) <= SIZE
    metadata = [read_header(p).metadata for p in shards]  # from any shard: that of the first
    assert {(m["split.no"], m["split.count"], m["split.tensors.count"]) for m in metadata} == {(0, 5, 21)}
    assert read_header(shards[3]).parts == tuple(shards)


def test_merging_the_shards_gives_the_file_back(model: Path, tmp_path: Path) -> None:
    shards = split(model)
    assert merge_file(shards[0], tmp_path / "merged.gguf").size_bytes == model.stat().st_size
    assert (tmp_path / "merged.gguf").read_bytes() == model.read_bytes()


def test_any_shard_names_the_model(model: Path, tmp_path: Path) -> None:
    shards = split(model)
    merge_file(shards[2], tmp_path / "merged.gguf")
    assert hashes(tmp_path / "merged.gguf") == hashes(model)


def test_shards_may_be_dealt_anew(model: Path) -> None:
    first = split(model)
    again = split(first[1], 2 * SIZE, "other")
    assert len(again) < len(first)
    assert hashes(again[0]) == hashes(model)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_bytes=st.integers(53_000, 260_000), alignment=st.sampled_from([8, 32, 64]), seed=st.integers(0, 3))
@pytest.mark.slow
def test_law_of_split_and_merge(tmp_path: Path, max_bytes: int, alignment: int, seed: int) -> None:
    """Whatever the limit: below it, in order, and merged again the same metadata and bytes."""
    folder = tmp_path / f"{max_bytes}-{alignment}-{seed}"
    folder.mkdir(exist_ok=True)
    rows = np.random.default_rng(seed).integers(1, 400, 12)
    tensors = {f"t{i}.weight": ((32, int(n)), ["BF16", "F32", "Q8_0"][i % 3]) for i, n in enumerate(rows)}
    [model] = tiny_gguf(folder / "m.gguf", tensors, {"x": "y" * 1000}, alignment=alignment)
    if model.stat().st_size + 200 < max_bytes:  # the three split keys included
        with pytest.raises(InputError, match="fits one file"):
            split(model, max_bytes, force=True)
        return
    if model.stat().st_size <= max_bytes + 200:
        return
    shards = split(model, max_bytes, force=True)
    assert max(p.stat().st_size for p in shards) <= max_bytes
    merge_file(shards[0], folder / "merged.gguf", force=True)
    assert (folder / "merged.gguf").read_bytes() == model.read_bytes()


def test_one_tensor_above_the_limit_is_refused_by_name(model: Path) -> None:
    with pytest.raises(InputError, match=r"expected every tensor of .* to fit a shard of 20000 bytes, got token_embd\.weight"):
        split(model, 20_000)
    assert list(model.parent.iterdir()) == [model]


def test_metadata_above_the_limit_are_refused(tmp_path: Path) -> None:
    [model] = tiny_gguf(tmp_path / "m.gguf", {"a.weight": ((32, 4), "F32"), "b.weight": ((32, 4), "F32")}, {"x": "y" * 5000})
    with pytest.raises(InputError, match=r"expected the metadata of .* to fit a shard of 2000 bytes"):
        split(model, 2000)


def test_a_model_that_fits_is_not_split(model: Path) -> None:
    with pytest.raises(InputError, match="fits one file: there is nothing to split"):
        split(model, 10**9)


def test_a_single_file_is_not_merged(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a single file: there is nothing to merge"):
        merge_file(model, tmp_path / "out.gguf")


def test_a_missing_shard_is_named(model: Path, tmp_path: Path) -> None:
    shards = split(model)
    shards[1].unlink()
    with pytest.raises(GgufError, match=r"missing shard-00002-of-00005\.gguf"):
        merge_file(shards[0], tmp_path / "out.gguf")


def test_inputs_and_their_siblings_are_never_overwritten(model: Path) -> None:
    """Writing onto shard 2's name destroyed it."""
    shards = split(model)
    before = [p.read_bytes() for p in shards]
    for shard in shards:
        with pytest.raises(InputError, match="would destroy the input"):
            merge_file(shards[0], shard, force=True)
    with pytest.raises(InputError, match="would destroy the input"):
        split(shards[0], SIZE, force=True)  # the same names again
    assert [p.read_bytes() for p in shards] == before


def test_existing_outputs_stay_unless_forced(model: Path, tmp_path: Path) -> None:
    shards = split(model)
    shards[1].write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        split(model)
    assert shards[1].read_bytes() == b"mine"
    assert split(model, force=True) == shards
    assert hashes(shards[0]) == hashes(model)


def test_a_failure_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.job import shards

    def fail(path: Path, shard: shards.Shard, expected: object) -> None:
        if shard.pairs[0].key == "split.no":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_check_shard", fail)
    with pytest.raises(Exception, match="the disk is full"):
        split(model)
    assert list(model.parent.iterdir()) == [model]


def test_the_hubs_limit_is_decimal(tmp_path: Path) -> None:
    """49 GiB is above 50 GB; one byte above the limit is one shard more."""
    assert HUB_LIMIT_BYTES == 50_000_000_000 < 49 * 2**30
    [path] = tiny_gguf(tmp_path / "m.gguf", {"a.weight": ((32, 4), "F32"), "b.weight": ((32, 4), "F32")})
    header = read_header(path)
    half = (HUB_LIMIT_BYTES - 1024) // 2 // 32 * 32
    assert [len(s.tensors) for s in deal_tensors(enlarged(header, half, HUB_LIMIT_BYTES - half), read_pairs(header),
                                                 HUB_LIMIT_BYTES)] == [1, 1]
    with pytest.raises(InputError, match="fits one file"):
        deal_tensors(enlarged(header, half, half), read_pairs(header), HUB_LIMIT_BYTES)


def enlarged(header: GgufHeader, *sizes: int) -> GgufHeader:
    """A header that claims larger tensors, as one of a model that no test can write would."""
    kind = TENSOR_TYPES["F32"]
    tensors = tuple(dataclasses.replace(t, type=kind, size_bytes=n) for t, n in zip(header.tensors, sizes, strict=True))
    return dataclasses.replace(header, tensors=tensors)


def test_names_keep_dots_and_drop_one_suffix() -> None:
    assert shard_path(Path("d/m.v1.5.gguf"), 1, 12).as_posix() == "d/m.v1.5-00002-of-00012.gguf"
    assert shard_path(Path("d/m.v1.5"), 11, 12).as_posix() == "d/m.v1.5-00012-of-00012.gguf"


def load_and_count(state: WorkerState, *, path: Path) -> int:
    """Command: load a model with llama.cpp and count its parameters."""
    model = Model(path)
    try:
        return int(load_library().llama_model_n_params(model.handle))
    finally:
        model.close()


@pytest.mark.engine
def test_llama_cpp_loads_the_shards_and_the_merged_file(model: Path, tmp_path: Path) -> None:
    shards = split(model)
    merge_file(shards[0], tmp_path / "merged.gguf")
    with WorkerPool() as pool:
        counts = [pool.call("load", load_and_count, path=path) for path in (model, shards[0], tmp_path / "merged.gguf")]
    assert counts == [sum(t.n_elements for t in read_header(model).tensors)] * 3


@pytest.mark.engine
def test_a_tier_of_a_split_base_is_a_plain_single_file(tmp_path: Path) -> None:
    """Split keys that stay make the output an "invalid split file" (llama.cpp#6548)."""
    [whole] = write_tiny(tmp_path / "m-BF16.gguf", n_embd=256, n_ff=256)
    shards = split(whole, 600_000)
    protocol = load_protocol("demo-v1")
    outputs = [quantize_to_file(base, protocol, "Q8_0", tmp_path / f"{i}.gguf", Silent())
               for i, base in enumerate((whole, shards[0]))]
    assert outputs[0].sha256 == outputs[1].sha256
    assert not [key for key in read_header(tmp_path / "1.gguf").metadata if key.startswith("split.")]
    shards[1].unlink()
    with pytest.raises(GgufError, match=shards[1].name):
        quantize_to_file(shards[0], protocol, "Q8_0", tmp_path / "2.gguf", Silent())
