"""Protocols: found by name or path, read, derived, written back. The records are in `protocol_parts`, their
ids in `protocol_schema`.

A derived protocol is another protocol with some values set: validated the same way, with its own ids, and `derived` holds the
settings, so that every table can say so. Written back to TOML it reads to the same ids and the same marks.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import ProtocolError
from quantkit.spec.protocol_checks import check_protocol
from quantkit.spec.protocol_parts import (
    ContextSpec,
    Corpus,
    EvalSpec,
    FloorSpec,
    GateMargins,
    GateSpec,
    ImatrixSpec,
    Kernel,
    MtpSpec,
    OffloadSpec,
    PlanSpec,
    RefpackSpec,
    Rule,
    SearchFloor,
    SearchSpec,
    SequentialSpec,
    Tier,
)
from quantkit.spec.protocol_schema import Protocol
from quantkit.spec.toml_records import join_path, read_record, record_to_table, write_toml

__all__ = [
    "ContextSpec",
    "Corpus",
    "EvalSpec",
    "FloorSpec",
    "GateMargins",
    "GateSpec",
    "ImatrixSpec",
    "Kernel",
    "MtpSpec",
    "OffloadSpec",
    "PlanSpec",
    "Protocol",
    "RefpackSpec",
    "Rule",
    "SearchFloor",
    "SearchSpec",
    "SequentialSpec",
    "Tier",
    "derive_protocol",
    "known_protocols",
    "load_protocol",
    "parse_protocol",
    "protocol_path",
    "protocols_folder",
    "write_protocol",
]

_LARGEST_BYTES = 4 << 20
_STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_]*)|\[([^\[\]]+)\]")
_NOT_SET = ("schema", "name", "title", "derived")


def protocols_folder() -> Path:
    """Where the packaged protocols are: inside an installed wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "data" / "protocols"
    return packaged if packaged.is_dir() else package.parent / "protocols"


def known_protocols() -> list[str]:
    """Names of the packaged protocols, sorted."""
    return sorted(path.stem for path in protocols_folder().glob("*.toml"))


