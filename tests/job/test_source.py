"""Where a foreign file is from stays with the run: written beside the plans, kept when the place is forgotten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.job.evaluation import read_subject
from quantkit.job.ladder import audit_files
from quantkit.job.manifest import list_files
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.job.source import keep_source, read_source
from quantkit.report.check import check_report
from quantkit.report.run_report import write_report
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model

COMMIT = "0123456789abcdef" * 2 + "01234567"


def test_a_known_place_stays_known_for_the_same_bytes(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--model" / "snapshots" / COMMIT / "m.gguf"
    cached.parent.mkdir(parents=True)
    tiny_model(cached)
    shutil.copy(cached, tmp_path / "m.gguf")
    run = RunFolder(path=tmp_path / "run")
    keep_source(run, read_subject(cached, "theirs"))
    first = read_source(run, "theirs")
    assert first is not None
    assert (first.repository, first.revision) == ("owner/model", COMMIT)
    keep_source(run, read_subject(tmp_path / "m.gguf", "theirs"))
    assert read_source(run, "theirs") == first
    other = tiny_model(tmp_path / "other.gguf", n_block=3)[0]
    keep_source(run, read_subject(other, "theirs"))
    changed = read_source(run, "theirs")
    assert changed is not None
    assert (changed.sha256 == first.sha256, changed.repository) == (False, None)
    run.source("theirs").write_text("[]")
    assert read_source(run, "theirs") is None


def test_a_tier_with_a_plan_needs_none(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path / "run")
    write_json(run.plan("ours"), {})
    keep_source(run, read_subject(tiny_model(tmp_path / "m.gguf")[0], "ours"))
    assert not run.source("ours").exists()


@pytest.mark.engine
def test_an_audit_of_a_foreign_file_reports_its_source(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base.gguf")[0]
    folder = tmp_path / "models--owner--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    theirs = Path(shutil.copy(base, folder / "theirs.gguf"))
    protocol = load_protocol("demo-v1", ["eval.chunks=spread", "eval.n_chunk=4"])
    result = audit_files(base, protocol, tmp_path / "run", [theirs], Silent())
    assert result.failed == {}
    run = result.folder
    write_report(run.path)
    check_report(run.path)
    assert "source/theirs.json" in list_files(run.path, {})
    table = json.loads((run.report / "retention.json").read_bytes())
    assert [tier["source"] and tier["source"]["repository"] for tier in table["tiers"]] == [None, "owner/model"]
    page = (run.report / "report.html").read_text()
    assert "not made here" in page
    assert "owner/model" in page
    assert str(tmp_path) not in page
    assert (run.report / "by_layer_types.svg").exists()
    again = tmp_path / "again"  # the same bytes from another place are the same result
    shutil.copy(theirs, tmp_path / "theirs.gguf")
    other = audit_files(base, protocol, again, [tmp_path / "theirs.gguf"], Silent())
    assert other.result_id == read_json(run.manifest)["result_id"]
