"""Looking at a repository: only headers travel, and what is there is told beside what could have been."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.core.errors import GgufError, InputError
from quantkit.core.units import MIB
from quantkit.job.hub.client import Hub
from quantkit.job.hub.headers import HeaderReader, find_models
from quantkit.job.hub.looks import DiffGroup, ModelLook, RepoLook
from quantkit.job.hub.remote import look
from quantkit.job.mtp_files import strip_head
from quantkit.job.progress import Silent
from quantkit.job.shards import split_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.plan import resolve_plan
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_gguf
from tests.gguf_factory import tiny_model as write_tiny
from tests.hub_server import HubServer

REPO = "user/model"


def hollow(hub: HubServer, folder: Path) -> tuple[HeaderReader, dict[str, Path]]:
    client = Hub(REPO)
    reader = HeaderReader(client, client.require_head(), folder)
    models = find_models(client.list_files(client.require_head()))
    return reader, {m.name: reader.make_hollow(m, i) for i, m in enumerate(models)}


def test_a_large_file_costs_its_header(hub: HubServer, tmp_path: Path) -> None:
    [path] = tiny_gguf(tmp_path / "m.gguf", {"a.weight": ((1024, 1024), "F32")}, {"x": "y"})
    hub.add(REPO, {"folder/m.gguf": path.read_bytes()})
    reader, found = hollow(hub, tmp_path)
    assert reader.n_bytes == sum(n for _, n in hub.ranges) == 2 * MIB < path.stat().st_size
    there, here = read_header(path), read_header(found["folder/m.gguf"])
    assert (here.metadata, here.tensors, here.file_bytes) == (there.metadata, there.tensors, there.file_bytes)


@pytest.mark.slow
def test_a_long_header_is_read_on_and_its_size_is_tried_first_the_next_time(hub: HubServer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny_gguf(tmp_path / f"{name}.gguf", {"a.weight": ((1024, 1024), "F32")}, {"x": "y" * (3 * MIB)})
        hub.add(REPO, {f"{name}.gguf": (tmp_path / f"{name}.gguf").read_bytes()})
    _, found = hollow(hub, tmp_path / "..")
    header = read_header(tmp_path / "a.gguf")
    assert [n for _, n in hub.ranges] == [2 * MIB, 2 * MIB, header.data_offset[0]]
    assert {read_header(path).metadata["x"] for path in found.values()} == {"y" * (3 * MIB)}


def test_damaged_and_hostile_headers_are_named(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, {"zeros.gguf": bytes(5 * MIB)})
    with pytest.raises(GgufError, match=r"^zeros\.gguf: expected the first four bytes"):
        hollow(hub, tmp_path)
    assert sum(n for _, n in hub.ranges) == 2 * MIB
    hub.add(REPO, {"zeros.gguf": b"GGUF\3\0\0\0" + b"\xff" * 5000})
    with pytest.raises(GgufError, match=r"^zeros\.gguf: "):
        hollow(hub, tmp_path)


def test_shards_are_one_model(hub: HubServer, tmp_path: Path) -> None:
    [path] = write_tiny(tmp_path / "m.gguf")
    shards = [done.path for done in split_file(path, tmp_path / "s", 65536)]
    hub.add(REPO, {f"q/{p.name}": p.read_bytes() for p in shards} | {"m.gguf": path.read_bytes(), "x.json": b"{}"})
    _, found = hollow(hub, tmp_path)
    assert list(found) == ["m.gguf", "q/s-00001-of-00005.gguf"]
    assert read_header(found["q/s-00001-of-00005.gguf"]).tensors[0].name == "token_embd.weight"
    del hub.repos[REPO].files["q/s-00002-of-00005.gguf"]
    with pytest.raises(GgufError, match=r"q/s-00001-of-00005\.gguf: expected all 5 shards beside it, found 4"):
        hollow(hub, tmp_path)


def see(**options: object) -> RepoLook:
    return look(REPO, Silent(), **options)  # type: ignore[arg-type]


def by_name(found: RepoLook) -> dict[str, ModelLook]:
    return {model.name: model for model in found.models}


@pytest.mark.engine
def test_llama_cpps_own_files_differ_from_its_mix_by_what_was_pinned(hub: HubServer, shared: Path) -> None:
    """The head of the IQ2_S file was pinned to Q8_0, for want of importances."""
    for name in ("Q8_0", "Q4_K_M", "IQ2_S"):
        hub.add(REPO, {f"stock-{name}.gguf": (shared / "oracle" / f"stock-{name}.gguf").read_bytes()})
    found = by_name(see())
    assert {m.name: m.stock.n_different for m in found.values() if m.stock} == {
        "stock-IQ2_S.gguf": 8, "stock-Q4_K_M.gguf": 0, "stock-Q8_0.gguf": 0}
    pinned = found["stock-IQ2_S.gguf"].stock
    assert pinned is not None
    assert DiffGroup("blk.*.nextn.eh_proj.weight", "Q8_0", "IQ2_XS", 1) in pinned.groups
    assert {group.in_file for group in pinned.groups} == {"Q8_0"}
    assert {(m.mtp, m.architecture, m.ours) for m in found.values()} == {("present", "qwen35", None)}
    assert [m.ftype for m in found.values()] == ["IQ2_S", "Q4_K_M", "Q8_0"]
    assert found["stock-Q4_K_M.gguf"].bpw == pytest.approx(5.0685, abs=1e-3)


@pytest.mark.engine
def test_our_tiers_are_compared_and_a_stripped_head_is_told(hub: HubServer, shared: Path, tiny_model: Path,
                                                            tmp_path: Path) -> None:
    stock = shared / "oracle" / "stock-Q4_K_M.gguf"
    strip_head(stock, tmp_path / "stripped.gguf")
    hub.add(REPO, {"whole.gguf": stock.read_bytes(), "stripped.gguf": (tmp_path / "stripped.gguf").read_bytes(),
                   "imatrix.gguf": (shared / "oracle" / "imatrix-tiny.gguf").read_bytes(), "notes.txt": b"x"})
    protocol = load_protocol("wikitext2-v1")
    found = by_name(see(protocol=protocol))
    whole = found["whole.gguf"]
    plan = resolve_plan(describe_model(read_header(tiny_model)), protocol.plan.tier("Q4_K_M"), protocol.plan, None)
    assert whole.ours is not None
    assert (whole.ours.plan, whole.ours.n_different, whole.ours.size_bytes) == (
        "Q4_K_M", sum(whole.types[row.name] != row.type for row in plan.rows), plan.size_bytes)
    assert (whole.mtp, found["stripped.gguf"].mtp) == ("present", "stripped")
    assert DiffGroup("blk.*.ssm_alpha.weight", "Q4_K", "Q8_0", 3) in whole.ours.groups
    assert found["imatrix.gguf"].architecture is None
    assert "expected a model" in found["imatrix.gguf"].notes[0]


@pytest.mark.engine
def test_substituted_tensors_are_named(hub: HubServer, tmp_path: Path) -> None:
    [path] = write_tiny(tmp_path / "m.gguf", n_embd=96, n_ff=256, type_name="Q5_0", metadata={"general.file_type": 15})
    hub.add(REPO, {"m.gguf": path.read_bytes()})
    [model] = see().models
    assert model.stock is not None
    assert "blk.0.attn_q.weight Q5_0" in model.substituted
    assert {row.in_file for row in model.stock.groups} == {"Q5_0"}


@pytest.mark.engine
def test_changes_since_the_last_look(hub: HubServer, tmp_path: Path) -> None:
    def model(**options: object) -> bytes:
        return write_tiny(tmp_path / "m.gguf", **options)[0].read_bytes()  # type: ignore[arg-type]

    hub.add(REPO, {"same.gguf": model(), "other.gguf": model(), "types.gguf": model(), "gone.gguf": model()})
    assert see().changes is None
    assert see().changes == ()
    hub.add(REPO, {"other.gguf": model(seed=1), "types.gguf": model(type_name="Q8_0"),
                   "new.gguf": model(metadata={"tokenizer.chat_template": "x"})})
    del hub.repos[REPO].files["gone.gguf"]
    assert see().changes == ("gone.gguf: gone", "new.gguf: new", "other.gguf: other bytes",
                             "types.gguf: other bytes, other tensor types, another size")
    hub.add(REPO, {"new.gguf": model(metadata={"tokenizer.chat_template": "y"})})
    assert see().changes == ("new.gguf: other bytes, another chat template",)


def test_a_missing_repository_is_told(hub: HubServer) -> None:
    with pytest.raises(InputError, match=r"expected a repository user/model at .*, found none"):
        see()
