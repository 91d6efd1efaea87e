"""Every example runs as its docstring says, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.job.parts import write_parquet
from quantkit.spec.records import ROW_DTYPE
from tests.report.run_factory import make_run
from tests.report.test_run_report import add_verdicts

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]
TESTED = {"bytes_by_role.py", "notebook_style.py", "where_it_differs.py"}


def run_example(name: str, argument: Path) -> list[str]:
    """What an example prints."""
    done = subprocess.run([sys.executable, ROOT / "examples" / name, argument], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == TESTED


def test_bytes_by_role() -> None:
    lines = run_example("bytes_by_role.py", ROOT / "quantkit" / "data" / "demo" / "tiny-qwen35-mtp-BF16.gguf")
    assert [line.split()[0] for line in lines] == ["embedding", "mtp", "output", "trunk", "whole"]
    # 4096 tokens x 256 columns x 2 bytes, the only tensor of its role
    assert lines[0].split() == ["embedding", "1", "tensors", "2.00", "MiB", "16.0000", "bpw"]


def test_where_it_differs(tmp_path: Path) -> None:
    rows = np.zeros(200, ROW_DTYPE)
    rows["chunk"], rows["pos"] = np.divmod(np.arange(200), 100)
    rows["article"] = rows["chunk"] + 5
    rows["kld"] = 0.01
    rows["kld"][[150, 151]] = 4.0
    rows["top1_q"][100:150] = 1
    write_parquet(tmp_path / "rows.parquet", rows, {})
    lines = run_example("where_it_differs.py", tmp_path / "rows.parquet")
    assert [line.split() for line in lines[2:4]] == [["6", "100", "0.0898", "0.5"], ["5", "100", "0.0100", "1.0"]]
    assert [line.split()[:4] for line in lines[6:8]] == [["1", "50", "0", "4.00"], ["1", "51", "0", "4.00"]]
    assert lines[-1] == "2 of 200 tokens carry 80% of all KLD"


def test_notebook_style(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a run")
    add_verdicts(run)
    lines = run_example("notebook_style.py", run.path)
    assert [line.split()[0] for line in lines[2:6]] == ["BF16", "Q8_0", "Q4_K_M", "IQ1_M"]
    assert lines[6].split()[0].replace(".", "").isdigit()
    assert [line.split(":")[0] for line in lines if line.endswith("%")] == ["Q8_0", "Q4_K_M", "IQ1_M"]
    assert any(line.split()[-2:] == ["not", "resolved"] for line in lines)
    assert lines[-1].split() == ["ffn_down", *lines[-1].split()[1:]]
