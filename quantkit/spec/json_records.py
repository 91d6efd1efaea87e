"""Frozen records to plain JSON and back: the record's own fields are the keys, none may be missing and none may be added."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_LARGEST = 1 << 63
_Record = TypeVar("_Record")


def record_to_json(record: Any) -> Any:
    """A record as plain dicts, lists, numbers, strings and None; keys in the order of the fields."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: record_to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, tuple | list):
        return [record_to_json(item) for item in record]
    if isinstance(record, Mapping):
        return {key: record_to_json(value) for key, value in record.items()}
    return record


def record_from_json(kind: type[_Record], data: Any) -> _Record:
    """The record that `record_to_json` wrote.

    Raises:
        KeyError, TypeError: a key is missing, unknown, or its value of another kind.
    """
    return typing.cast(_Record, _read(kind, data))


def _read(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        if not isinstance(data, dict) or set(data) != set(hints):
            found = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
            raise KeyError(f"expected the keys {', '.join(hints)} for a {getattr(kind, '__name__', kind)}, got {found}")
        return typing.cast(Any, kind)(**{name: _read(hint, data[name]) for name, hint in hints.items()})
    if origin is typing.Literal:
        if not any(type(data) is type(word) and data == word for word in arguments):
            raise TypeError(f"expected one of {', '.join(map(repr, arguments))}, got another {type(data).__name__}")
        return data
    if origin is types.UnionType:
        return None if data is None else _read(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"expected a list, got {type(data).__name__}")
        return tuple(_read(arguments[0], item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise TypeError(f"expected an object, got {type(data).__name__}")
        return {str(key): _read(arguments[1], value) for key, value in data.items()}
    return _read_plain(kind, data)


def _read_plain(kind: Any, data: Any) -> Any:
    if kind not in (bool, int, float, str):
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data) if abs(data) < _LARGEST else math.inf  # 1.0 and 1 are one number in JSON
    if (kind is float and isinstance(data, float) and not math.isfinite(data)) or (kind is int and isinstance(data, int)
                                                                                    and abs(data) > _LARGEST):
        raise TypeError("expected a finite number, got another")
    if kind is str and isinstance(data, str) and not data.isprintable() and any("\ud800" <= c <= "\udfff" for c in data):
        raise TypeError("expected text, got half of a character")
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise TypeError(f"expected {kind.__name__}, got {type(data).__name__}")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
