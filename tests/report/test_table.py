"""The retention table: its csv interface, its text for people, and hostile names."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import locale
from typing import Any

import pytest
from markdown_it import MarkdownIt  # comes with rich

from quantkit.core.errors import InputError
from quantkit.measure.summary import base_rows, summarize
from quantkit.report.escape import base_name, csv_text, md_text, significant, with_error
from quantkit.report.table import TableHeader, TableRow, retention_csv, retention_json, retention_md
from quantkit.spec.records import TierSummary
from quantkit.spec.refpack_records import PackReference
from tests.measure.synthetic import make_rows

FIRST = ("tier,file,size_bytes,size_vs_base,bpw,n_chunk,n_scored,ppl_base,ppl_q,ln_ppl_ratio,ln_ppl_ratio_se,kld_mean,"
         "kld_mean_se,kld_p999,p_diff_mean,p_diff_rms,same_top_p,same_top_p_se,")

HEADER = TableHeader(
    result_id="a1" * 32, protocol_name="wikitext2-v1", protocol_id="b2" * 32, eval_id="c3" * 32, base_file="tiny-BF16.gguf",
    base_sha256="d4" * 32, base_type="BF16", corpus_name="wiki.test.raw", corpus_sha256="e5" * 32, token_ids_sha256="f6" * 32,
    chunk_rule="all 40 chunks", n_ctx=512, n_chunk=40, n_scored=800, n_article=10, backend="CPU", llama_commit="3f7c29d",
    library_version="llama-cpp-python 0.3.36",
)


def make_row(tier: str, size_bytes: int, **other: Any) -> TableRow:
    row = TableRow(tier=tier, file=f"tiny-{tier}.gguf", sha256=f"{size_bytes:064x}", size_bytes=size_bytes,
                   size_vs_base=size_bytes / 4_000_000, bpw=8.5, bpw_core=8.25, summary=summarize(make_rows()))
    return dataclasses.replace(row, **other)


def make_table(**other: Any) -> list[TableRow]:
    """IQ1_M, the base, Q8_0; `other` replaces fields of both tiers."""
    base = make_row("BF16", 4_000_000, summary=summarize(base_rows(make_rows())), is_base=True)
    small, large = make_row("IQ1_M", 500_000), make_row("Q8_0", 2_000_000)
    return [dataclasses.replace(small, **other), base, dataclasses.replace(large, **other)]


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_begins_with_the_published_columns() -> None:
    text = retention_csv(make_table())
    names = text.split("\n", 1)[0].split(",")
    assert text.startswith(FIRST)
    assert len(names) == len(set(names))
    assert {"n_article", "kld_mean_lo", "kld_mean_hi", "kld_mean_se_iid", "kld_mean_se_chunk", "p_diff_mean_se", "kld_p99",
            "kld_p999_lo", "kld_max", "p_diff_p001", "bpw_core", "substituted"} <= set(names)


def test_csv_has_the_base_first_then_sizes_descending() -> None:
    bigger = make_row("F32", 9_000_000)
    assert [row["tier"] for row in read_csv(retention_csv([*make_table(), bigger]))] == ["BF16", "F32", "Q8_0", "IQ1_M"]


def test_csv_has_full_precision_and_fractions() -> None:
    table = make_table()
    row = next(row for row in read_csv(retention_csv(table)) if row["tier"] == "Q8_0")
    summary = table[2].summary
    assert row["size_bytes"] == "2000000"
    assert row["size_vs_base"] == "0.5"
    assert float(row["kld_mean"]) == summary.kld.value
    assert float(row["kld_mean_se"]) == summary.kld.se
    assert float(row["same_top_p"]) == summary.same_top_p.value
    assert float(row["kld_p999"]) == summary.kld_quantile(0.999).value
    assert float(row["p_diff_rms_lo"]) == summary.p_diff_rms.lo
    assert float(row["same_top_p"]) < 1
    assert row["n_article"] == "10"


def test_csv_is_empty_where_there_are_too_few_articles() -> None:
    rows = [dataclasses.replace(row, summary=summarize(make_rows(n_article=2))) for row in make_table()]
    for row in read_csv(retention_csv(rows)):
        assert row["n_article"] == "2"
        assert {row[name] for name in row if name.endswith(("_se", "_lo", "_hi"))} == {""}
        assert row["kld_mean_se_iid"] != ""


def test_base_row_is_exactly_zero() -> None:
    row = read_csv(retention_csv(make_table()))[0]
    assert [row[name] for name in ("kld_mean", "ln_ppl_ratio", "same_top_p", "kld_max", "kld_mean_se")] == [
        "0.0", "0.0", "1.0", "0.0", "0.0"]
    assert row["ppl_q"] == row["ppl_base"]


def test_no_text_says_nan_or_none() -> None:
    for n_article in (1, 10):
        rows = [dataclasses.replace(row, summary=summarize(make_rows(n_article=n_article)), bpw_core=None) for row in make_table()]
        for text in (retention_csv(rows), retention_md(HEADER, rows)):
            assert "nan" not in text.lower()
            assert "None" not in text


def test_json_holds_every_number_and_comes_back() -> None:
    table = make_table()
    data = json.loads(retention_json(HEADER, table))
    assert list(data) == ["schema", "header", "tiers", "verdicts"]
    assert data["header"]["base_sha256"] == HEADER.base_sha256
    assert [tier["tier"] for tier in data["tiers"]] == ["BF16", "Q8_0", "IQ1_M"]
    assert TierSummary.from_json(data["tiers"][1]["summary"]) == table[2].summary


def test_md_names_what_the_numbers_depend_on() -> None:
    text = retention_md(HEADER, make_table())
    for fact in (HEADER.result_id, HEADER.protocol_id, HEADER.eval_id, HEADER.base_sha256, HEADER.corpus_sha256,
                 HEADER.token_ids_sha256, "BF16", "wiki.test.raw", "all 40 chunks", "800 tokens", "10 articles", "CPU", "3f7c29d",
                 "llama-cpp-python 0.3.36", "± is one standard error over articles"):
        assert fact in text
    assert "Derived" not in text


def md_cells(text: str, tier: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    names, row = lines[0], next(line for line in lines if line.startswith(f"| {tier}"))
    assert names.count("|") == row.count("|")
    return dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (names, row)), strict=True))


def test_md_rows_are_for_people() -> None:
    table = make_table()
    text = retention_md(HEADER, table)
    cells = md_cells(text, "Q8_0")
    kld = table[2].summary.kld
    assert cells["Size"] == "1.91 MiB"
    assert cells["Bytes"] == "2,000,000"
    assert cells["Size vs BF16"] == "50.0 %"
    assert cells["bpw"] == "8.50"
    assert cells["Mean KLD"] == with_error(kld.value, kld.se)  # type: ignore[arg-type]
    assert " ± " in cells["Mean KLD"]
    assert cells["Same top token"].endswith(" %")
    assert cells["PPL drift"][0] in "+-"
    base = md_cells(text, "BF16")
    assert [base["PPL drift"], base["Mean KLD"], base["RMS Δp"], base["Same top token"]] == ["0 %", "0", "0 %", "100.0 %"]


def test_md_says_why_there_is_no_interval() -> None:
    rows = [dataclasses.replace(row, summary=summarize(make_rows(n_article=2))) for row in make_table()]
    text = retention_md(HEADER, rows)
    assert "No ± and no interval: 2 articles." in text
    assert "±" not in "".join(line for line in text.splitlines() if line.startswith("|"))


def test_md_marks_what_was_substituted_and_derived() -> None:
    text = retention_md(dataclasses.replace(HEADER, derived="eval.n_chunk=8", notes=("IQ2_S failed: disk full",)),
                        make_table(substituted=0.979, notes=("45 x Q5_0 for Q4_K",)))
    assert md_cells(text, "Q8_0")["Tier"] == "Q8_0 † ‡"
    assert "† Q8_0: 97.9 % of parameters have another type than was asked for" in text
    assert "‡ Q8_0: 45 x Q5_0 for Q4_K" in text
    assert "**Derived protocol**, not the frozen one of that name: eval.n_chunk=8;" in text
    assert "IQ2_S failed: disk full" in text


def test_hostile_names_stay_text() -> None:
    evil = "`x`|<script>alert(1)</script>\n# [a](javascript:b) **b** _c_ &amp; https://e.vil @all \u202egpj"
    header = dataclasses.replace(HEADER, base_file="/srv/someone/" + evil, corpus_name=evil, protocol_name=evil, notes=(evil,))
    plain = retention_md(HEADER, make_table())
    text = retention_md(header, make_table(tier=evil, notes=(evil,)))
    assert "<script" not in text
    assert "https://" not in text
    assert "@all" not in text
    assert "\u202e" not in text
    assert "someone" not in text
    assert [line.count("|") for line in plain.splitlines() if line.startswith("|")] == [
        line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]
    assert not any(line.startswith("# [") for line in text.splitlines())


def test_markdown_renders_as_meant() -> None:
    evil = "`x`|<b>y</b> [a](http://b) **b** _c_"
    html = MarkdownIt("commonmark").enable("table").render(retention_md(HEADER, make_table(tier=evil, file=evil, notes=(evil,))))
    assert html.count("<table>") == 2
    assert html.count("<tr>") == 8
    assert html.count("<h1>") + html.count("<h2>") == 2
    shown = "`x`|&lt;b&gt;y&lt;/b&gt; [a](http://b) **b** _c_"
    assert html.count(shown) == 8  # two tiers: name, name with files, file, note with name
    assert not any(tag in html for tag in ("<a", "<b>", "<em>", "<script"))


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\t=1", "\r\n=1"])
def test_csv_text_is_never_a_formula(text: str) -> None:
    assert csv_text(text).startswith("'")
    row = next(row for row in read_csv(retention_csv(make_table(tier=text))) if row["size_bytes"] == "2000000")
    assert row["tier"] == csv_text(text)
    assert float(row["kld_mean"]) > 0


def test_no_folder_is_published() -> None:
    table = make_table(file="/srv/someone/models/secret.gguf")
    header = dataclasses.replace(HEADER, base_file=r"C:\Users\someone\b.gguf")
    for text in (retention_csv(table), retention_json(header, table), retention_md(header, table)):
        assert "someone" not in text
    assert [base_name("a/b.gguf"), base_name(r"C:\x\b.gguf"), base_name("b.gguf")] == ["b.gguf"] * 3


def test_other_locales_change_nothing() -> None:
    want = retention_csv(make_table()), retention_md(HEADER, make_table())
    before = locale.setlocale(locale.LC_ALL)
    try:
        for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C"):
            with contextlib.suppress(locale.Error):  # not every machine has it
                locale.setlocale(locale.LC_ALL, name)
            assert (retention_csv(make_table()), retention_md(HEADER, make_table())) == want
    finally:
        locale.setlocale(locale.LC_ALL, before)


def test_non_ascii_names_stay() -> None:
    assert "Größe-模型" in retention_md(HEADER, make_table(tier="Größe-模型"))
    assert "Größe-模型" in retention_csv(make_table(tier="Größe-模型"))
    assert "Größe-模型" in retention_json(HEADER, make_table(tier="Größe-模型"))


def test_a_table_needs_one_base_and_one_set_of_chunks() -> None:
    table = make_table()
    with pytest.raises(InputError, match="expected one base in the table, got 0 among 2 rows"):
        retention_csv([table[0], table[2]])
    with pytest.raises(InputError, match="expected one base in the table, got 2"):
        retention_csv([table[1], table[1]])
    other = make_row("Q4_K_M", 7, summary=summarize(make_rows(n_article=9)))
    with pytest.raises(InputError, match="got 36 and 720 for Q4_K_M"):
        retention_md(HEADER, [*table, other])


def test_equal_names_with_different_bytes_stand_apart() -> None:
    rows = [*make_table(), make_row("Q8_0", 2_000_000, sha256="0" * 64)]
    assert [row["sha256"] for row in read_csv(retention_csv(rows)) if row["tier"] == "Q8_0"] == ["0" * 64, f"{2_000_000:064x}"]


@pytest.mark.parametrize(("value", "se", "want"), [
    (0.0088054, 0.00054377, "0.00881 ± 0.00054"),
    (85.9622, 4.4359, "86.0 ± 4.4"),
    (0.5, 0.0996, "0.50 ± 0.10"),
    (1234.5, 123.4, "1234 ± 123"),
    (0.00017137, 0.0000032879, "0.0001714 ± 0.0000033"),
    (2.1e-12, 3.3e-13, "2.10e-12 ± 3.3e-13"),
    (-0.001, 0.31, "0.00 ± 0.31"),
    (0.0088054, None, "0.008805"),
    (0.0, 0.0, "0"),
])  # fmt: skip
def test_an_error_has_two_digits(value: float, se: float | None, want: str) -> None:
    assert with_error(value, se) == want


def test_signs_and_digits() -> None:
    assert with_error(0.3279, 0.073, signed=True) == "+0.328 ± 0.073"
    assert with_error(-0.3279, 0.073, signed=True) == "-0.328 ± 0.073"
    assert [significant(x, 4) for x in (0.16116, 85.9621, 123456.0, 3.2e-8)] == ["0.1612", "85.96", "123456", "3.200e-08"]


def test_usual_names_are_not_uglified() -> None:
    assert md_text("tiny-Q4_K_M (v2).gguf") == "tiny-Q4_K_M (v2).gguf"
    assert md_text("a_ _b_") == r"a\_ \_b\_"


PACK = PackReference(kind="pack", file="ref.safetensors", sha256="f" * 64, mass=0.999, max_ids=32768, tail_mass=1e-3, backend="CPU",
                     same_arithmetic=True, n_full=40, shortfall=2.13e-5, shortfall_se=4.4e-7)


def test_a_lower_bound_of_kld_has_its_shortfall_in_columns() -> None:
    small, base, large = make_table()
    table = [dataclasses.replace(small, reference=PACK), base, large]
    rows = {row["tier"]: row for row in read_csv(retention_csv(table))}
    names = ("ref", "ref_mass", "kld_shortfall", "kld_shortfall_se", "ref_sha256")
    assert [rows["IQ1_M"][name] for name in names] == ["pack", "0.999", "2.13e-05", "4.4e-07", "f" * 64]
    assert [rows["Q8_0"][name] for name in names] == ["base", "", "", "", ""]
    assert [rows["BF16"][name] for name in names] == [""] * 5
    text = retention_md(HEADER, table)
    assert md_cells(text, "IQ1_M")["KLD short by"] == "+2.1e-05 ± 4e-07 est."
    assert md_cells(text, "IQ1_M")["Reference"] == "pack, mass 0.999"
    assert (md_cells(text, "Q8_0")["KLD short by"], md_cells(text, "Q8_0")["Reference"]) == ("", "base")
    assert "Reference" not in md_cells(retention_md(HEADER, make_table()), "IQ1_M")
    tier = next(tier for tier in json.loads(retention_json(HEADER, table))["tiers"] if tier["tier"] == "IQ1_M")
    assert (tier["reference"]["shortfall"], tier["reference"]["mass"]) == (2.13e-5, 0.999)
    assert md_cells(retention_md(HEADER, [dataclasses.replace(small, reference=dataclasses.replace(PACK, shortfall=None)), base]),
                    "IQ1_M")["KLD short by"] == "unknown"
