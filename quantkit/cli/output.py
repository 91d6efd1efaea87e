"""Tables on stdout, the same way in every verb: `--format md|json|csv`.

Markdown is for people: what would break a cell is escaped, and long text is cut. JSON and CSV are for programs: full precision,
nothing rounded or cut. An undefined value is an empty cell, or null. Text out of a model file is hostile, so in none of the
three can it steer a terminal.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from quantkit.report.escape import no_formula

Cell = str | int | float | bool | None

_COMMAND = TypeVar("_COMMAND", bound=Callable[..., Any])
_MAX_CELL = 200  # characters of a Markdown cell
_MARKDOWN = str.maketrans({"\\": r"\\", "|": r"\|", "`": r"\`", "<": "&lt;", "[": r"\["})


def format_option(command: _COMMAND) -> _COMMAND:
    """The shared option `--format`; the command gets it as `output_format`."""
    return click.option("--format", "output_format", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True,
                        help="Markdown for people, JSON or CSV for programs.")(command)


def render_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], output_format: str) -> str:
    """One table as text: Markdown, a JSON list of objects, or CSV with a header line."""
    if output_format == "md":
        return md_table(columns, rows)
    if output_format == "csv":
        return csv_table(columns, rows)
    return json_text([dict(zip(columns, row, strict=True)) for row in rows])


def md_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too; columns of numbers lean right."""
    table = [[md_cell(cell) for cell in row] for row in rows]
    right = [bool(table) and all(_is_number(row[i]) for row in table) for i in range(len(columns))]
    width = [max(3, len(column), *(len(row[i]) for row in table)) for i, column in enumerate(columns)]
    rule = ["-" * (width[i] - 1) + ":" if right[i] else "-" * width[i] for i in range(len(columns))]
    lines = [[c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right, strict=True)]
             for row in [list(columns), rule, *table]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def md_cell(cell: Cell) -> str:
    """One value as a Markdown cell: visible, escaped, at most 200 characters."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    text = str(cell)
    return md_text(text if len(text) <= _MAX_CELL else text[:_MAX_CELL - 1] + "…")


def md_text(text: str) -> str:
    """One line of text inside Markdown: visible, and nothing in it is markup."""
    return visible(text).translate(_MARKDOWN)


def visible(text: str) -> str:
    """Text that cannot steer a terminal: what moves the cursor, turns the direction or ends the line becomes an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """CSV with a header line and plain newlines; None is an empty cell, a bool is `true` or `false` as in JSON.

    A text that a spreadsheet would run gets an apostrophe before its leading `= + - @`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def _csv_cell(cell: Cell) -> Cell:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return no_formula(visible(cell)) if isinstance(cell, str) else cell


def json_text(value: Any) -> str:
    """Indented JSON, in ASCII."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").replace("%", "").replace(".", "", 1).lstrip("-").isdigit()