def protocol_path(name_or_path: str | Path) -> Path:
    """The file of a protocol: a path as it is, a bare name in the packaged folder.

    Raises:
        ProtocolError: a bare name that is not packaged; lists those that are.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text:
        return Path(name_or_path)
    if text not in known_protocols():
        known = ", ".join(known_protocols()) or f"none in {protocols_folder()}"
        raise ProtocolError(f"expected a path to a .toml file or a packaged protocol ({known}), got {text!r}: name one of them")
    return protocols_folder() / f"{text}.toml"


def load_protocol(name_or_path: str | Path, settings: Sequence[str] = ()) -> Protocol:
    """A protocol by name or path, derived by settings such as `eval.n_chunk=8` if there are any.

    Raises:
        ProtocolError: no such protocol, or one that is not valid; names the file and the dotted path.
    """
    path = protocol_path(name_or_path)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise ProtocolError(f"expected a protocol file at {path}, got: {error.strerror or error}; check the path") from error
    try:
        return derive_protocol(parse_protocol(data), settings)
    except ProtocolError as error:
        raise ProtocolError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=16)  # a run reads its protocol at every step
def parse_protocol(data: bytes) -> Protocol:
    """A protocol from the bytes of its file.

    Raises:
        ProtocolError: not TOML, or not a valid protocol; names the dotted path.
    """
    if len(data) > _LARGEST_BYTES:
        raise ProtocolError(f"expected a protocol of at most {_LARGEST_BYTES} bytes, got more: it is no protocol; give another "
                            "file")
    try:
        table = tomllib.loads(data.decode())
    except RecursionError as error:
        raise ProtocolError("expected a TOML file, got arrays or tables nested without end: flatten it") from error
    except ValueError as error:  # not UTF-8, not TOML, or an integer of thousands of digits
        raise ProtocolError(f"expected a TOML file, got: {error}; correct it there") from error
    return _read_protocol(table)


def write_protocol(protocol: Protocol) -> bytes:
    """The canonical TOML of a protocol; it reads back to an equal one, `derived` included."""
    return write_toml(record_to_table(protocol)).encode()


def derive_protocol(protocol: Protocol, settings: Sequence[str]) -> Protocol:
    """A protocol with some values set, all at once.

    Args:
        protocol: where the other values come from.
        settings: `path=value`, the path dotted with `[i]` or `[name]` into arrays (`plan.tiers[Q4_K_M].default=Q5_K`), the
            value in TOML or a bare word. Where a string stands now, everything after the sign is the string.

    Returns:
        A valid protocol of the same name with its own ids. Settings that change nothing leave no mark.

    Raises:
        ProtocolError: a path that does not exist, or a value that does not fit.
    """
    if not settings:
        return protocol
    before, table = record_to_table(protocol), record_to_table(protocol)
    marks = {}
    for setting in settings:
        path, text = _split_setting(setting)
        place = _find(table, path)
        place.holder[place.key] = _read_setting(text, place.holder[place.key])
        marks[place.path] = text
    after = record_to_table(_read_protocol(table))
    derived = dict(_split_setting(mark) for mark in protocol.derived)
    derived.update({path: text for path, text in marks.items() if _value_at(after, path) != _value_at(before, path)})
    return _read_protocol({**after, "derived": [f"{path}={text}" for path, text in derived.items()]})


def _read_protocol(table: dict[str, Any]) -> Protocol:
    protocol = read_record(Protocol, table)
    for i, setting in enumerate(protocol.derived):
        _split_setting(setting, f"derived[{i}]")
    check_protocol(protocol)
    return protocol


def _split_setting(setting: str, path: str = "--set") -> tuple[str, str]:
    name, sign, value = setting.partition("=")
    if not sign or not name.strip():
        raise ProtocolError(f"{path}: expected path=value such as eval.n_chunk=8, got {setting!r}; write it so")
    return name.strip(), value.strip()


class _Place(NamedTuple):
    """Where a value stands: what holds it, its key or index there, and its path with names for indices."""

    holder: Any
    key: Any
    path: str


def _find(table: dict[str, Any], path: str) -> _Place:
    steps = list(_STEP.finditer(path))
    if "".join(step[0] for step in steps) != path or not steps or path.startswith("."):
        raise ProtocolError(f"--set: expected a dotted path such as eval.n_chunk or plan.tiers[Q4_K_M].default, got {path!r}; "
                            "write it so")
    if path in _NOT_SET:
        raise ProtocolError(f"--set: expected a value that can change a number, got {path}, which is not for setting: "
                            "write it into a protocol of your own")
    holder: Any = {"": table}
    key: Any = ""
    name = ""
    for step in steps:
        holder, key = holder[key], step[1] if step[1] is not None else step[2]
        if step[1] is not None and isinstance(holder, dict) and key in holder:
            name = join_path(name, key)
        elif step[1] is None and isinstance(holder, list) and (index := _index(holder, key)) is not None:
            key, name = index, f"{name}[{_label(holder[index], index)}]"
        else:
            raise ProtocolError(f"--set: expected {_choices(holder)} after {name or 'the start'!r}, got {key!r} in {path!r}; "
                                "choose one of them")
    return _Place(holder, key, name)


def _value_at(table: dict[str, Any], path: str) -> Any:
    try:
        place = _find(table, path)
    except ProtocolError:  # beyond the end of an array that a setting made longer
        return None
    return place.holder[place.key]


def _index(items: list[Any], key: str) -> int | None:
    if key.isascii() and key.isdigit():
        return int(key) if len(key) < 7 and int(key) < len(items) else None
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    return names.index(key) if key in names else None


def _label(item: Any, index: int) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) and not {"[", "]", "="} & set(name) else str(index)


def _choices(holder: Any) -> str:
    if isinstance(holder, dict):
        return f"one of {', '.join(holder)}"
    if isinstance(holder, list):
        return f"an index below {len(holder)} or a name in brackets"
    return "nothing more"


def _read_setting(text: str, now: object) -> object:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table["value"] if list(table) == ["value"] else text
    return text if isinstance(now, str) and not isinstance(value, str) else value
