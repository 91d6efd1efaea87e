"""A bundle is refused before anything is sent: changed, too large, or with tokens and paths in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.core.errors import InputError
from quantkit.job.hub.bundle import check_bundle, read_bundle
from quantkit.job.hub.leaks import find_leaks
from quantkit.job.progress import Silent
from quantkit.job.shards import HUB_LIMIT_BYTES
from quantkit.job.standalone import collect_to_file, quantize_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_gguf, tiny_model
from tests.job.hub.conftest import list_anew

TOKEN = "hf_" + "Ab1" * 12


def refusal(run: Path, max_bytes: int = HUB_LIMIT_BYTES) -> str:
    with pytest.raises(InputError) as caught:
        check_bundle(read_bundle(run), max_bytes)
    return str(caught.value)


def test_a_whole_bundle_passes(run: Path) -> None:
    bundle = read_bundle(run)
    check_bundle(bundle)
    assert [f.path for f in bundle.all_files][-2:] == ["manifest.json", "README.md"]


def test_nothing_but_the_listed_files_is_in_it(run: Path) -> None:
    """What lies in the folder unlisted stays at home, native logs above all."""
    (run / "secret.json").write_text("x")
    assert {"secret.json", "run.json", "logs/quantize.log", ".lock"}.isdisjoint(f.path for f in read_bundle(run).all_files)


@pytest.mark.parametrize("name", ["protocol.toml", "quants/m-Q8_0.gguf", "audit/Q8_0/rows.parquet", "README.md"])
def test_one_byte_that_changed_is_named(run: Path, name: str) -> None:
    data = bytearray((run / name).read_bytes())
    data[-1] ^= 1
    (run / name).write_bytes(data)
    assert f"{name} has another sha256 than the manifest says" in refusal(run)


def test_a_file_that_is_gone_or_cut_is_named(run: Path) -> None:
    (run / "protocol.toml").write_bytes(b"schema")
    (run / "plan" / "Q8_0.json").unlink()
    text = refusal(run)
    assert "protocol.toml has 6 bytes, the manifest says 11" in text
    assert "plan/Q8_0.json is in the manifest, but not there" in text


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    (run / "plan").rename(tmp_path / "elsewhere")
    (run / "plan").symlink_to(tmp_path / "elsewhere")
    assert "plan/Q8_0.json is or lies behind a symbolic link" in refusal(run)


def test_the_hubs_limit_is_in_bytes_and_says_what_to_do(run: Path) -> None:
    size = (run / "quants" / "m-Q8_0.gguf").stat().st_size
    check_bundle(read_bundle(run), size)
    assert f"of {size}: split it with `quantkit split`" in refusal(run, size - 1)


def test_a_folder_without_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found no manifest\.json in .*make one with `quantkit run`"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(("text", "kind"), [
    ("made in /home/USER/models/x.gguf", "an absolute path (/home/USER/models/x.gguf)"),
    ('{"file": "/tmp/quants/x"}', "an absolute path (/tmp/quants/x)"),
    ("see file:///x/y", "an absolute path (file:///x/y)"),
    (r"C:\\Users\\me\\x", "an absolute path (:\\\\Users\\\\me\\\\x)"),
    (f"token={TOKEN}", "an access token (hf_Ab1...)"),
    ("AKIAABCDEFGHIJKLMNOP", "an access token (AKIAAB...)"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key (-----B...)"),
])
def test_what_must_not_be_published(run: Path, text: str, kind: str) -> None:
    for name in ("report/retention.md", "audit/Q8_0/rows.parquet", "README.md"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(before + b"\n" + text.encode())
        list_anew(run)
        assert f"{name} holds {kind} at its start" in refusal(run)
        (run / name).write_bytes(before)


@pytest.mark.parametrize("text", [
    "https://hub.example/home/user/model", "see report/usr/x.png", "either/or", "</data/>", "a ratio of 1/2", "+/tmp/x",
    "hf_short", "sk-learn", "$HOME/models", "C:\\"])
def test_what_only_looks_like_it(run: Path, text: str) -> None:
    (run / "report" / "retention.md").write_text(text, "utf-8")
    assert find_leaks(run / "report" / "retention.md", run) == []


def test_the_path_of_the_run_itself_is_found_wherever_it_is(run: Path) -> None:
    (run / "report" / "retention.md").write_text(f"x{run}", "utf-8")
    assert any("the path of the run" in leak for leak in find_leaks(run / "report" / "retention.md", run))


def test_beyond_the_first_piece_too(run: Path) -> None:
    (run / "report" / "retention.md").write_bytes(bytes(4 * 2**20 - 3) + f" {TOKEN}".encode())
    assert find_leaks(run / "report" / "retention.md", run) == ["an access token (hf_Ab1...) at byte 4194304"]


@pytest.mark.parametrize(("key", "value", "found"), [
    ("general.source", "/home/USER/x.gguf", 1), ("general.tags", ["a", "/home/USER/x.gguf"], 1),
    ("tokenizer.chat_template", "cd /home/USER/x", 0)])
def test_metadata_of_models_are_searched(tmp_path: Path, key: str, value: object, found: int) -> None:
    [path] = tiny_gguf(tmp_path / "m.gguf", {"a.weight": ((32,), "F32")}, {key: value})
    assert find_leaks(path, tmp_path / "run") == [f"an absolute path (/home/USER/x.gguf) at the key {key!r}"][:found]


@pytest.mark.engine
def test_a_tier_says_where_its_importances_are_from_and_names_no_folder(tmp_path: Path) -> None:
    """The library writes no such keys, and other tools write absolute paths into them (llama.cpp#6656)."""
    folder = tmp_path / "home of somebody"
    [base] = tiny_model(folder_made(folder) / "m-BF16.gguf", n_embd=256, n_ff=256)
    protocol = load_protocol("demo-v1")
    collect_to_file(base, protocol, folder / "importances.gguf", Silent())
    quantize_to_file(base, protocol, "Q4_K_M", folder / "q.gguf", Silent(), imatrix=folder / "importances.gguf")
    header = read_header(folder / "q.gguf")
    assert {key: header.metadata[key] for key in header.metadata if key.startswith("quantize.")}.keys() == {
        "quantize.imatrix.file", "quantize.imatrix.dataset", "quantize.imatrix.entries_count", "quantize.imatrix.chunks_count",
        "quantize.imatrix.sha256"}
    for path in (folder / "q.gguf", folder / "importances.gguf"):
        assert b"somebody" not in path.read_bytes()
        assert find_leaks(path, folder) == []


def folder_made(folder: Path) -> Path:
    folder.mkdir()
    return folder
