"""Verdicts for people and for programs."""

from __future__ import annotations

import csv
import io
import json

import pytest

from quantkit.measure.summary import summarize
from quantkit.measure.verdict import compare_pairs, letters
from quantkit.report.table import retention_csv, retention_md
from quantkit.report.verdict_table import floor_lines, pairs_csv, pairs_json, pairs_md, verdict_lines
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Comparison, FloorVerdict, KernelFloor, Verdicts, WeightsKld
from tests.measure.synthetic import make_rows
from tests.measure.test_verdict import scaled
from tests.report.test_table import HEADER, make_table, md_cells

A = make_rows(n_article=20)
TIERS = {"Q8_0": A, "Q5_K_M": scaled(A, 2.0, noise=0.1), "Q5_K_S": scaled(A, 2.0, noise=1.5, seed=3),
         "IQ1_M": scaled(A, 9, noise=0.1)}
FLOOR = FloorVerdict(tier="Q8_0", kernel="no_repack", kld=0.01, floor=0.008, ratio=1.25, lo=1.2, hi=1.3, p=0.0, p_holm=0.0,
                     indistinguishable=True)


def make_verdicts() -> Verdicts:
    comparisons = []
    for statistic in ("kld", "same_top_p"):
        pairs = compare_pairs(TIERS, statistic, margin=0.0488)
        comparisons.append(Comparison(statistic=statistic, margin=0.0488, pairs=pairs, letters=letters(list(TIERS), pairs)))
    return Verdicts(tiers=tuple(TIERS), rows_sha256={}, n_article=20, g_eff=20.0, alpha=0.05, n_looks=1,
                    comparisons=tuple(comparisons), floor_factor=2.0, floors=(FLOOR,))


def test_the_report_shows_neighbours_and_every_pair_that_is_not_told_apart() -> None:
    lines = [line.split("|") for line in verdict_lines(make_verdicts()) if line.startswith(("| Q", "| I"))]
    shown = [(cells[1].strip(), cells[2].strip()) for cells in lines if len(cells) == 8 and "_" in cells[2]]
    assert shown == [("Q8_0", "Q5_K_M"), ("Q5_K_M", "Q5_K_S"), ("Q5_K_S", "IQ1_M")]
    text = "\n".join(verdict_lines(make_verdicts()))
    assert "the family is all 6 pairs, p is Holm's. Equivalent: by less than 5 %. Not resolved is not equal." in text
    assert "Detectable in four of five cases:" in text
    assert "not resolved (the margin would need about" in text


def test_every_pair_by_every_statistic_is_in_the_whole_list() -> None:
    verdicts = make_verdicts()
    rows = list(csv.DictReader(io.StringIO(pairs_csv(verdicts))))
    assert len(rows) == 12
    assert float(rows[0]["difference"]) == verdicts.comparisons[0].pairs[0].difference
    assert {row["statistic"] for row in rows} == {"kld", "same_top_p"}
    assert rows[0]["arithmetic"] == ""
    data = json.loads(pairs_json(verdicts))
    assert data["comparisons"][0]["pairs"][0]["verdict"] == rows[0]["verdict"]
    text = pairs_md(verdicts)
    assert "## By mean KLD" in text
    assert "## By share of equal top tokens" in text
    assert text.count("| Q8_0 | IQ1_M |") == 2


def test_a_floor_says_what_it_means() -> None:
    text = "\n".join(floor_lines(make_verdicts()))
    assert "| Q8_0 | 0.0100 | 0.00800 | 1.25 | 1.20 to 1.30 | no_repack | indistinguishable from base here |" in text
    assert "below 2 times its own floor" in text


@pytest.mark.parametrize("name", ["Group", "Noise floor", "KLD of weights"])
def test_columns_of_what_was_not_measured_are_left_away(name: str) -> None:
    assert name not in retention_md(HEADER, make_table())


def test_the_table_shows_what_was_measured_beside_rows() -> None:
    kernel = KernelFloor(rows_sha256="a", kernel="no_repack", flash_attn="on", use_extra_bufts=False, n_ubatch=512,
                         kld=Estimate(value=0.002), kld_max=0.1, same_top_p=Estimate(value=0.99))
    weights = WeightsKld(weights_id="x", rows_sha256="y", tier="Q8_0", sha256="z", n_scored=800, n_article=10,
                         kld=summarize(make_rows()).kld, same_top_p=Estimate(value=0.9))
    table = make_table(letters="ab", floor=kernel, floor_verdict=FLOOR, weights=weights)
    cells = md_cells(retention_md(HEADER, table, make_verdicts()), "Q8_0")
    assert [cells["Group"], cells["Noise floor"]] == ["ab", "0.0020"]
    assert " ± " in cells["KLD of weights"]
    row = next(row for row in csv.DictReader(io.StringIO(retention_csv(table))) if row["tier"] == "Q8_0")
    assert [row["letters"], row["floor_kernel"], row["floor_kld"], row["kld_over_floor"], row["indistinguishable"]] == [
        "ab", "no_repack", "0.002", "1.25", "1"]
    assert float(row["kld_weights"]) == weights.kld.value
    base = next(csv.DictReader(io.StringIO(retention_csv(make_table()))))
    assert [base["letters"], base["kld_weights"], base["indistinguishable"]] == ["", "", ""]
