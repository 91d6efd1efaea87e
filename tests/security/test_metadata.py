"""Names and metadata out of files of strangers, in every form that is printed or written."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from quantkit.cli.bars import Bars, Lines
from quantkit.cli.main import run
from quantkit.cli.output import csv_table, md_table, visible
from quantkit.job.rundir import RunFolder, write_json
from quantkit.report.card import CardOptions, front_matter, new_card
from quantkit.report.escape import csv_text, md_text, plain_line
from quantkit.report.run_data import read_run
from quantkit.spec.toml_records import write_toml
from tests.gguf_factory import tiny_model
from tests.report.run_factory import make_run

HOSTILE = ["<script>alert(1)</script>", "a|b", "---", "\n---\nlicense: mit\n", "=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)",
           " =1", "＝1+1",
           "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "line\nline\r\nline", "\u202egpj.exe", "\u2066\u2069\u200b", "\u2028\u2029\x85",
           "`code` ![i](http://e.vil/x) [l](javascript:x)", "<!-- quantkit:end -->", "&lt;b&gt;", "{{ 7*7 }}", "%n%s",
           "\ufffe\uffff\ufdd0", "\udcff", "\0", "\t=1+1"]
SIGNS = "<>|`-=+@&#*_~[]()!\\\n\r\x1b\u202e a:/'\""
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), st.text(alphabet=SIGNS, max_size=30))


@given(texts)
def test_a_line_is_one_line_of_visible_text(value: str) -> None:
    line = plain_line(value)
    assert len(f"{line}.".splitlines()) == 1
    assert line == plain_line(line)
    line.encode()  # nothing that UTF-8 does not hold
    assert all(c.isprintable() or c == " " or ord(c) > 0x7F for c in line)


@given(texts)
def test_markdown_of_any_text_is_that_text(value: str) -> None:
    html = MarkdownIt("gfm-like", {"linkify": False}).render(f"x {md_text(value)} x")
    assert html.startswith("<p>x ")
    assert html.count("<") == 2, html  # the paragraph's own


@given(st.lists(texts, min_size=1, max_size=4))
def test_a_row_has_as_many_cells_whatever_is_in_them(values: list[str]) -> None:
    columns = [f"c{i}" for i in range(len(values))]
    for line in md_table(columns, [values]).splitlines():
        assert line.replace("\\\\", "").replace("\\|", "").count("|") == len(values) + 1
        assert line.isprintable()
    (_, row) = csv.reader(io.StringIO(csv_table(columns, [values])))
    assert len(row) == len(values)


@given(texts)
def test_no_csv_cell_is_a_formula(value: str) -> None:
    for cell in (csv_text(value), next(csv.reader(io.StringIO(csv_table(["c"], [[value]]).split("\n", 1)[1])), [""])[0]):
        assert cell.lstrip()[:1] not in {*"=+-@＝＋－＠"}, cell
        assert cell.isprintable() or not cell.isascii()


@given(texts)
def test_nothing_printed_steers_a_terminal(value: str) -> None:
    assert visible(value).isprintable()


@given(st.text(max_size=20))
def test_a_protocol_that_is_written_out_shows_what_it_holds(value: str) -> None:
    written = write_toml({"title": value})
    assert written.replace("\n", "").isprintable()
    assert tomllib.loads(written) == {"title": value}


def test_progress_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines() as progress:
        progress.start("audit \x1b[2J", 1)
        progress.finish()
        progress.note("a note \u202e of \x9b31m a hub")
    err = capsys.readouterr().err
    assert err.replace("\n", "").isprintable()
    assert [line.split(":")[0] for line in err.splitlines()] == [r"audit \x1b[2J", r"a note \u202e of \x9b31m a hub"]


def test_bars_steer_no_terminal() -> None:
    from rich.console import Console

    bars, text = Bars(), io.StringIO()
    bars._bars.live.console = Console(file=text, force_terminal=True, width=120, color_system=None)
    bars.note("a note \u202e of \x9b31m [bold]a hub[/bold] \x1b]0;x\x07")
    assert text.getvalue() == "a note \\u202e of \\x9b31m [bold]a hub[/bold] \\x1b]0;x\\x07\n"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("run") / "run", {"Q8_0": 0.01})


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_front_matter_stays_what_it_is(bundle: RunFolder, value: str) -> None:
    """A YAML parser finds the same keys, and the text, whatever the model says of itself."""
    yaml: Any = pytest.importorskip("yaml")
    path = bundle.path / "base.json"
    held = json.loads(path.read_bytes())
    path.write_text(json.dumps({**held, "name": value, "license": value, "repository": value, "languages": [value]}), "ascii")
    try:
        data = read_run(bundle.path)
        matter = front_matter(data, CardOptions(quantized_by="me"))
        card = new_card(data, CardOptions(quantized_by="me"))
    finally:
        write_json(path, held)
    assert matter.count("---\n") == 2
    assert card.startswith(matter)
    found = yaml.safe_load(matter.split("---\n")[1])
    for key in ("license", "base_model"):
        assert found.get(key, "") == plain_line(value)
    assert found.get("language", [""]) == [plain_line(value)]
    assert set(found) <= {"base_model", "base_model_relation", "license", "pipeline_tag", "library_name", "quantized_by",
                          "language", "tags"}


@pytest.mark.parametrize("output_format", ["md", "json", "csv"])
def test_a_model_of_hostile_names_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, output_format: str) -> None:
    for i, value in enumerate(v for v in HOSTILE if v.isascii() or "\udcff" not in v):
        path = tiny_model(tmp_path / f"{i}.gguf", n_block=1, metadata={"general.name": value, "tokenizer.ggml.pre": value})[0]
        assert run(["show", str(path), "--format", output_format]) == 0
        out, err = capsys.readouterr()
        assert out.replace("\n", "").isprintable()
        assert err == ""
        assert "<script" not in out or output_format != "md"


def test_an_error_about_a_hostile_name_is_plain_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("\x1b[2Jgone.gguf", "a\u202efugg.gguf", "new\nline.gguf"):
        assert run(["show", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert err.replace("\n", "").isprintable()
        assert "\x1b" not in err
