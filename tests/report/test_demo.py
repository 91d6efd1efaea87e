"""`reports/demo` is what `make demo` leaves: whole, valid, and what a fresh run gives within the tolerance that its README has."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import jsonschema
import pytest

from quantkit.core.files import sha256_file
from quantkit.job.ladder import run_ladder
from quantkit.job.manifest import APART
from quantkit.job.progress import Silent
from quantkit.report.run_report import make_tables, report_names
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import load_protocol

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "reports" / "demo"
FRESH = ["Q8_0", "Q3_K_M"]  # the I-quants' tables take seconds to make
EXACT = ("tier", "file", "size_bytes", "size_vs_base", "bpw", "bpw_core", "n_chunk", "n_scored", "n_article", "substituted")


def read_table(text: str) -> dict[str, dict[str, str]]:
    return {row["tier"]: row for row in csv.DictReader(io.StringIO(text))}


def test_every_file_is_the_one_that_the_manifest_lists() -> None:
    listed = {**json.loads((DEMO / "manifest.json").read_bytes())["files"], **json.loads((DEMO / APART).read_bytes())["files"]}
    here = {path.relative_to(DEMO).as_posix() for path in DEMO.rglob("*") if path.is_file()} - {"manifest.json", APART, "README.md"}
    wanted = {name for name in listed if name.split("/")[0] in {"report", "plan", "protocol.toml", "base.json"}}
    assert here == wanted
    assert {name: sha256_file(DEMO / name) for name in here} == {name: listed[name]["sha256"] for name in here}


def test_it_has_every_picture_that_a_run_of_one_text_has() -> None:
    expected = {name for name in report_names(["report/retention.md"]) if "kld_by_text" not in name and "speed" not in name}
    assert {f"report/{path.name}" for path in (DEMO / "report").iterdir()} >= expected


def test_json_is_valid_and_plans_are_whole() -> None:
    schema = json.loads((ROOT / "quantkit" / "spec" / "report_schema.json").read_bytes())
    table = json.loads((DEMO / "report" / "retention.json").read_bytes())
    jsonschema.validate(table, schema)
    tiers = [tier["tier"] for tier in table["tiers"][1:]]
    assert {Plan.from_json(json.loads(path.read_bytes())).tier for path in (DEMO / "plan").iterdir()} == set(tiers)
    ids = {load_protocol(name).protocol_id for name in (DEMO / "protocol.toml", "demo-v1")}
    assert ids == {table["header"]["protocol_id"]}


@pytest.mark.engine
def test_a_fresh_run_gives_the_same_table(tmp_path: Path) -> None:
    readme = " ".join((DEMO / "README.md").read_text("utf-8").split())
    kld, ln_ratio, same = (float(x) for x in re.findall(r"KLD within (\S+) %, .*? within (\S+), .*? within (\d\.\d+)", readme)[0])
    model = ROOT / "quantkit" / "data" / "demo" / "tiny-qwen35-mtp-BF16.gguf"
    result = run_ladder(model, load_protocol("demo-v1"), tmp_path / "a run", FRESH, Silent())
    fresh = read_table(make_tables(result.folder).csv)
    held = read_table((DEMO / "report" / "retention.csv").read_text("utf-8"))
    for tier in ["BF16", *FRESH]:
        assert {name: fresh[tier][name] for name in EXACT} == {name: held[tier][name] for name in EXACT}
        assert float(fresh[tier]["kld_mean"]) == pytest.approx(float(held[tier]["kld_mean"]), rel=kld / 100)
        assert float(fresh[tier]["ln_ppl_ratio"]) == pytest.approx(float(held[tier]["ln_ppl_ratio"]), abs=ln_ratio)
        assert float(fresh[tier]["same_top_p"]) == pytest.approx(float(held[tier]["same_top_p"]), abs=same)
        assert float(fresh[tier]["ppl_base"]) == pytest.approx(float(held[tier]["ppl_base"]), rel=1e-3)
