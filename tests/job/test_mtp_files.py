"""Split, strip and graft: tensor bytes and metadata are where they were, counts are right on both sides, inputs stay whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from quantkit.core.errors import GgufError, InputError
from quantkit.engine.draft_session import generate, open_draft, open_plain
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.mtp_files import graft_head, split_model, strip_head
from quantkit.spec.gguf_header import ArrayValue, GgufHeader, read_header
from quantkit.spec.gguf_raw import read_pairs, sources_of, tensor_bytes
from quantkit.spec.model import describe_model
from tests.mtp_factory import headed_model


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def data_of(path: Path) -> dict[str, bytes]:
    return {source.info.name: b"".join(tensor_bytes(source)) for source in sources_of(read_header(path))}


def raw_pairs(header: GgufHeader) -> dict[str, bytes]:
    return {pair.key: pair.data for pair in read_pairs(header)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return headed_model(tmp_path / "model.gguf")[0]


def test_trunk_and_head_hold_the_tensors_they_need(model: Path, tmp_path: Path) -> None:
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    whole, trunk, head = data_of(model), data_of(tmp_path / "trunk.gguf"), data_of(tmp_path / "head.gguf")
    assert trunk == {name: data for name, data in whole.items() if not name.startswith("blk.2.")}
    assert head == {name: data for name, data in whole.items() if not name.startswith(("blk.0.", "blk.1."))}
    assert [name for name in whole if name in trunk] == list(trunk)


def test_counts_are_right_on_both_sides_and_all_else_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    trunk, head = describe_model(read_header(tmp_path / "trunk.gguf")), describe_model(read_header(tmp_path / "head.gguf"))
    assert (trunk.n_block, trunk.n_nextn, trunk.problems, trunk.is_head_only) == (2, 0, (), False)
    assert (head.n_block, head.n_nextn, head.problems, head.is_head_only) == (3, 1, (), True)
    assert "qwen35.nextn_predict_layers" not in trunk.header.metadata
    assert head.header.metadata["qwen35.nextn_predict_layers"] == 1
    before, after = raw_pairs(read_header(model)), raw_pairs(trunk.header)
    assert raw_pairs(head.header) == before
    for pairs in (before, after):
        del pairs["qwen35.block_count"]
    del before["qwen35.nextn_predict_layers"]
    assert list(after.items()) == list(before.items())


@pytest.mark.parametrize("n_nextn", [1, 3])
def test_split_then_graft_is_the_same_file(tmp_path: Path, n_nextn: int) -> None:
    """The writer lays files out as gguf's does, so equal tensors, metadata and order are equal bytes."""
    model = headed_model(tmp_path / "model.gguf", n_nextn=n_nextn)[0]
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    made = graft_head(tmp_path / "trunk.gguf", tmp_path / "head.gguf", tmp_path / "again.gguf")
    assert sha256(tmp_path / "again.gguf") == sha256(model)
    assert (made.size_bytes, made.notes) == (model.stat().st_size, ())


