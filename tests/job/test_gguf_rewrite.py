"""Rewriting metadata leaves every tensor's bytes alone, and a copy that went wrong is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.core.errors import EngineError, InputError
from quantkit.job import gguf_rewrite
from quantkit.job.gguf_rewrite import Rewritten, number_pair, rewrite_gguf, tensor_sha256, text_pair
from quantkit.spec.gguf_header import read_header
from quantkit.spec.gguf_raw import TensorSource, read_pairs, sources_of, tensor_bytes
from tests.gguf_factory import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "a model.gguf", metadata={"tokenizer.chat_template": "{{ old }}", "general.tags": ["a", "b"]})[0]


def hashes(path: Path) -> dict[str, str]:
    return {source.info.name: tensor_sha256(source) for source in sources_of(read_header(path))}


def test_a_new_chat_template_leaves_every_tensor_alone(model: Path, tmp_path: Path) -> None:
    """A rewrite of metadata once shrank tensors in a file that still loaded (ik_llama.cpp#2443)."""
    target = tmp_path / "new.gguf"
    done = rewrite_gguf(read_header(model), target, set_pairs=[text_pair("tokenizer.chat_template", "{{ new ü }}" * 100)])
    assert done == Rewritten(target, 21, target.stat().st_size)
    assert hashes(target) == hashes(model)
    before, after = read_header(model).metadata, read_header(target).metadata
    assert after == {**before, "tokenizer.chat_template": "{{ new ü }}" * 100}
    assert list(after) == list(before)


def test_without_changes_the_bytes_are_the_same(model: Path, tmp_path: Path) -> None:
    rewrite_gguf(read_header(model), tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == model.read_bytes()


def test_keys_are_dropped_and_added_and_tensors_left_out(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "less.gguf"
    rewrite_gguf(read_header(model), target, keep=lambda name: not name.startswith("blk.1."), drop_keys=["general.tags"],
                 set_pairs=[number_pair("llama.block_count", "uint32", 1), number_pair("extra", "int32", -7)])
    header = read_header(target)
    assert "general.tags" not in header.metadata
    assert (header.metadata["llama.block_count"], header.metadata["extra"]) == (1, -7)
    assert hashes(target) == {name: h for name, h in hashes(model).items() if not name.startswith("blk.1.")}


def test_every_other_pair_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    rewrite_gguf(read_header(model), tmp_path / "x.gguf", set_pairs=[text_pair("general.name", "other")])
    old, new = (dict(read_pairs(read_header(path))) for path in (model, tmp_path / "x.gguf"))
    assert {key for key in old if old[key] != new[key]} == {"general.name"}


def test_a_byte_that_is_lost_on_the_way_is_named_and_nothing_is_left(model: Path, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(source: TensorSource) -> Iterator[bytes]:  # what comes back from the disk, not what went there
        for piece in tensor_bytes(source):
            yield piece[:-1] + bytes([piece[-1] ^ 1]) if source.info.name == "blk.1.ffn_up.weight" else piece

    monkeypatch.setattr(gguf_rewrite, "tensor_bytes", faulty)
    with pytest.raises(EngineError, match=r"bytes of blk\.1\.ffn_up\.weight in .* are not those of its source"):
        rewrite_gguf(read_header(model), tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("name", ["a model.gguf", "sub/../a model.gguf", "link.gguf", "hard.gguf"])
def test_the_source_is_never_the_target(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.gguf").symlink_to(model)
    (tmp_path / "hard.gguf").hardlink_to(model)
    before = model.read_bytes()
    with pytest.raises(InputError, match="would destroy the input"):
        rewrite_gguf(read_header(model), tmp_path / name, force=True)
    assert model.read_bytes() == before
