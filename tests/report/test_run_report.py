"""The report of a run: everything it writes, the same bytes again, `--check`, and what is missing or hostile."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from quantkit.cli.report import report
from quantkit.core.errors import CheckFailed, InputError
from quantkit.core.files import sha256_file
from quantkit.job.manifest import APART
from quantkit.job.rundir import RunFolder
from quantkit.report.cells import draft_text, speed_notes
from quantkit.report.check import check_report, first_difference
from quantkit.report.pictures import NAMES
from quantkit.report.plot_style import Picture
from quantkit.report.run_data import read_run
from quantkit.report.run_report import report_names, write_report
from quantkit.spec.json_records import record_to_json
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Comparison, Floor, KernelFloor, PairVerdict, Slice, Slices, Verdicts
from tests.report.document import Document
from tests.report.run_factory import TIERS, add_speed, change_json, make_run
from tests.report.test_mtp_report import drafts, speed

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
ALL = report_names(["report/retention.md"])
_EXTRA = ("by_slice", "kld_by_text", "mtp", "speed")
WITHOUT_SLICES = {name for name in ALL if not any(extra in name for extra in _EXTRA)}


def add_verdicts(run: RunFolder) -> None:
    """Q8_0 and Q4_K_M not resolved, IQ1_M worse than both; floors and slices."""
    tiers = list(TIERS)
    pairs = (PairVerdict(a="Q8_0", b="Q4_K_M", statistic="kld", verdict="not resolved"),
             PairVerdict(a="Q8_0", b="IQ1_M", statistic="kld", verdict="better"),
             PairVerdict(a="Q4_K_M", b="IQ1_M", statistic="kld", verdict="better, by less than the margin"))
    rows = json.loads(run.manifest.read_bytes())["tiers"]
    hashes = {tier: rows[tier]["rows_sha256"] for tier in tiers}
    by_kld = Comparison(statistic="kld", margin=0.1, pairs=pairs, letters={"Q8_0": "a", "Q4_K_M": "a", "IQ1_M": "b"})
    verdicts = Verdicts(tiers=tuple(tiers), rows_sha256=hashes, n_article=10, g_eff=10.0, alpha=0.05, n_looks=1, floor_factor=2.0,
                        floors=(), comparisons=(by_kld,))
    (run.path / "audit" / "pairs.json").write_text(json.dumps(record_to_json(verdicts)))
    for name, sha256 in (("base", "b2" * 32), ("Q8_0", rows["Q8_0"]["sha256"])):
        kernel = KernelFloor(rows_sha256="", kernel="flash_attn", flash_attn="off", use_extra_bufts=True, n_ubatch=128, kld_max=0.1,
                             kld=Estimate(value=0.0005), same_top_p=Estimate(value=0.99))
        floor = Floor(floor_id="", name=name, sha256=sha256, chunks=(1,), n_scored=9, n_article=1, kernels=(kernel,))
        (run.path / "audit" / name).mkdir(exist_ok=True)
        (run.path / "audit" / name / "floor.json").write_text(json.dumps(record_to_json(floor)))
    part = Slice(kind="token", name="digits", lo=None, hi=None, n_scored=9, n_article=2, share=0.1, kld_share=0.2, flip_share=None,
                 kld=Estimate(value=0.1), same_top_p=None)
    (run.path / "audit" / "Q8_0" / "slices.json").write_text(
        json.dumps(record_to_json(Slices(tier="Q8_0", rows_sha256="", slices=(part,)))))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run in a folder with a space and a letter beyond ASCII, reported."""
    run = make_run(tmp_path_factory.mktemp("report") / "my rün", base_file="Größe-模型-BF16.gguf")
    write_report(run.path)
    return run


def test_everything_is_written_and_listed(made: RunFolder) -> None:
    assert {f"report/{path.name}" for path in made.report.iterdir()} == {*WITHOUT_SLICES, APART}
    same, apart = (json.loads((made.path / name).read_bytes())["files"] for name in ("manifest.json", APART))
    assert list(apart) == ["report/report.html"]
    listed = same | apart
    assert set(listed) >= WITHOUT_SLICES
    assert all(listed[name]["sha256"] == sha256_file(made.path / name) for name in WITHOUT_SLICES)


