"""Bundles whose records say strange things: verified as failed, reported or refused, and never an exception or a way out."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file
from quantkit.job.manifest import result_id_of, seal_of
from quantkit.job.rundir import RunFolder
from quantkit.job.verify import verify_bundle
from quantkit.report.card import CardOptions, new_card
from quantkit.report.html import report_html
from quantkit.report.run_data import read_texts
from quantkit.report.table import retention_csv, retention_json
from quantkit.report.table_md import retention_md
from quantkit.spec.plan import Plan
from tests.fuzz.damage import damage_bytes
from tests.fuzz.json_damage import damage_json
from tests.fuzz.laws import fuzz, generator, one_sentence
from tests.job.bundles import base_rows_of, make_bundle, tier_rows
from tests.report.run_factory import make_plan, make_run


def no_report(run: RunFolder) -> Mapping[str, bytes]:
    return {}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = base_rows_of()
    return make_bundle(tmp_path_factory.mktemp("b") / "bundle", {"A": rows, "B": tier_rows(rows, kld_factor=2)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("r") / "run", n_article=8).path


@contextlib.contextmanager
def put_back(path: Path) -> Any:
    """Whatever the block does to a file is undone."""
    data = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(data)


def damage_file(path: Path, rng: random.Random) -> bool:
    """Change a JSON file's value, now and then its bytes; whether anything is different."""
    before = path.read_bytes()
    if path.suffix != ".json" or rng.random() < 0.15:
        path.write_bytes(damage_bytes(before, rng))
    else:
        path.write_text(json.dumps(damage_json(json.loads(before), rng, rng.choice((1, 1, 2)))), "utf-8")
    return path.read_bytes() != before


def seal_again(bundle: Path, changed: str) -> None:
    """A manifest that fits the changed file, as someone would write it who wants to be believed."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, UnicodeError):
        path = bundle / "manifest.json"
        facts = json.loads(path.read_bytes())
        if changed in facts["files"]:
            facts["files"][changed] = {"sha256": sha256_file(bundle / changed), "size_bytes": (bundle / changed).stat().st_size}
        _, tier, kind = f"{changed}//".split("/")[:3]
        if kind == "summary.json":
            facts["tiers"][tier]["summary_sha256"] = sha256_file(bundle / changed)
        facts["result_id"] = result_id_of(facts)
        text = json.dumps({**facts, "seal": seal_of(facts)}, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        path.write_text(text, "utf-8")


def numbers_in(summary: bytes) -> Any:
    """What a summary's record says was measured, to nine digits: rounding is no damage. None where it says nothing readable."""
    try:
        return json.loads(summary, parse_float=lambda number: f"{float(number):.9g}")["summary"]
    except (ValueError, TypeError, KeyError):
        return None


@fuzz(20)
def test_a_bundle_with_a_changed_file_never_verifies(bundle: Path, number: int) -> None:
    rng = generator(number)
    path = rng.choice(sorted(p for p in bundle.rglob("*") if p.is_file() and p.suffix in (".json", ".toml", ".parquet")))
    with put_back(path), one_sentence():
        if damage_file(path, rng):
            assert not verify_bundle(bundle, no_report).passed


@fuzz(15)
def test_a_bundle_sealed_again_is_judged_without_an_exception(bundle: Path, number: int) -> None:
    rng = generator(number)
    path = rng.choice(sorted(bundle.rglob("*.json")))
    with put_back(bundle / "manifest.json"), put_back(path), one_sentence():
        before = path.read_bytes()
        damage_file(path, rng)
        seal_again(bundle, path.relative_to(bundle).as_posix())
        verification = verify_bundle(bundle, no_report)
        assert all(failure.file and failure.expected and failure.found for failure in verification.failures)
        if path.name == "summary.json" and numbers_in(path.read_bytes()) != numbers_in(before):
            assert not verification.passed  # a seal covers no number that the rows do not give


@fuzz(40)
def test_a_report_of_strange_records_is_text_or_a_sentence(run: Path, number: int) -> None:
    rng = generator(number)
    path = rng.choice([run / "manifest.json", *sorted(p for p in run.rglob("*") if p.suffix in (".json", ".toml"))])
    with put_back(path), one_sentence():
        damage_file(path, rng)
        for data in read_texts(run):
            assert "\x1b" not in retention_json(data.header, data.rows, data.verdicts) + retention_csv(data.rows)
            for text in (retention_md(data.header, data.rows, data.verdicts), report_html(data, {}), new_card(data, CardOptions())):
                assert "<script>alert(1)" not in text  # in json and csv it is a value like any other
                assert "\x1b" not in text


#: Records that once broke the code that tells them: file, where in it, and what stood there.
FOUND: list[tuple[str, list[str | int], Any]] = [
    ("audit/Q4_K_M/summary.json", ["summary", "kld_quantiles", 0], {"": 0.0, "lo": None, "q": 0.0, "reason": None, "value": 0.0}),
    ("audit/Q8_0/summary.json", ["summary", "p_diff_quantiles", 12, "q"], "\ud800"),
    ("audit/Q8_0/summary.json", ["summary", "kld", "value"], float("nan")),
    ("plan/Q8_0.json", ["rows", 0, "name"], 1e308), ("plan/Q8_0.json", ["rows", 0, "role"], "<b>"),
    ("manifest.json", ["tiers", "Q8_0", "bpw_core"], "x"), ("manifest.json", ["tiers", "Q8_0", "size_bytes"], 10**30),
    ("manifest.json", ["tiers", "../x"], {}), ("manifest.json", ["tiers"], [1]), ("manifest.json", ["base", "size_bytes"], 0),
    ("manifest.json", ["protocol", "protocol_id"], "\x1b[2J"), ("manifest.json", ["build"], None),
    ("manifest.json", ["protocol", "imatrix_id"], None), ("manifest.json", ["further_corpora"], [{"name": "../../x"}]),
]


@pytest.mark.parametrize(("name", "place", "value"), FOUND, ids=[f"{name} {place}" for name, place, _ in FOUND])
def test_records_that_once_broke_something(run: Path, name: str, place: list[str | int], value: Any) -> None:
    with put_back(run / name):
        record = json.loads((run / name).read_bytes())
        holder = record
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value
        (run / name).write_text(json.dumps(record), "utf-8")
        with pytest.raises(InputError) as caught:
            read_texts(run)
        assert "\n" not in str(caught.value)


def test_facts_of_a_base_that_make_no_sense_are_none(run: Path) -> None:
    with put_back(run / "base.json"):
        facts = json.loads((run / "base.json").read_bytes())
        facts["memory"][0]["recurrent_bytes"] = "=cmd()"
        (run / "base.json").write_text(json.dumps(facts), "utf-8")
        assert read_texts(run)[0].base is None


@fuzz(60)
def test_a_strange_plan_is_refused(number: int) -> None:
    rng = generator(number)
    plan = make_plan("Q4_K_M", "Q4_K").to_json()
    changed = json.loads(json.dumps(damage_json(plan, rng)))
    with one_sentence():
        assert Plan.from_json(changed).to_json() == changed


@pytest.mark.system
def test_the_sound_ones_pass(bundle: Path, run: Path, tmp_path: Path) -> None:
    assert verify_bundle(Path(shutil.copytree(bundle, tmp_path / "copy")), no_report).passed
    assert len(read_texts(run)) == 1
