"""What is kept of a foreign file: its own words without anybody's folders, its types, and where on the hub it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.spec.gguf_header import read_header
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.model import describe_model
from quantkit.spec.source_facts import FileSource, HubPlace, describe_source, hub_place, said_of
from tests.gguf_factory import model_metadata, model_tensors, tiny_gguf

COMMIT = "0123456789abcdef" * 2 + "01234567"


def test_a_file_is_described_by_its_header(tmp_path: Path) -> None:
    tensors = model_tensors(n_block=2, n_embd=256, n_ff=256) | {"blk.0.ffn_down.weight": ((256, 256), "Q4_K"),
                                                               "blk.1.ffn_down.weight": ((256, 256), "Q6_K")}
    keys = model_metadata(n_block=2, n_embd=256, n_ff=256) | {
        "general.name": "Their model", "general.quantized_by": "someone", "general.file_type": 15,
        "general.base_model.0.repo_url": "https://huggingface.co/Owner/Base", "quantize.imatrix.file": "/home/user/imatrix.gguf"}
    files = tiny_gguf(tmp_path / "their.gguf", tensors, keys, n_part=2)
    model = describe_model(read_header(files[0]))
    source = describe_source(model, "a" * 64)
    assert (source.n_parts, source.ftype, source.repository, source.revision) == (2, "Q4_K_M", None, None)
    assert source.said["general.name"] == "Their model"
    assert source.said["general.file_type"] == "15"
    assert source.said["general.base_model.0.repo_url"] == "https://huggingface.co/Owner/Base"
    assert source.said["quantize.imatrix.file"] == "imatrix.gguf"
    assert sum(count.n_tensors for count in source.types) == len(model.header.tensors)
    assert sum(count.size_bytes for count in source.types) == sum(t.size_bytes for t in model.header.tensors)
    assert {(c.type, c.n_tensors, c.n_params) for c in source.kinds if c.kind == "ffn_down"} == {
        ("Q4_K", 1, 65536), ("Q6_K", 1, 65536)}
    assert not [c for c in source.kinds if "norm" in c.kind]
    assert record_from_json(FileSource, record_to_json(source)) == source


@pytest.mark.parametrize(("value", "expected"), [
    ("/home/user/models/Model", "Model"), ("from /mnt/disk/Model and more", "from Model and more"),
    ("file:///home/user/Model", "Model"), ("~/models/Model", "Model"), ("C:\\Users\\someone\\Model", "Model"),
    ("https://huggingface.co/Owner/Model", "https://huggingface.co/Owner/Model"), ("text and/or chat", "text and/or chat"),
    ("Owner/Model", "Owner/Model"), ("a\nb\x1b[31m\u202e", "a b [31m"), ("x" * 999, "x" * 299 + "…"),
])
def test_texts_lose_folders_and_nothing_else(value: str, expected: str) -> None:
    assert said_of({"general.name": value}) == {"general.name": expected}


def test_only_known_keys_of_a_plain_kind_are_kept() -> None:
    assert said_of({"general.name": ["a"], "general.file_type": True, "tokenizer.chat_template": "{{ x }}",
                    "general.size_label": "", "general.base_model.100.name": "x",
                    "quantize.imatrix.dataset": "C:\\data\\calibration.txt"}) == {"quantize.imatrix.dataset": "calibration.txt"}
    many = {f"general.base_model.{i}.name": "x" for i in range(99)}
    assert len(said_of(many)) == 40


def test_a_file_in_the_hubs_cache_has_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--an-owner--A.Model-GGUF" / "snapshots" / COMMIT / "Q4_K_M"
    assert hub_place(folder / "model.gguf") == HubPlace("an-owner/A.Model-GGUF", COMMIT)
    assert hub_place(tmp_path / "snapshots" / COMMIT / "model.gguf") == HubPlace(None, None)


def test_a_download_of_the_hubs_client_has_its_commit(tmp_path: Path) -> None:
    note = tmp_path / ".cache" / "huggingface" / "download" / "Q4_K_M" / "model.gguf.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\netag\n1.0\n")
    assert hub_place(tmp_path / "Q4_K_M" / "model.gguf") == HubPlace(None, COMMIT)
    note.write_text("<script>")
    assert hub_place(tmp_path / "Q4_K_M" / "model.gguf") == HubPlace(None, None)
