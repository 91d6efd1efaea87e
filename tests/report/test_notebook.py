"""`quantkit.load_run`: frames with the documented columns and types, empty where nothing was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import quantkit
from quantkit.report.notebook import load_run
from quantkit.report.table import COLUMNS
from quantkit.spec.records import ROW_DTYPE
from tests.report.run_factory import TIERS, make_run
from tests.report.test_run_report import add_verdicts


def test_frames_have_the_documented_columns(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    add_verdicts(folder)
    run = load_run(str(folder.path))
    assert list(run.tiers) == list(COLUMNS)
    assert run.tiers["tier"].tolist() == ["BF16", *TIERS]
    assert run.tiers["letters"].tolist() == ["", "a", "a", "b"]
    assert list(run.rows) == ["tier", *(ROW_DTYPE.names or ())]
    assert len(run.rows) == 3 * 800
    assert run.rows["kld"].dtype == np.dtype("float64")
    assert run.rows["token"].dtype == np.dtype("int32")
    assert run.pairs[["a", "b", "verdict"]].to_numpy().tolist() == [
        ["Q8_0", "Q4_K_M", "not resolved"], ["Q8_0", "IQ1_M", "better"], ["Q4_K_M", "IQ1_M", "better, by less than the margin"]]
    assert run.plan.groupby("tier").size().to_dict() == dict.fromkeys(TIERS, 5)
    assert set(run.plan["kind"]) == {"token_embd", "output", "output_norm", "ffn_down"}
    assert run.slices[["tier", "kind", "kld"]].to_numpy().tolist() == [["Q8_0", "token", 0.1]]
    assert repr(run) == "<Run of tiny-BF16.gguf: Q8_0, Q4_K_M, IQ1_M; result a1a1a1a1a1a1>"


def test_the_frame_says_what_the_table_says(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run").path)
    means = run.rows.groupby("tier")["kld"].mean()
    for tier, value in run.tiers.set_index("tier")["kld_mean"].items():
        assert tier == "BF16" or value == pytest.approx(means[tier], rel=1e-12)


def test_what_was_not_measured_is_empty_and_what_is_undefined_is_missing(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", n_article=2, without_plan=list(TIERS)).path)
    for frame in (run.pairs, run.plan, run.slices, run.mtp):
        assert len(frame) == 0
        assert len(frame.columns) > 5
    assert run.tiers["kld_mean_lo"].isna().all()
    assert run.tiers["kld_mean"].dtype == np.dtype("float64")
    assert not isinstance(run.tiers["n_scored"].dtype, pd.Float64Dtype)


@pytest.mark.system
def test_the_package_knows_it_and_loads_nothing_for_it() -> None:
    code = ("import sys, quantkit\nassert 'load_run' in dir(quantkit)\nassert 'quantkit.report' not in sys.modules\n"
            "quantkit.load_run\nassert 'pandas' not in sys.modules\nprint(quantkit.load_run.__module__)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "quantkit.report.notebook\n"
    with pytest.raises(AttributeError, match="no attribute 'load_runs'"):
        quantkit.load_runs  # noqa: B018
