"""Verdicts and slices of a run: from rows alone, the same every time, and made anew when the table changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file
from quantkit.job.pairs import compute_slices, compute_verdicts, order_tiers, read_classes
from quantkit.job.parts import read_parquet, write_parquet
from quantkit.job.rundir import RunFolder, write_json
from quantkit.measure.noise import KernelSettings, summarize_floor
from quantkit.measure.numbers import Rows
from quantkit.spec.json_records import record_to_json
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.verdict_records import Floor
from tests.measure.synthetic import make_rows


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path)


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1")


def scaled(rows: Rows, factor: float, seed: int = 1, noise: float = 0.1) -> Rows:
    own = rows.copy()
    own["kld"] *= factor * np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return own


def write_rows(run: RunFolder, tiers: dict[str, Rows]) -> dict[str, Rows]:
    for tier, rows in tiers.items():
        write_parquet(run.rows(tier), rows, {})
    return {tier: read_parquet(run.rows(tier))[0] for tier in tiers}


def write_floor(run: RunFolder, tier: str, rows: Rows) -> None:
    kernel = KernelSettings("no_repack", "on", False, 128)
    write_parquet(run.floor_rows(tier, kernel.name), rows, {})
    floor = Floor(floor_id="x", name=tier, sha256="y", chunks=(0,), n_scored=len(rows), n_article=20,
                  kernels=(summarize_floor(rows, kernel, "z"),))
    write_json(run.floor(tier), record_to_json(floor))


def test_all_pairs_are_compared_by_each_statistic_with_the_protocols_margins(run: RunFolder, protocol: Protocol) -> None:
    base = make_rows(n_article=20)
    got = compute_verdicts(run, protocol, write_rows(run, {"A": base, "B": scaled(base, 2), "C": scaled(base, 2, 2)}))
    assert got.tiers == ("A", "B", "C")
    assert [(c.statistic, len(c.pairs)) for c in got.comparisons] == [("kld", 3), ("ln_ppl_ratio", 3), ("same_top_p", 3)]
    assert got.comparison("kld").margin == pytest.approx(np.log1p(protocol.gate.equivalence_margin))
    assert got.comparison("same_top_p").margin == protocol.gate.margins.same_top_p
    assert [p.verdict for p in got.comparison("kld").pairs][:2] == ["better", "better"]
    assert got.comparison("kld").letters["A"] == "a"
    assert "a" not in got.comparison("kld").letters["B"]
    assert got.rows_sha256["A"] == sha256_file(run.rows("A"))
    assert [got.n_article, got.n_looks, got.floors] == [20, 1, ()]


def test_a_floor_marks_tiers_and_pairs(run: RunFolder, protocol: Protocol) -> None:
    base = make_rows(n_article=20)
    rows = write_rows(run, {"A": base, "B": scaled(base, 1.05, 2), "C": scaled(base, 30, 3)})
    for tier, own in rows.items():
        write_floor(run, tier, scaled(rows["A"], 0.9, 4 + len(tier)) if tier != "C" else scaled(own, 0.01, 9))
    got = compute_verdicts(run, protocol, rows)
    assert [(f.tier, f.indistinguishable) for f in got.floors] == [("A", True), ("B", True), ("C", False)]
    marks = {(p.a, p.b): p.arithmetic for p in got.comparison("kld").pairs}
    assert marks == {("A", "B"): True, ("A", "C"): False, ("B", "C"): False}
    assert {p.arithmetic for p in got.comparison("ln_ppl_ratio").pairs} == {None}


def test_a_screening_shares_its_errors_over_its_looks(run: RunFolder, protocol: Protocol) -> None:
    base = make_rows(n_article=20)
    rows = write_rows(run, {"A": base, "B": scaled(base, 1.05, noise=0.5)})
    once = compute_verdicts(run, protocol, rows).comparison("kld").pairs[0]
    write_json(run.screening, {"n_looks": 5})
    often = compute_verdicts(run, protocol, rows)
    assert often.n_looks == 5
    assert once.p is not None
    assert often.comparison("kld").pairs[0].p == pytest.approx(min(1.0, 5 * once.p))


def test_rows_of_other_tokens_are_refused(run: RunFolder, protocol: Protocol) -> None:
    a, b = make_rows(), make_rows()
    b["token"][5] += 1
    with pytest.raises(InputError, match="another token in B than in A"):
        compute_verdicts(run, protocol, write_rows(run, {"A": a, "B": b}))


def test_tiers_are_ordered_as_in_the_table() -> None:
    sizes = {"b": 5, "a": 5, "large": 9, "small": 1}
    assert order_tiers({name: {"size_bytes": n, "sha256": "0"} for name, n in sizes.items()}) == ["large", "a", "b", "small"]


def test_slices_by_token_need_the_texts_classes(run: RunFolder) -> None:
    rows = write_rows(run, {"A": make_rows()})["A"]
    assert {s.kind for s in compute_slices(run, "A", rows).slices} == {"entropy", "margin", "position"}
    classes = {"word start": list(range(500)), "digits": list(range(500, 1000)),
               "word inside": [], "punctuation": [], "whitespace": [], "special": []}
    write_json(run.token_classes, {"token_ids_sha256": "x", "classes": classes})
    found = read_classes(run)
    assert found is not None
    assert [found[0], found[999]] == ["word start", "digits"]
    by_token = [s for s in compute_slices(run, "A", rows).slices if s.kind == "token"]
    assert sum(s.n_scored for s in by_token) == len(rows)
    run.token_classes.write_text(json.dumps({"classes": {"digits": [1]}}))
    with pytest.raises(InputError, match="expected token classes in"):
        read_classes(run)


def test_a_further_text_lies_one_folder_deeper(run: RunFolder) -> None:
    further = dataclasses.replace(run, corpus="other.txt")
    paths = (run.rows("A"), further.rows("A"), run.pairs, further.pairs, further.floor_rows("base", "x"))
    assert [path.relative_to(run.path).as_posix() for path in paths] == [
        "audit/A/rows.parquet", "audit/A/other.txt/rows.parquet", "audit/pairs.json", "audit/other.txt/pairs.json",
        "audit/base/other.txt/floor/x.parquet"]
