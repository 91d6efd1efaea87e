"""Records as JSON and back: nested frozen dataclasses of plain values, tuples, mappings and None."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

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


def record_from_json(cls: type[_Record], data: Any) -> _Record:
    """The record that `record_to_json` wrote.

    Raises:
        KeyError, TypeError: a key is missing, unknown, or of another kind.
    """
    return typing.cast(_Record, _read(cls, data))


def _read(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        names = [field.name for field in dataclasses.fields(kind)]
        if not isinstance(data, dict) or set(data) != set(names):
            raise KeyError(f"expected the keys {', '.join(names)} for a {kind.__name__}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], data[name]) for name in names})
    if origin is types.UnionType:
        return None if data is None else _read(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"expected a list, got {type(data).__name__}")
        return tuple(_read(arguments[0], item) for item in data)
    return data
