"""`quantkit compare --pairs`: the verdict of every pair, of one run from its records and of several from their rows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli.compare import compare
from quantkit.core.errors import InputError
from quantkit.job.pairs import compute_verdicts
from quantkit.job.parts import read_parquet
from quantkit.job.rundir import RunFolder, write_json
from quantkit.spec.json_records import record_to_json
from quantkit.spec.protocol import load_protocol
from tests.report.run_factory import make_run


def run_pairs(*words: str) -> Result:
    return CliRunner().invoke(compare, ["--pairs", *words], catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = make_run(tmp_path / "run", {"Q8_0": 0.002, "Q4_K_M": 0.02})
    rows = {tier: read_parquet(folder.rows(tier))[0] for tier in ("Q8_0", "Q4_K_M")}
    write_json(folder.pairs, record_to_json(compute_verdicts(folder, load_protocol(folder.protocol), rows)))
    return folder


def test_one_run_prints_its_record_in_three_forms(run: RunFolder) -> None:
    rows = list(csv.DictReader(io.StringIO(run_pairs(str(run.path), "--format", "csv").stdout)))
    assert [(row["statistic"], row["a"], row["b"]) for row in rows] == [
        (statistic, "Q8_0", "Q4_K_M") for statistic in ("kld", "ln_ppl_ratio", "same_top_p")]
    data = json.loads(run_pairs(str(run.path), "--format", "json").stdout)
    assert data["comparisons"] == json.loads(run.pairs.read_bytes())["comparisons"]
    assert "## By mean KLD" in run_pairs(str(run.path)).stdout


def test_several_runs_are_one_family(run: RunFolder, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", {"IQ1_M": 0.3})
    data = json.loads(run_pairs(str(run.path), str(other.path), "--format", "json").stdout)
    assert len(data["tiers"]) == 3
    assert len(data["comparisons"][0]["pairs"]) == 3


def test_verdicts_of_other_rows_are_not_shown(run: RunFolder) -> None:
    held = json.loads(run.pairs.read_bytes())
    write_json(run.pairs, {**held, "rows_sha256": {"Q8_0": "0" * 64, "Q4_K_M": "1" * 64}})
    with pytest.raises(InputError, match="found none or those of other rows"):
        run_pairs(str(run.path))


def test_it_prints_and_writes_nothing(run: RunFolder, tmp_path: Path) -> None:
    result = run_pairs(str(run.path), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