@pytest.mark.slow
def test_real_model_survives_the_round_trip(tiny_model: Path, tmp_path: Path) -> None:
    split_model(tiny_model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    graft_head(tmp_path / "trunk.gguf", tmp_path / "head.gguf", tmp_path / "again.gguf")
    assert sha256(tmp_path / "again.gguf") == sha256(tiny_model)


def test_strip_is_the_trunk_of_split(model: Path, tmp_path: Path) -> None:
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    strip_head(model, tmp_path / "stripped.gguf")
    assert sha256(tmp_path / "stripped.gguf") == sha256(tmp_path / "trunk.gguf")


def test_shards_are_understood_and_become_single_files(tmp_path: Path) -> None:
    whole = headed_model(tmp_path / "whole.gguf")[0]
    shards = headed_model(tmp_path / "m.gguf", n_part=3)
    split_model(shards[1], tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    graft_head(tmp_path / "trunk.gguf", tmp_path / "head.gguf", tmp_path / "again.gguf")
    assert data_of(tmp_path / "again.gguf") == data_of(whole)
    assert not [key for key in read_header(tmp_path / "again.gguf").metadata if key.startswith("split.")]
    trunk_shards = headed_model(tmp_path / "t.gguf", n_nextn=0, n_part=2)
    graft_head(trunk_shards[0], tmp_path / "head.gguf", tmp_path / "from-shards.gguf")
    assert describe_model(read_header(tmp_path / "from-shards.gguf")).n_nextn == 1


def test_values_per_block_are_cut_for_the_trunk_and_come_back(tmp_path: Path) -> None:
    """llama.cpp refuses a file whose array is not as long as its block count; rope sections are no blocks."""
    keys = {"qwen35.attention.head_count_kv": [1, 2, 3, 4], "qwen35.attention.recurrent_layers": [True, True, True, False],
            "qwen35.rope.dimension_sections": [3, 3, 2, 0]}
    model = headed_model(tmp_path / "model.gguf", n_block=3, metadata=keys)[0]
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    trunk = read_header(tmp_path / "trunk.gguf").metadata
    found = {key: value.values for key in keys if isinstance(value := trunk[key], ArrayValue)}
    assert found == {"qwen35.attention.head_count_kv": (1, 2, 3), "qwen35.attention.recurrent_layers": (True, True, True),
                     "qwen35.rope.dimension_sections": (3, 3, 2, 0)}
    graft_head(tmp_path / "trunk.gguf", tmp_path / "head.gguf", tmp_path / "again.gguf")
    assert sha256(tmp_path / "again.gguf") == sha256(model)


def test_matrices_of_the_heads_own_stay_with_it(tmp_path: Path) -> None:
    """Huge ones, which patterns for `output` and `token_embd` miss."""
    own = {"blk.2.nextn.embed_tokens.weight": ((64, 260), "BF16"), "blk.2.nextn.shared_head_head.weight": ((64, 260), "BF16")}
    model = headed_model(tmp_path / "model.gguf", tensors=own)[0]
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    assert own.keys() <= data_of(tmp_path / "head.gguf").keys()
    assert own.keys().isdisjoint(data_of(tmp_path / "trunk.gguf"))


def test_other_alignments_are_kept(tmp_path: Path) -> None:
    model = headed_model(tmp_path / "model.gguf", alignment=64)[0]
    split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    trunk = read_header(tmp_path / "trunk.gguf")
    assert trunk.alignment == 64
    assert all(t.offset % 64 == 0 for t in trunk.tensors)


def test_graft_takes_the_trunks_side_of_what_both_hold(tmp_path: Path) -> None:
    keys = {"quantize.imatrix.file": "imatrix.gguf"}
    trunk = headed_model(tmp_path / "trunk.gguf", n_nextn=0, type_name="Q8_0", metadata=keys)[0]
    whole = headed_model(tmp_path / "whole.gguf", seed=5)[0]
    made = graft_head(trunk, whole, tmp_path / "out.gguf")
    out = data_of(tmp_path / "out.gguf")
    assert out == {**data_of(trunk), **{n: d for n, d in data_of(whole).items() if n.startswith("blk.2.")}}
    assert read_header(tmp_path / "out.gguf").metadata["quantize.imatrix.file"] == "imatrix.gguf"
    assert [note.split(":")[0] for note in made.notes] == ["token_embd.weight", "output.weight"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"n_nextn": 0}, "no NextN block .* nothing to split off"),
    ({"metadata": {"qwen35.nextn_predict_layers": 2}}, "nextn_predict_layers is 2 and qwen35.block_count is 3"),
    ({"metadata": {"qwen35.nextn_predict_layers": None}}, "nextn_predict_layers is 0 and qwen35.block_count is 3"),
    ({"metadata": {"qwen35.block_count": 2}}, "block_count is 2"),
    ({"n_nextn": 0, "metadata": {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 3}}, "counted without being there"),
])
def test_models_without_a_sound_head_are_refused(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    model = headed_model(tmp_path / "model.gguf", **changes)[0]  # type: ignore[arg-type]
    with pytest.raises((InputError, GgufError), match=words):
        split_model(model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_head_alone_cannot_be_split(model: Path, tmp_path: Path) -> None:
    split_model(model, None, tmp_path / "head.gguf")
    with pytest.raises(InputError, match="found only an MTP head"):
        strip_head(tmp_path / "head.gguf", tmp_path / "trunk.gguf")


@pytest.mark.parametrize(("changes", "words"), [
    ({"n_block": 3}, "trunk blocks 2, found 3"),
    ({"arch": "qwen35moe"}, "architecture qwen35, found qwen35moe"),
    ({"n_embd": 32}, "n_embd 64, found 32"),
    ({"metadata": {"tokenizer.ggml.tokens": ["a", "c", "ü"]}}, "tokenizer.ggml.tokens differs"),
    ({"metadata": {"tokenizer.ggml.tokens": ["a", "b"]}}, "vocabulary size 3, found 2"),
    ({"alignment": 64}, "alignment 32, found 64"),
    ({"n_nextn": 0}, "expected an MTP head, found no NextN block"),
])
def test_a_head_of_another_model_is_refused(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    trunk = headed_model(tmp_path / "trunk.gguf", n_nextn=0)[0]
    other = headed_model(tmp_path / "other.gguf", **changes)[0]  # type: ignore[arg-type]
    with pytest.raises(InputError, match=words):
        graft_head(trunk, other, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_trunk_that_has_a_head_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="strip it first"):
        graft_head(model, model, tmp_path / "out.gguf")


def test_no_input_is_written_over_by_any_path(tmp_path: Path) -> None:
    shards = headed_model(tmp_path / "m.gguf", n_part=3)
    before = [sha256(path) for path in shards]
    link = tmp_path / "link.gguf"
    link.symlink_to(shards[1])
    for trunk, head in ((shards[2], tmp_path / "h.gguf"), (tmp_path / "t.gguf", shards[1]), (link, tmp_path / "h.gguf")):
        with pytest.raises(InputError, match="would destroy the input"):
            split_model(shards[0], trunk, head, force=True)
    assert [sha256(path) for path in shards] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(p.name for p in shards), "link.gguf"])


def test_trunk_and_head_cannot_be_one_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match="expected two files for trunk and head"):
        split_model(model, tmp_path / "x.gguf", tmp_path / "sub" / ".." / "x.gguf")


