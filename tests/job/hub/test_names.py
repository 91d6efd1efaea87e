"""Names in a manifest that lead out of the folder, hide in it, or are not evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantkit.core.errors import InputError
from quantkit.job.hub.names import Entry, collisions, name_problem, read_listing

HASH = "0f" * 32


@pytest.mark.parametrize("name", ["protocol.toml", "plan/Q8_0.json", "quants/my model (é).gguf", "report/a.b.svg", "smoke/x.json",
                                  "audit/Q4_K_M/rows.parquet", "imatrix.dat", "ref.safetensors",
                                  "ref-half.txt.safetensors"])
def test_names_of_a_bundle(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize(("name", "expected"), [
    ("", "not a path below"), ("/etc/passwd.txt", "not a path below"), ("../x.json", "not a path below"),
    ("a/../../x.json", "not a path below"), ("a//x.json", "not a path below"), ("./x.json", "not a path below"),
    ("a/x.json/", "not a path below"), ("..\\x.json", "not a path below"), ("C:x.json", "not a path below"),
    ("x\n.json", "every file system"), ("x\0.json", "every file system"), ("\u202ex.json", "every file system"),
    ("a" * 251 + ".json", "every file system"),
    (".env.json", "hidden or scratch"), (".git/config.txt", "hidden or scratch"),
    ("a/.x.gguf.12-00ff00ff.tmp", "hidden or scratch"),
    ("x.json~", "hidden or scratch"), ("a./x.json", "hidden or scratch"), ("x.json ", "hidden or scratch"),
    ("logs/quantize.txt", "own state"), ("parts/quantize/Q8_0.json", "own state"), ("rejected/x.json", "own state"),
    ("manifest.json", "own state"), ("run.json", "own state"),
    ("id_rsa", "of no kind"), ("x.py", "of no kind"), ("model.safetensors", "of no kind"), ("x.gguf.log", "of no kind"),
    ("audit/ref.safetensors", "of no kind")])
def test_names_of_no_bundle(name: str, expected: str) -> None:
    assert expected in str(name_problem(name))


def test_names_that_are_one_on_some_file_systems() -> None:
    assert collisions(["a/x.json", "a/y.json"]) == []
    assert collisions(["X.json", "x.json"]) == ["'x.json' and 'X.json' differ in case alone"]
    assert collisions(["a.json", "A.json/b.json"]) == ["'a.json' is a file and a folder"]


def test_a_listing_is_read() -> None:
    data = {"result_id": HASH, "files": {"b.json": {"sha256": HASH, "size_bytes": 7}, "a.csv": {"sha256": HASH, "size_bytes": 0}}}
    assert read_listing(json.dumps(data).encode(), "m") == (HASH, (Entry("a.csv", 0, HASH), Entry("b.json", 7, HASH)))


@pytest.mark.parametrize(("value", "expected"), [
    ("[", "not JSON"), ([], "with result_id and files"), ({"files": {}}, "with result_id and files"),
    ({"result_id": HASH}, "with result_id and files"), ({"result_id": "x", "files": {}}, "with result_id and files"),
    ({"result_id": HASH, "files": {"../x.json": {}}}, "lists what no bundle holds"),
    ({"result_id": HASH, "files": {"x.json": {}}}, "expected size_bytes and sha256 for 'x.json'"),
    ({"result_id": HASH, "files": {"x.json": {"sha256": HASH, "size_bytes": -1}}}, "expected size_bytes and sha256"),
    ({"result_id": HASH, "files": {"x.json": {"sha256": HASH, "size_bytes": True}}}, "expected size_bytes and sha256"),
    ({"result_id": HASH, "files": {"x.json": {"sha256": HASH[:-1], "size_bytes": 1}}}, "expected size_bytes and sha256"),
    ({"result_id": HASH, "files": {"x.json": 3}}, "expected size_bytes and sha256"),
    ("[" * 100_000, "not JSON")], ids=str)
def test_what_is_no_listing(value: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        read_listing((value if isinstance(value, str) else json.dumps(value)).encode(), "manifest.json of user/model")
