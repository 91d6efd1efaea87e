"""HTML from Python values: every text is escaped where it enters, so that no name or metadata of a file is ever markup."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from quantkit.report.escape import plain_line
from quantkit.report.plot_style import Picture


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


class Cell(NamedTuple):
    """A cell of a table: what is shown, what it sorts by (None: what is shown), and whether it is text to be read."""

    shown: str
    sort: float | None = None
    is_text: bool = False


def text(value: object) -> Html:
    """A value as HTML text; `Html` stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(plain_line(str(value)), quote=True))


def join(parts: Iterable[Html], between: str = "\n") -> Html:
    """Parts one after another."""
    return Html(between.join(parts))


def element(name: str, content: object, **attributes: str) -> Html:
    """One element with its attributes; `class_` is class."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{text(content)}</{name}>")


def code(value: object) -> Html:
    """A hash or another thing to be copied."""
    return element("code", value)


def preformatted(value: str) -> Html:
    """Lines as they are."""
    return Html(f"<pre>{html.escape(''.join(c for c in value if c.isprintable() or c == chr(10)), quote=True)}</pre>")


def bullets(items: Iterable[object]) -> Html:
    """A list."""
    return Html(f"<ul>{''.join(element('li', item) for item in items)}</ul>")


def definitions(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values."""
    return Html(f"<dl>{''.join(element('dt', name) + element('dd', value) for name, value in pairs)}</dl>")


def details(title: object, content: Html) -> Html:
    """A section that is closed until it is wanted."""
    return Html(f"<details><summary>{text(title)}</summary>{content}</details>")


def section(name: str, title: str, *content: Html) -> Html:
    """A part of the page with a heading and an address of its own."""
    return Html(f'<section id="{text(name)}">\n{element("h2", title)}\n{join(content)}\n</section>')


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, sortable: bool = False,
          first_row_class: str | None = None) -> Html:
    """A table in a box that scrolls; cells lean right unless they are text, the first column left."""
    wide = [any(row[i].is_text for row in rows) for i in range(len(columns))]
    head = "".join(element("th", name, scope="col", **({"class_": "text"} if is_text else {}))
                   for name, is_text in zip(columns, wide, strict=True))
    lines = []
    for i, row in enumerate(rows):
        opening = f'<tr class="{first_row_class}">' if first_row_class and i == 0 else "<tr>"
        lines.append(opening + "".join(_cell(cell, sortable) for cell in row) + "</tr>")
    kind = ' class="sortable"' if sortable else ""
    return Html(f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>\n' + "\n".join(lines)
                + "\n</tbody></table></div>")


def _cell(cell: Cell, sortable: bool) -> Html:
    attributes = {"class_": "text"} if cell.is_text else {}
    if sortable and cell.sort is not None:
        attributes["data_v"] = repr(float(cell.sort))
    return element("td", cell.shown, **attributes)


def figure(picture: Picture) -> Html:
    """A picture inside the page, in the form that stays sharp at any size."""
    data = base64.b64encode(picture.svg).decode("ascii")
    return Html(f'<figure><img alt="{text(picture.alt)}" src="data:image/svg+xml;base64,{data}"></figure>')


def page(title: str, *content: Html) -> str:
    """A whole document that needs nothing else, and that a browser lets load and run nothing else."""
    style, script = (resources.files("quantkit.report").joinpath("assets", name).read_text("utf-8")
                     for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {_source(script)}; base-uri 'none'"
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', str(element("title", title)),
        f"<style>{style}</style>", "</head>", "<body>", *content, f"<script>{script}</script>", "</body>", "</html>", ""])


def _source(content: str) -> str:
    """How a policy names an inline style or script: by the hash of its bytes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"
