"""Text and numbers on their way into markdown and csv. Names and metadata come from files of strangers: none of it is markup."""

from __future__ import annotations

import math
import re
import unicodedata

_MD_SIGNS = re.compile(r"[\\`*\[\]|~#$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_FORMULA_SIGNS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_MD_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def plain_line(text: str) -> str:
    """One line: control and format characters (line ends, reversed writing) become spaces, runs of spaces one.

    So do the code points that are no characters, which neither YAML nor XML holds.
    """
    return " ".join("".join(" " if _is_hidden(c) else c for c in text).split())


def _is_hidden(c: str) -> bool:
    return unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} or ord(c) & 0xFFFE == 0xFFFE or "\ufdd0" <= c <= "\ufdef"


def md_text(text: str) -> str:
    """Text that shows as it is in a markdown line or table cell: no markup, no html, no links, no mentions."""
    escaped = _MD_SIGNS.sub(lambda match: "\\" + match[0], plain_line(text))
    escaped = "".join(_MD_ENTITIES.get(c, c) for c in escaped)
    return re.sub(r"(?i)\bwww\.", "www&#46;", escaped.replace("://", "&#58;//"))


def csv_text(text: str) -> str:
    """Text for a csv cell that no spreadsheet runs: one line, and an apostrophe before a leading `= + - @`."""
    return no_formula(plain_line(text))


def no_formula(text: str) -> str:
    """A cell's text with an apostrophe before what makes a spreadsheet run it, which full-width signs do as well."""
    return "'" + text if text.lstrip().startswith(_FORMULA_SIGNS) else text


def base_name(path: str) -> str:
    """The last part of a path of either kind, so that no folder of this machine is published."""
    return re.split(r"[/\\]", path)[-1]


def with_error(value: float, se: float | None, *, signed: bool = False) -> str:
    """A number and its standard error to two digits of the error: `0.00881 ± 0.00054`; without an error four digits."""
    if not se:
        return significant(value, 4, signed=signed)
    decimals = max(0, 1 - math.floor(math.log10(se)))
    if decimals and round(se * 10**decimals) >= 100:  # 0.0996 is 0.10 to two digits
        decimals -= 1
    if decimals > 9:
        return f"{significant(value, 3, signed=signed)} ± {significant(se, 2)}"
    return f"{value:{'+' if signed else ''}z.{decimals}f} ± {se:.{decimals}f}"


def significant(value: float, digits: int, *, signed: bool = False) -> str:
    """A number to some significant digits, with an exponent only below 1e-6: `0.1612`, `85.96`, `12345`, `3.20e-08`."""
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    if abs(value) < 1e-6:
        return f"{value:{sign}.{digits - 1}e}"
    return f"{value:{sign}.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
