"""Manifests, bundles and arguments that point elsewhere: nothing outside of the folder is read, written or followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.core.errors import InputError, ProtocolError
from quantkit.job.hub.names import read_listing
from quantkit.job.manifest import seal_of
from quantkit.job.rundir import RunFolder
from quantkit.job.verify import verify_bundle
from quantkit.report.run_data import read_run
from quantkit.spec.protocol import load_protocol, parse_protocol, write_protocol
from tests.cli.test_main import call
from tests.report.run_factory import make_run

ELSEWHERE = ["../outside", "/etc/passwd", "..", ".", "", "a/../../b", "a/b", "x\0y"]


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("path_of", [
    RunFolder.plan, RunFolder.audited, RunFolder.rows, RunFolder.summary, RunFolder.slices, RunFolder.floor, RunFolder.weights,
    lambda run, name: run.record("quantize", name)], ids=lambda f: getattr(f, "__name__", "record").strip("<>"))
def test_no_tier_has_its_files_elsewhere(tmp_path: Path, path_of: Callable[[RunFolder, str], Path], name: str) -> None:
    with pytest.raises(InputError, match="which is no name of one file: the manifest is damaged or hostile"):
        path_of(RunFolder(path=tmp_path), name)


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name])
def test_no_text_has_its_results_elsewhere(tmp_path: Path, name: str) -> None:
    run = RunFolder(path=tmp_path, corpus=name)
    for attribute in ("pairs", "token_classes", "screening"):
        with pytest.raises(InputError, match="which is no name of one file"):
            getattr(run, attribute)
    with pytest.raises(InputError, match="which is no name of one file"):
        run.rows("Q8_0")


@pytest.mark.parametrize("name", ["../../outside", "/etc", ".."])
def test_a_manifest_that_names_a_tier_elsewhere_is_not_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                                name: str) -> None:
    run = make_run(tmp_path / "a" / "run", {"Q8_0": 0.01})
    other = make_run(tmp_path / "a" / "other", {"Q8_0": 0.01})
    manifest = json.loads(run.manifest.read_bytes())
    manifest["tiers"][name] = manifest["tiers"]["Q8_0"]
    run.manifest.write_text(json.dumps(manifest), "utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"expected (the name|names) of .*(mislead|hostile)"):
        read_run(run.path)
    for words in (["report", f"{run.path}"], ["compare", f"{run.path}", f"{other.path}", "-o", f"{tmp_path}/table"]):
        code, out, err = call(capsys, *words)
        assert (code, out, "Traceback" in err) == (2, "", False)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [
    "../x.json", "/etc/passwd", "a//b.json", "./x.json", "a\\b.json", "C:x.json", ".hidden.json", "x\x1b.json", "x\ud800.json",
    "x" * 256 + ".json", "quants/x.sh", "report/x.html/", "audit/con\n.json"], ids=ascii)
def test_no_listing_names_what_is_no_file_of_a_bundle(name: str) -> None:
    manifest = {"result_id": "ab" * 32, "files": {name: {"size_bytes": 1, "sha256": "cd" * 32}}}
    with pytest.raises(InputError, match="manifest lists what no bundle holds"):
        read_listing(json.dumps(manifest).encode(), "manifest")


@pytest.mark.parametrize("words", ['"\\ud800"', '"\\udcff\\u0000"', '"' + "9" * 5000 + '"', "9" * 5000, "1e999", '{"a": NaN}'])
def test_a_manifest_of_what_json_allows_and_nobody_writes_fails_verification(tmp_path: Path, words: str) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    facts: dict[str, Any] = json.loads(run.manifest.read_bytes())
    text = json.dumps({**facts, "notes": "HERE", "seal": seal_of(facts)}, indent=2).replace('"HERE"', words)
    run.manifest.write_text(text, "utf-8")
    found = verify_bundle(run.path, lambda *_: {})
    assert [failure.check for failure in found.failures] == ["manifest"]


@pytest.mark.parametrize("file", ["../evil.txt", "/etc/passwd", "a/b.txt", "..", ".hidden", "", "x" * 201])
def test_no_text_of_a_protocol_lies_elsewhere(file: str) -> None:
    text = write_protocol(load_protocol("demo-v1")).decode().replace('file = "demo-eval.txt"', f"file = {json.dumps(file)}")
    assert json.dumps(file) in text
    with pytest.raises(ProtocolError, match=r"corpora\[3\]\.file: expected a file name"):
        parse_protocol(text.encode())


@pytest.mark.parametrize("words", [
    ["show", "{}"], ["plan", "-b", "{}", "-p", "demo-v1"], ["imatrix", "show", "{}"], ["refpack", "show", "{}"],
    ["plan", "-b", "missing.gguf", "-p", "{}"], ["verify", "{}"], ["publish", "{}", "--repo", "a/b"]],
    ids=lambda words: " ".join(words[:2]))
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full"])
@pytest.mark.timeout(60)
def test_a_device_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                             device: str) -> None:
    if not Path(device).is_char_device():
        pytest.skip(f"no {device}")
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *(word.format(device) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("quantkit: ")
    assert len(err.splitlines()) == 1