def test_existing_outputs_need_force(model: Path, tmp_path: Path) -> None:
    (tmp_path / "trunk.gguf").write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        strip_head(model, tmp_path / "trunk.gguf")
    assert (tmp_path / "trunk.gguf").read_bytes() == b"mine"
    strip_head(model, tmp_path / "trunk.gguf", force=True)
    assert describe_model(read_header(tmp_path / "trunk.gguf")).n_nextn == 0


@pytest.mark.engine
def test_both_files_load_in_llama_cpp_and_decode_as_the_whole_did(tiny_model: Path, tmp_path: Path) -> None:
    split_model(tiny_model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    settings = ContextSettings(n_ctx=128, n_batch=128, n_ubatch=128, type_k="F16", type_v="F16", flash_attn=True,
                               use_extra_bufts=True, n_threads=1)
    prompt = [260, 220, 16, 24, 23, 15, 82]
    texts, steps = [], []
    with WorkerPool(1) as pool:
        for trunk, head in ((tiny_model, tiny_model), (tmp_path / "trunk.gguf", tmp_path / "head.gguf")):
            pool.call("open", open_draft, trunk=trunk, head=head, settings=settings, offload=Offload(), n_draft=3)
            found = pool.call("run", generate, prompt=_ids(prompt), n_predict=24, n_draft=3, sampler=None)
            texts.append(found.tokens)
            steps.append(found.steps)
        pool.call("open", open_plain, trunk=tmp_path / "trunk.gguf", settings=settings, offload=Offload())
        texts.append(pool.call("run", generate, prompt=_ids(prompt), n_predict=24, n_draft=0, sampler=None).tokens)
    assert texts[0] == texts[1] == texts[2]
    assert steps[0] == steps[1]


def _ids(tokens: list[int]) -> object:
    import numpy as np

    return np.array(tokens, np.int32)
