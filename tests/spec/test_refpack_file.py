"""The container of a reference pack: read by others' tools, written to the same bytes, and every kind of damage told by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.spec.refpack_file import ChunkBytes, PackContent, Refpack, seal, write_refpack
from quantkit.spec.refpack_records import (
    FORMAT,
    PACK_ROW_DTYPE,
    PackArithmetic,
    PackBase,
    PackFacts,
    PackReference,
    reference_notes,
)

N_CTX, N_SCORED = 8, 3
CHUNKS = [ChunkBytes(b"heads of one", b""), ChunkBytes(b"heads of the other", b"tails")]


def make_content() -> PackContent:
    rows = np.zeros((2, N_SCORED), PACK_ROW_DTYPE)
    rows["nll"], rows["n_head"] = np.arange(6).reshape(2, 3), 4
    offsets = np.cumsum([[0, 0], *([len(part) for part in chunk] for chunk in CHUNKS)], axis=0)
    hashes = np.stack([np.frombuffer(hashlib.sha256(b"".join(chunk)).digest(), np.uint8) for chunk in CHUNKS])
    tokens, chunks, articles = np.arange(40, dtype="<i4"), np.array([1, 4], "<i4"), np.array([0, 1], "<i4")
    return PackContent(tokens, chunks, articles, rows, offsets.astype("<i8"), hashes)


def make_facts(content: PackContent) -> PackFacts:
    tokens_sha256 = hashlib.sha256(content.tokens.tobytes()).hexdigest()
    return PackFacts(
        format=FORMAT, version=1, protocol_name="p-v1", eval_id="e" * 64,
        base=PackBase(file="base.gguf", sha256="b" * 64, size_bytes=5, type="BF16", architecture="llama", n_params=7, bpw=16.0,
                      bpw_core=None),
        corpus_name="text", corpus_sha256="c" * 64, token_ids_sha256=tokens_sha256, n_vocab=100,
        add_bos=False, n_ctx=N_CTX, n_chunk_total=5, mass=0.999, max_ids=50, full_every=4, content_sha256="",
        arithmetic=PackArithmetic(backend="CPU", llama_cpp_python="0", llama_cpp_commit="c", system_info="s", n_gpu_layers=0,
                                  main_gpu=0, tensor_split=(0.5, 0.5)))


def write(path: Path, content: PackContent | None = None, **changes: Any) -> Path:
    content = content or make_content()
    with path.open("w+b") as file:
        write_refpack(file, dataclasses.replace(make_facts(content), **changes), content, CHUNKS)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    pack = Refpack(write(tmp_path / "ref.safetensors"))
    expected = make_content()
    assert pack.facts == seal(make_facts(expected), expected)
    for name in PackContent._fields:
        assert np.array_equal(getattr(pack.content, name), getattr(expected, name))
    assert pack.chunk_bytes(1) == CHUNKS[0]
    assert pack.chunk_bytes(4) == CHUNKS[1]
    assert pack.chunk_rows(4)["nll"].tolist() == [3, 4, 5]
    pack.check_rows()


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


def test_the_safetensors_library_reads_a_pack(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = write(tmp_path / "ref.safetensors")
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["eval_id"] == "e" * 64
        assert json.loads(file.metadata()["base"])["sha256"] == "b" * 64
        assert file.get_tensor("row.nll").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor("heads").tobytes() == b"heads of oneheads of the other"


def test_every_tensor_lies_at_a_multiple_of_its_alignment(tmp_path: Path) -> None:
    data = write(tmp_path / "ref.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    sizes = {"F64": 8, "I64": 8, "I32": 4, "U8": 1}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1:] if at >= 0 else flip(len(data) + at)(data)


@pytest.mark.parametrize(("damage", "named"), [
    (lambda data: data[:-1], "the file has"),
    (lambda data: data + b"x", "the file has"),
    (lambda data: data[:4], "is not a reference pack"),
    (lambda data: b"GGUF" + data[4:], "is not a reference pack"),
    (lambda data: data.replace(b'"n_vocab":"100"', b'"n_vocab":"1e2"'), "its metadata cannot be read"),
    (lambda data: data.replace(b'"version":"1"', b'"version":"2"'), "of version 2, expected 1"),
    (lambda data: data.replace(FORMAT.encode(), b"another-product."), "found another-product"),
    (lambda data: data.replace(b'"I64"', b'"I65"'), "its header cannot be read"),
    (lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[8,'), "its header cannot be read"),
    (lambda data: data.replace(b'"mass":"0.999"', b'"mass":"0.99 "'), "its facts and numbers do not have the hash"),
    (lambda data: data.replace(b"b" * 64, b"c" * 64), "its facts and numbers do not have the hash"),
    (lambda data: data.replace(np.float64(5).tobytes(), np.float64(6).tobytes()), "its facts and numbers do not have the hash"),
], ids=["cut", "longer", "tiny", "gguf", "metadata", "version", "format", "dtype", "offset", "mass", "base", "numbers"])
def test_damage_is_told_by_name(tmp_path: Path, damage: Callable[[bytes], bytes], named: str) -> None:
    path = write(tmp_path / "ref.safetensors")
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    with pytest.raises(InputError, match=named):
        Refpack(path)


def test_a_damaged_row_names_its_chunk(tmp_path: Path) -> None:
    path = write(tmp_path / "ref.safetensors")
    path.write_bytes(flip(-1)(path.read_bytes()))
    pack = Refpack(path)
    assert pack.chunk_bytes(1) == CHUNKS[0]
    with pytest.raises(InputError, match="is damaged: the rows of chunk 4 do not have their hash"):
        pack.chunk_bytes(4)
    with pytest.raises(InputError, match="chunk 4"):
        pack.check_rows()


def test_other_tokens_than_the_metadata_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its token ids do not have the hash"):
        Refpack(write(tmp_path / "ref", token_ids_sha256="0" * 64))


@pytest.mark.parametrize("change", [
    {"chunks": np.array([4, 1], "<i4")}, {"chunks": np.array([1, 9], "<i4")}, {"articles": np.array([1], "<i4")},
    {"rows": np.zeros((2, 5), PACK_ROW_DTYPE)}, {"sha256": np.zeros((2, 31), np.uint8)},
], ids=["order", "beyond the text", "articles", "positions", "hashes"])
def test_tensors_that_do_not_fit_each_other_are_told(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="its tensors do not fit each other"):
        Refpack(write(tmp_path / "ref", make_content()._replace(**change)))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the reference pack .*ref: No such file"):
        Refpack(tmp_path / "ref")


def make_reference(**changes: Any) -> PackReference:
    reference = PackReference(kind="pack", file="r", sha256="0" * 64, mass=0.999, max_ids=5, tail_mass=0.001, backend="CPU",
                              same_arithmetic=True, n_full=3, shortfall=1.25e-5, shortfall_se=2e-6)
    return dataclasses.replace(reference, **changes)


def test_the_notes_say_the_mass_and_the_shortfall() -> None:
    reference = make_reference()
    assert PackReference.from_json(json.loads(json.dumps(reference.to_json()))) == reference
    assert reference_notes({"ref": reference.to_json()}) == (
        "ref: pack, mass 0.999: KLD is a lower bound, short by an estimated 1.25e-05 ± 2e-06 nats (3 rows kept whole); PPL, "
        "PPL drift, Δp and same top token are exact",)
    assert reference_notes({}) == ()


def test_the_notes_say_what_is_not_known_and_what_differs() -> None:
    first, second = make_reference(shortfall=None, shortfall_se=None, n_full=0, same_arithmetic=False, backend="GPU").notes()
    assert "by how much is not known" in first
    assert second.startswith("the pack's base ran on another build or device (GPU)")
