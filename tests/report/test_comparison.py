"""Several runs on one table: what is refused and why, what stands apart, what is one file, and tests over all pairs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli.compare import compare
from quantkit.core.errors import InputError
from quantkit.job.rundir import RunFolder
from quantkit.report.comparison import compare_run_folders, comparison_csv, comparison_json, comparison_md
from tests.report.run_factory import change_json, make_run

pytestmark = pytest.mark.system


def other_bytes(run: RunFolder, tier: str, sha256: str, size_bytes: int) -> None:
    tiers = json.loads(run.manifest.read_bytes())["tiers"]
    tiers[tier] |= {"sha256": sha256, "size_bytes": size_bytes}
    change_json(run.manifest, tiers=tiers)


@pytest.fixture
def ours(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "ours", {"Q8_0": 0.002, "Q4_K_M": 0.02})


@pytest.fixture
def theirs(tmp_path: Path) -> RunFolder:
    """Another Q4_K_M, much worse, and the very same Q8_0."""
    run = make_run(tmp_path / "their run", {"Q8_0": 0.002, "Q4_K_M": 0.2})
    other_bytes(run, "Q4_K_M", "e" * 64, 900_000)
    return run


def test_equal_names_with_other_bytes_stand_apart_and_equal_files_once(ours: RunFolder, theirs: RunFolder) -> None:
    found = compare_run_folders([ours.path, theirs.path])
    assert [(file.row.tier, file.runs) for file in found.files] == [
        ("Q4_K_M (their run)", ("their run",)), ("Q8_0", ("ours", "their run")), ("Q4_K_M (ours)", ("ours",))]
    assert [file.row.letters for file in found.files] == ["a", "b", "c"]
    assert len(found.verdicts.comparison("kld").pairs) == 3


def test_three_forms_of_one_table(ours: RunFolder, theirs: RunFolder) -> None:
    found = compare_run_folders([ours.path, theirs.path])
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert [(row["run"], row["tier"], row["letters"]) for row in rows] == [
        ("", "BF16", ""), ("their run", "Q4_K_M (their run)", "a"), ("ours, their run", "Q8_0", "b"),
        ("ours", "Q4_K_M (ours)", "c")]
    data = json.loads(comparison_json(found))
    assert [run["run"] for run in data["runs"]] == ["ours", "their run"]
    assert [float(row["kld_mean"]) for row in rows[1:]] == [file["summary"]["kld"]["value"] for file in data["files"]]
    text = comparison_md(found)
    assert "| Q8_0 | ours, their run | " in text
    assert "- Arithmetic: CPU, llama.cpp 0c1e570\n" in text


@pytest.mark.parametrize(("change", "told"), [
    ({"token_ids_sha256": "9" * 64}, "token ids sha256: dddddddddddddddd in ours; 9999999999999999 in their run"),
    ({"base": {"sha256": "8" * 64}}, "base sha256: b2b2b2b2b2b2b2b2 in ours; 8888888888888888 in their run"),
    ({"protocol": {"eval_id": "7" * 64}}, "eval_id: "),
])
def test_other_base_tokens_or_evaluation_are_refused(ours: RunFolder, theirs: RunFolder, change: dict[str, Any], told: str) -> None:
    held = json.loads(theirs.manifest.read_bytes())
    merged = {key: {**held[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    change_json(theirs.manifest, **merged)
    with pytest.raises(InputError) as refused:
        compare_run_folders([ours.path, theirs.path])
    assert told.replace("dddddddddddddddd", "d4" * 8) in str(refused.value)
    assert "audit the files again" in str(refused.value)


def test_everything_that_differs_is_told_at_once(ours: RunFolder, theirs: RunFolder) -> None:
    held = json.loads(theirs.manifest.read_bytes())
    change_json(theirs.manifest, token_ids_sha256="9" * 64, base={**held["base"], "sha256": "8" * 64})
    with pytest.raises(InputError, match=r"base sha256: .* / token ids sha256: "):
        compare_run_folders([ours.path, theirs.path])


def test_another_arithmetic_is_said_and_not_refused(ours: RunFolder, theirs: RunFolder) -> None:
    held = json.loads(theirs.manifest.read_bytes())
    change_json(theirs.manifest, build={**held["build"], "backend": "CUDA", "n_gpu_layers": 33})
    text = comparison_md(compare_run_folders([ours.path, theirs.path]))
    assert "Arithmetic: differs, and KLD with it: ours: CPU, llama.cpp 0c1e570; their run: CUDA, 33 layers" in text


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        make_run(tmp_path / parent / "run", {"Q8_0": 0.002})
    found = compare_run_folders([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert list(found.runs) == ["a/run", "b/run"]
    with pytest.raises(InputError, match="expected two different run directories"):
        compare_run_folders([tmp_path / "a" / "run", tmp_path / "a" / ".." / "a" / "run"])


def test_cli_writes_tables_and_pictures_and_overwrites_nothing(ours: RunFolder, theirs: RunFolder, tmp_path: Path) -> None:
    words = [str(ours.path), str(theirs.path), "-o", str(tmp_path / "out"), "--format", "csv"]
    result = CliRunner().invoke(compare, words, catch_exceptions=False)
    assert result.stdout.startswith("run,tier,file,size_bytes,")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "comparison.md", "comparison.csv", "comparison.json", *(f"{name}.{kind}" for kind in ("png", "svg") for name in
                                                                ("kld_vs_size", "same_top_p_vs_size", "ppl_vs_size"))}
    with pytest.raises(InputError, match="exists"):
        CliRunner().invoke(compare, words, catch_exceptions=False)
    assert CliRunner().invoke(compare, [*words, "--force"], catch_exceptions=False).exit_code == 0
