"""Tables on stdout."""

from __future__ import annotations

import json

import click
from click.testing import CliRunner

from quantkit.cli.output import Cell, format_option, md_cell, render_table, visible

COLUMNS = ("tier", "bpw", "tied")
ROWS: list[tuple[Cell, ...]] = [("Q8_0", 8.5, True), ("a|b", None, False)]


def test_markdown() -> None:
    expected = ["| tier | bpw | tied |", "| ---- | --: | ---- |", "| Q8_0 | 8.5 | yes  |", r"| a\|b |     | no   |"]
    assert expected == render_table(COLUMNS, ROWS, "md").splitlines()


def test_csv() -> None:
    expected = "tier,bpw,tied\nQ8_0,8.5,true\na|b,,false\n"
    assert expected == render_table(COLUMNS, ROWS, "csv")


def test_json_is_a_list_of_objects() -> None:
    expected = [{"tier": "Q8_0", "bpw": 8.5, "tied": True}, {"tier": "a|b", "bpw": None, "tied": False}]
    assert expected == json.loads(render_table(COLUMNS, ROWS, "json"))


def test_cells_of_a_column_have_one_width() -> None:
    lines = render_table(("name", "n"), [("long name", "1,000"), ("x", "7"), ("y", None)], "md").splitlines()
    expected = ["| name      |     n |", "| --------- | ----: |", "| long name | 1,000 |", "| x         |     7 |",
                "| y         |       |"]
    assert expected == lines


def test_no_rows() -> None:
    assert render_table(("a", "b"), [], "md") == "| a   | b   |\n| --- | --- |\n"


def test_hidden_characters_become_visible() -> None:
    assert visible("größe é 模型") == "größe é 模型"
    assert visible("\x1b[2J\x7f\x85\u202e\u2028\udcff") == r"\x1b[2J\x7f\x85\u202e\u2028\udcff"


def test_long_cells_are_cut() -> None:
    assert md_cell("x" * 201) == "x" * 199 + "…"
    assert md_cell("x" * 200) == "x" * 200


def test_format_option() -> None:
    @click.command()
    @format_option
    def verb(output_format: str) -> None:
        click.echo(output_format)

    assert CliRunner().invoke(verb, []).output == "md\n"
    assert CliRunner().invoke(verb, ["--format", "csv"]).output == "csv\n"
    assert CliRunner().invoke(verb, ["--format", "xml"]).exit_code == 2
