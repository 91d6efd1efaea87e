"""`verify` and `gate` on the command line: exit codes, formats, and where things are told."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from quantkit.cli.main import run
from quantkit.job.rundir import read_json
from tests.job.bundles import base_rows_of, make_bundle, tier_rows

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures for runs without a report."""
    monkeypatch.setattr("quantkit.report.run_report.render_report", lambda run: {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, rows = tmp_path_factory.mktemp("some runs"), base_rows_of()
    return {name: make_bundle(folder / name, {"A": tier_rows(rows, kld_factor=factor)})
            for name, factor in (("old", 1.0), ("new", 0.7), ("bad", 1.5))}


def test_a_bundle_that_verifies_ends_with_0_and_names_its_result(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    result_id = read_json(runs["old"] / "manifest.json")["result_id"]
    assert run(["verify", str(runs["old"]), "--id", result_id]) == 0
    out = capsys.readouterr().out
    assert f"result {result_id}: verified" in out
    assert "| tier files " in out


def test_another_published_id_ends_with_1(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(runs["old"]), "--id", "0" * 64]) == 1
    told = capsys.readouterr()
    assert f"manifest.json: expected the result that was asked for, {'0' * 64}" in told.err
    assert "| manifest.json | result id |" in told.out


@pytest.mark.parametrize("output_format", ["md", "json", "csv"])
def test_a_failure_names_file_expected_and_found_in_every_format(runs: dict[str, Path], tmp_path: Path, output_format: str,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    bundle = Path(shutil.copytree(runs["old"], tmp_path / "bundle"))
    (bundle / "audit" / "A" / "slices.json").unlink()
    assert run(["verify", str(bundle), "--format", output_format]) == 1
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert "audit/A/slices.json: expected a file of" in told.err
    if output_format == "json":
        held = json.loads(told.out)
        assert (held["passed"], [f["file"] for f in held["failures"]]) == (False, ["audit/A/slices.json"])
    elif output_format == "csv":
        assert told.out.splitlines()[0] == "Check,Checked,Failed,Notes"
        assert any(line.startswith("files,") and line.split(",")[2] == "1" for line in told.out.splitlines())
    else:
        assert "| audit/A/slices.json | files |" in told.out


@pytest.mark.parametrize("words", [["--regenerate"], ["--remeasure", "4"], ["-b", "base.gguf"]])
def test_making_it_again_needs_the_base_and_the_base_is_for_nothing_else(runs: dict[str, Path], words: list[str]) -> None:
    assert run(["verify", str(runs["old"]), *words]) == 2


def test_no_bundle_ends_with_2(tmp_path: Path) -> None:
    assert run(["verify", str(tmp_path)]) == 2


def test_a_gate_without_a_store_only_says_what_the_rule_says(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gate", str(runs["new"]), "--against", str(runs["old"]), "-p", "demo-v1"]) == 0
    told = capsys.readouterr()
    assert "**strict progress**" in told.out
    assert "nothing was written; 0 of at most 20 commits (sum of first ranks" in told.err
    assert run(["gate", str(runs["bad"]), "--against", str(runs["old"]), "-p", "demo-v1"]) == 1
    assert "does not replace the incumbent: protected regression" in capsys.readouterr().err


def test_a_store_is_moved_and_a_dry_run_is_not(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gate", str(runs["new"]), "--against", str(runs["old"]), "-p", "demo-v1", "--store", str(tmp_path / "store")]
    assert run([*words, "--dry-run"]) == 0
    assert not (tmp_path / "store").exists()
    assert run([*words, "--format", "json"]) == 0
    told = capsys.readouterr()
    label = json.loads(told.out[told.out.index("{"):])
    assert (label["label"], label["moved"], label["n_commits"]) == ("strict progress", True, 1)
    assert (tmp_path / "store" / "current").resolve().name == label["candidate"]
    assert run(["gate", str(runs["bad"]), "-p", "demo-v1", "--store", str(tmp_path / "store")]) == 1
    rejected = read_json(runs["bad"] / "manifest.json")["result_id"]
    assert f"the candidate is kept in {tmp_path / 'store'}/rejected/{rejected}" in capsys.readouterr().err


def test_junit_has_a_case_for_each_obligation_and_one_for_the_decision(runs: dict[str, Path], tmp_path: Path) -> None:
    junit = tmp_path / "gate.xml"
    assert run(["gate", str(runs["bad"]), "--against", str(runs["old"]), "-p", "demo-v1", "--junit", str(junit)]) == 1
    suite = ET.parse(junit).getroot()
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["kld_mean", "decision"]
    assert [suite.get(key) for key in ("tests", "failures", "skipped")] == ["9", "2", "3"]


def test_a_gate_without_an_incumbent_ends_with_2(runs: dict[str, Path]) -> None:
    assert run(["gate", str(runs["new"]), "-p", "demo-v1"]) == 2
