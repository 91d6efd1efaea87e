"""`quantkit plan`: the ladder in three forms, and refusals before any work."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli.plan import plan
from quantkit.core.errors import ImatrixError, PlanError, ProtocolError
from quantkit.spec.plan import Plan
from tests.gguf_factory import tiny_model as write_tiny

GUARDED, STOCK = "wikitext2-v1", "wikitext2-stock-v1"
TIERS = ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "IQ2_S", "IQ1_M"]


def planned(base: Path, *words: str, protocol: str = GUARDED) -> str:
    result = CliRunner().invoke(plan, ["-b", str(base), "-p", protocol, *words], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout


def cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("| ") and not set(line) <= set("|-: ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_a_ladder_falls_strictly(tiny_model: Path) -> None:
    head, *rows = cells(planned(tiny_model))
    assert head == ["tier", "ftype", "tensor bytes", "MiB", "bpw", "bpw core", "types by parameters"]
    assert [row[0] for row in rows] == TIERS
    sizes = [int(row[2].replace(",", "")) for row in rows]
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert rows[0][1:6] == ["Q8_0", "7,162,176", "6.83", "8.5465", "8.5770"]


def test_a_tier_is_shown_tensor_by_tensor(tiny_model: Path) -> None:
    text = planned(tiny_model, "-t", "Q4_K_M")
    rows = {row[0]: row[1:] for row in cells(text)}
    assert "## Q4_K_M\n" in text
    assert len(cells(text)) == 2 + 1 + 71
    assert rows["blk.0.attn_norm.weight"] == ["256", "F32", "F32", "1,024", "keep: norm"]
    assert rows["blk.4.nextn.eh_proj.weight"] == ["512x256", "BF16", "Q8_0", "139,264", "mtp_type"]


def test_json_holds_whole_plans(tiny_model: Path) -> None:
    values = json.loads(planned(tiny_model, "--tier", "IQ2_S", "--tier", "Q8_0", "--format", "json"))
    plans = [Plan.from_json(value) for value in values]
    assert [p.tier for p in plans] == ["Q8_0", "IQ2_S"]
    assert {len(p.rows) for p in plans} == {71}


def test_csv_has_a_line_for_each_tensor_of_each_tier(tiny_model: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(planned(tiny_model, "--format", "csv"))))
    assert len(rows) == 7 * 71
    assert sum(int(row["size_bytes"]) for row in rows if row["tier"] == "Q8_0") == 7_162_080  # without padding
    assert {row["quantizable"] for row in rows} == {"true", "false"}


def test_substitutions_are_told_below_the_table(tmp_path: Path) -> None:
    write_tiny(tmp_path / "odd.gguf", n_embd=288, n_ff=256, n_block=8)
    text = planned(tmp_path / "odd.gguf", "-t", "Q4_K_M")
    assert "- Q4_K_M: 50 of 75 tensors substituted" in text
    assert "substituted from Q4_K, 288 is not divisible by 256" in text


@pytest.mark.system
def test_a_real_matrix_is_planned_with(tiny_model: Path, shared: Path) -> None:
    matrix = shared / "oracle" / "imatrix-tiny.gguf"
    assert planned(tiny_model, "--imatrix", str(matrix)) == planned(tiny_model)


@pytest.mark.engine
def test_the_stock_mix_is_shown_like_any_other(tiny_model: Path, shared: Path) -> None:
    rows = {row[0]: row for row in cells(planned(tiny_model, "-t", "Q4_K_M", protocol=STOCK))}
    assert rows["Q4_K_M"][2] == "4,247,616"
    assert rows["output.weight"][2:6] == ["BF16", "Q6_K", "860,160", "stock"]

    matrix = shared / "oracle" / "imatrix-tiny.gguf"
    text = planned(tiny_model, "-t", "IQ1_M", "--imatrix", str(matrix), protocol=STOCK)
    assert "- IQ1_M: 7 of 71 tensors at a type that needs no importances" in text
    assert "no imatrix for IQ1_M (stock)" in text


@pytest.mark.parametrize(("words", "error", "expected"), [
    (["-t", "Q9"], ProtocolError, "expected one of Q8_0, .*, got 'Q9'"),
    (["--set", "plan.tiers[Q4_K_M].ftype=F16"], PlanError, "ignores tensor types in a file of ftype F16"),
    (["--imatrix", "none.gguf"], ImatrixError, "cannot be read"),
])
def test_refusals(tiny_model: Path, words: list[str], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        planned(tiny_model, *words)


def test_a_quantized_base_is_refused(shared: Path) -> None:
    with pytest.raises(PlanError, match="quantizing twice"):
        planned(shared / "oracle" / "stock-Q8_0.gguf")
