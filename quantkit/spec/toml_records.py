"""TOML tables into frozen records and back.

The schema is the records themselves: a field's type is the type of its key, `Literal` lists the words it may hold, `Annotated`
carries further checks. Every field is a key that must be there, every other key is an error, and each error names the dotted
path, what was expected and what was found. Only what protocols use exists: str, int, float, bool, arrays, tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from quantkit.core.errors import ProtocolError

Record = TypeVar("Record")

_LONGEST_SHOWN = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A condition on one value, and how a message calls a value that fulfils it."""

    expected: str
    holds: Callable[[Any], bool]


def between(low: float, high: float) -> Check:
    """A number from low to high, both included."""
    return Check(f"a number from {low} to {high}", lambda value: low <= value <= high)


def above(low: float, high: float) -> Check:
    """A number above low, at most high."""
    return Check(f"a number above {low}, at most {high}", lambda value: low < value <= high)


def one_of(known: Iterable[str], what: str) -> Check:
    """A word from a table that another module holds."""
    words = frozenset(known)
    return Check(what, words.__contains__)


def fail(path: str, expected: str, found: object, then: str = "correct it") -> typing.NoReturn:
    """Raise the error of a value that is not what it must be, with what to do."""
    shown = found if isinstance(found, Found) else Found(_shorten(repr(found)))
    raise ProtocolError(f"{path}: expected {expected}, got {shown.text}; {then}")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Words for what was found, where the value's own repr does not say it."""

    text: str


def read_record(kind: type[Record], table: object, path: str = "") -> Record:
    """One table as a record of the given kind.

    Args:
        kind: a dataclass; its fields are the keys.
        table: what tomllib gave.
        path: the table's dotted path; empty for the whole document.

    Raises:
        ProtocolError: a key that is missing, unknown, of another type or out of its range.
    """
    if not isinstance(table, dict):
        fail(path, "a table", table)
    hints = _hints(typing.cast("Hashable", kind))
    names = list(hints)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            fail(join_path(path, _shorten(key)), f"one of the keys {', '.join(names)}", Found(f"{_shorten(repr(key))}{hint}"),
                 "correct its name or take it out")
    for name in names:
        if name not in table:
            fail(join_path(path, name), "this key (a protocol states every key)", Found("none"), "add it")
    return kind(**{name: _read_value(hints[name], table[name], join_path(path, name)) for name in names})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Field → type with its checks, in the order of the fields; resolving the names of types is slow."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def join_path(path: str, key: str) -> str:
    """The dotted path of a key of a table."""
    return f"{path}.{key}" if path else key


def _read_value(kind: Any, value: object, path: str) -> Any:
    if get_origin(kind) is Annotated:
        inner, *checks = get_args(kind)
        read = _read_value(inner, value, path)
        for check in checks:
            if not check.holds(read):
                fail(path, check.expected, read)
        return read
    if get_origin(kind) is Literal:
        words = get_args(kind)
        if type(value) is not type(words[0]) or value not in words:
            fail(path, " or ".join(repr(word) for word in words), value)
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            fail(path, "an array", value)
        return tuple(_read_value(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return read_record(typing.cast("type[Any]", kind), value, path)
    return _read_scalar(kind, value, path)


def _read_scalar(kind: Any, value: object, path: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            fail(path, "true or false", value)
    elif kind is str:
        if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
            fail(path, "a string", value)  # a byte of a command line that is not UTF-8 arrives as a lone surrogate
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        fail(path, "an integer" if kind is int else "a number", value)
    elif kind is float:
        number = float(value) if abs(value) < 2**53 else math.inf
        if not math.isfinite(number):
            fail(path, "a finite number below 2^53", value)
        return number + 0.0  # 1 and 1.0, 0.0 and -0.0 are one value each, so they hash alike
    return value


def record_to_table(record: Any) -> dict[str, Any]:
    """A record as the table that reads back to it: dicts, lists and scalars, keys in the order of the fields."""
    table: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(record)))
    return table


def write_toml(table: Mapping[str, Any], path: str = "") -> str:
    """TOML text of a table: its own values first, then its sub-tables; tables within an array stand inline if they are flat."""
    lines, below = [], []
    for key, value in table.items():
        name = join_path(path, key)
        if isinstance(value, Mapping):
            below.append(f"\n[{name}]\n{write_toml(value, name)}")
        elif _is_table_array(value) and (not path or any(isinstance(v, list) for item in value for v in item.values())):
            below.extend(f"\n[[{name}]]\n{write_toml(item, name)}" for item in value)
        elif _is_table_array(value):
            lines.append(f"{key} = [\n" + "".join(f"  {_inline(item)},\n" for item in value) + "]\n")
        else:
            lines.append(f"{key} = {_inline(value)}\n")
    return "".join(lines + below)


def _is_table_array(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, str):  # TOML's basic strings are JSON's, but for DEL; what nobody sees is written so that it is seen
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else f"\\u{ord(c):04x}"
                       for c in json.dumps(value, ensure_ascii=False))
    return json.dumps(value, allow_nan=False)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