def test_the_same_records_give_the_same_bytes_in_the_c_locale(made: RunFolder) -> None:
    """Another process, another locale, another hash seed."""
    env = {**os.environ, "LC_ALL": "C", "PYTHONHASHSEED": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", "report", str(made.path), "--check"], env=env,
                          capture_output=True, text=True, check=False, cwd=made.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"{len(WITHOUT_SLICES)} files of the report are what the "
                                                           "records give\n")


def test_csv_and_parquet_open_in_pandas_with_types(made: RunFolder) -> None:
    from_csv = pd.read_csv(made.report / "retention.csv")
    from_parquet = pd.read_parquet(made.report / "retention.parquet")
    assert list(from_csv) == list(from_parquet)
    for name in ("size_bytes", "n_chunk", "n_scored", "n_article", "is_base"):
        assert [str(table[name].dtype) for table in (from_csv, from_parquet)] == ["int64", "int64"]
    for name in ("size_vs_base", "bpw", "kld_mean", "kld_mean_lo", "same_top_p_se", "kld_p999"):
        assert [str(table[name].dtype) for table in (from_csv, from_parquet)] == ["float64", "float64"]
    assert from_csv["kld_mean"].tolist() == from_parquet["kld_mean"].tolist()
    assert from_parquet["tier"].tolist() == ["BF16", *TIERS]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures, where what is drawn does not matter."""
    svg = b"<svg><!-- Created with matplotlib (https://matplotlib.org/), Matplotlib v3.0.0, --></svg>"
    pictures = {name: Picture(b"png", svg, "a picture") for name in NAMES if not any(extra in name for extra in _EXTRA)}
    monkeypatch.setattr("quantkit.report.run_report.draw_run", lambda data: pictures)


@pytest.mark.usefixtures("quick")
def test_check_names_what_differs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    write_report(run.path)
    assert check_report(run.path) == len(WITHOUT_SLICES)
    text = (run.report / "retention.md").read_text("utf-8")
    (run.report / "retention.md").write_text(text.replace("100.0 %", "100.1 %", 1), "utf-8")
    (run.report / "kld_tail.png").unlink()
    (run.report / "by_slice.svg").write_text("old")
    (run.report / "ppl_vs_size.svg").write_text("<svg><!-- Matplotlib v1.0.0, https://matplotlib.org/ --></svg>")
    with pytest.raises(CheckFailed) as failed:
        check_report(run.path)
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("4 of 15 files of the report in ")
    assert lines[1] == "  report/by_slice.svg: expected none, since its records are not there"
    assert lines[2] == "  report/kld_tail.png: missing"
    assert lines[3] == ("  report/ppl_vs_size.svg: drawn with Matplotlib v1.0.0, here with Matplotlib v3.0.0")
    assert lines[4].startswith("  report/retention.md: line 1")
    assert "100.1 %" in lines[4]
    assert failed.value.exit_code == 1
    write_report(run.path)
    assert check_report(run.path) == len(WITHOUT_SLICES)
    assert not (run.report / "by_slice.svg").exists()


@pytest.mark.usefixtures("quick")
def test_one_changed_row_is_a_failed_check(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    write_report(run.path)
    summary = json.loads(run.summary("Q8_0").read_bytes())
    summary["summary"]["kld"]["value"] *= 1.01
    change_json(run.summary("Q8_0"), summary=summary["summary"])
    with pytest.raises(CheckFailed, match=r"report/retention\.csv: line 3 is "):
        check_report(run.path)


def test_first_difference_is_told() -> None:
    assert first_difference("a\nb\nc\n", "a\nB\nc\n") == "line 2 is 'b', expected 'B'"
    assert first_difference("a\n", "a\nb\n") == "line 2 is nothing, expected 'b'"
    assert first_difference("a\r\n", "a\n") == "other line ends"


def test_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found no manifest\.json of one in"):
        read_run(tmp_path)
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    change_json(run.manifest, tiers={})
    with pytest.raises(InputError, match="expected at least one measured tier"):
        read_run(run.path)
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    run.summary("Q8_0").write_text("{")
    with pytest.raises(InputError, match=r"expected the summary of tier Q8_0 at .*summary\.json"):
        read_run(run.path)
    (run.path / "audit" / "pairs.json").write_text("{}")
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    with pytest.raises(InputError, match=r"pairs\.json to be written by this version of quantkit"):
        read_run(run.path)


def test_what_else_was_measured_is_used(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_verdicts(run)
    write_report(run.path)
    data = read_run(run.path)
    assert data.letters == {"Q8_0": "a", "Q4_K_M": "a", "IQ1_M": "b"}
    assert [s.tier for s in data.slices] == ["Q8_0"]
    assert set(data.floors) == {"b2" * 32, data.tiers[0].sha256}
    expected = {name for name in ALL if not any(extra in name for extra in ("by_text", "mtp", "speed"))}
    assert {f"report/{path.name}" for path in run.report.iterdir()} == {*expected, APART}
    page = (run.report / "report.html").read_text("utf-8")
    assert "smaller and not told apart from it: Q4_K_M" in page
    assert "no noise floor was measured" not in page
    assert "no slices were made" not in page
    assert "<th scope=\"col\">Group</th>" in page


def test_verdicts_of_other_rows_are_not_used(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_verdicts(run)
    change_json(run.summary("Q8_0"), rows_sha256="0" * 64)
    assert read_run(run.path).verdicts is None


@pytest.mark.usefixtures("quick")
def test_too_few_articles_and_files_from_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"theirs": 0.01}, n_article=2, with_base=False, without_plan=["theirs"])
    write_report(run.path)
    page = (run.report / "report.html").read_text("utf-8")
    assert "No ± and no interval: 2 articles" in page
    assert "What other articles would show" in page
    assert "Memory: the header" in page
    assert 'id="plans"' not in page
    assert re.search(r">[^<]*\b(nan|None|inf)\b", page.split("<body>")[1].split("<script>")[0]) is None


@pytest.mark.usefixtures("quick")
def test_cli_prints_one_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my rün", base_file="Größe-模型-BF16.gguf")
    result = CliRunner().invoke(report, [str(run.path), "--format", "csv"], catch_exceptions=False)
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["tier"] for row in rows] == ["BF16", *TIERS]
    assert rows[0]["file"] == "Größe-模型-BF16.gguf"


@pytest.mark.usefixtures("quick")
def test_a_second_text_stands_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01, "IQ1_M": 0.1})
    other = make_run(tmp_path / "other", {"Q8_0": 0.05, "IQ1_M": 0.5})
    second = RunFolder(path=run.path, corpus="chat.txt")
    for tier in ("Q8_0", "IQ1_M"):
        second.audited(tier).mkdir()
        for name in ("rows.parquet", "summary.json"):
            shutil.copy(other.audited(tier) / name, second.audited(tier) / name)
    change_json(run.manifest, further_corpora=[{"name": "chat.txt", "sha256": "e5" * 32, "token_ids_sha256": "f6" * 32}])
    write_report(run.path)
    tables = [json.loads((run.report / folder / "retention.json").read_bytes()) for folder in ("", "chat.txt")]
    assert [table["header"]["corpus_name"] for table in tables] == ["demo-eval.txt", "chat.txt"]
    assert tables[1]["header"]["token_ids_sha256"] == "f6" * 32
    first, later = (table["tiers"][1]["summary"]["kld"]["value"] for table in tables)
    assert later > 3 * first
    assert '<a href="chat.txt/report.html">chat.txt</a>' in (run.report / "report.html").read_text("utf-8")
    assert "On other texts" not in (run.report / "chat.txt" / "report.html").read_text("utf-8")
    assert (run.report / "kld_by_text.png").read_bytes().startswith(b"\x89PNG")
    assert not (run.report / "chat.txt" / "kld_by_text.png").exists()
    assert check_report(run.path) == 2 * len(WITHOUT_SLICES) + 2
    (run.report / "chat.txt" / "by_slice.png").write_bytes(b"")
    with pytest.raises(CheckFailed, match=r"report/chat\.txt/by_slice\.png: expected none"):
        check_report(run.path)


@pytest.mark.usefixtures("quick")
def test_speeds_stand_beside_the_table_and_are_listed_apart(tmp_path: Path) -> None:
    """The same measurement, timed twice: only what shows a time is another."""
    runs = [make_run(tmp_path / name, {"Q8_0": 0.01, "IQ1_M": 0.1}) for name in ("a", "b", "untimed")]
    for run, rate in zip(runs[:2], (85.25, 91.5), strict=True):
        add_speed(run, "Q8_0", decode_tokens_per_s=rate)
        add_speed(run, "of another run", decode_tokens_per_s=1.0)
    for run in runs:
        write_report(run.path)
        check_report(run.path)
    a, b, untimed = ({path.relative_to(run.path).as_posix(): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
                     for run in runs)
    differing = {name for name in a if not name.startswith("parts/") and a[name] != b.get(name)}
    assert differing == {"report/report.html", "report/speed.json", "report/speed.md", APART}
    assert a["manifest.json"] == untimed["manifest.json"]
    page = Document(a["report/report.html"].decode())
    head = page.rows.index(["Tier", "Size", "Prompt tok/s", "Decode tok/s", "Peak memory"])
    assert page.rows[head - 1][0] == "IQ1_M"  # right under the table of what the tiers keep
    size = page.row("Q8_0")[1]
    assert page.rows[head + 1] == ["Q8_0", size, "1,235", "85.2", "3.00 GiB"]
    assert page.rows[head + 2][0] != "IQ1_M"  # it was not timed
    assert "Some <CPU>, 8 cores, 4 threads, CPU, llama.cpp abc" in page.text
    assert "Decode tok/s" not in untimed["report/report.html"].decode()
    assert "none was timed" in untimed["report/report.html"].decode()


@pytest.mark.usefixtures("quick")
def test_the_page_follows_from_the_bundle_and_its_speeds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    add_speed(run, "Q8_0")
    write_report(run.path)
    shutil.rmtree(run.parts)  # as in a bundle
    check_report(run.path)
    held = (run.report / "speed.json").read_bytes()
    write_report(run.path)
    assert (run.report / "speed.json").read_bytes() == held
    change = json.loads(held)
    change[0]["plain"]["decode_tokens_per_s"] = 9999.0
    (run.report / "speed.json").write_text(json.dumps(change))
    with pytest.raises(CheckFailed, match=r"(?s)report/report\.html: line .*report/speed\.md: line"):
        check_report(run.path)
    for damage in (b"", b"[" * 100_000, b'{"a": 1}', b"[3, null, {}]", b"[" + held + b"]"):
        (run.report / "speed.json").write_bytes(damage)
        assert read_run(run.path).speeds == {}


@pytest.mark.usefixtures("quick")
def test_speeds_are_on_the_card_with_their_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01, "IQ1_M": 0.1})
    add_speed(run, "Q8_0")
    write_report(run.path)
    result = CliRunner().invoke(report, [str(run.path), "--card", "--update", str(run.path / "README.md")], catch_exceptions=False)
    for text in (result.stdout, (run.path / "README.md").read_text("utf-8")):
        lines = text.splitlines()
        at = lines.index("| Tier | Prompt tok/s | Decode tok/s | Peak memory |")
        assert lines[at + 2:at + 4] == ["| Q8_0 | 1,235 | 85.2 | 3.00 GiB |", ""]
        assert lines[at - 2].startswith("| IQ1_M |")
        assert "Speed and peak memory: Some &lt;CPU&gt;, 8 cores" in text
    result = CliRunner().invoke(report, [str(run.path), "--check", "--update", str(run.path / "README.md")], catch_exceptions=False)
    assert result.exit_code == 0
    assert sorted(json.loads((run.path / APART).read_bytes())["files"]) == [
        "README.md", "report/report.html", "report/speed.json", "report/speed.md"]


def test_what_drafts_gain_in_a_cell() -> None:
    assert draft_text(speed(drafts(1, 1.2, 1.1, 1.3), drafts(3, 1.24, 0.9, 1.35), best=3)) == "1.24 x with 3"
    assert draft_text(speed(drafts(1, 0.8, 0.7, 0.9), drafts(3, 0.5, 0.4, 0.6), best=0)) == "0.80 x at best"
    assert draft_text(speed(best=None)) == ""


def test_speeds_of_two_machines_are_told_apart() -> None:
    one = speed(best=None)
    other = dataclasses.replace(one, tier="Q8_0", machine=dataclasses.replace(one.machine, n_threads=2))
    assert len(speed_notes([one])) == 1
    notes = speed_notes([one, other])
    drafting = speed(drafts(1, 1.2, 1.1, 1.3), best=1)
    assert [note.split(":")[0] for note in speed_notes([drafting])] == ["Speed and peak memory", "With drafts"]
    assert [note.split(". The")[0] for note in notes] == [
        "Speed and peak memory: Some CPU, 8 cores, 4 threads, CPU, llama.cpp abc (Q4_K_M)",
        "Speed and peak memory: Some CPU, 8 cores, 2 threads, CPU, llama.cpp abc (Q8_0)"]
