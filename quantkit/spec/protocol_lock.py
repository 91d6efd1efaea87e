"""`LOCK`: the ids of published protocols, one line each, beside their files.

A locked protocol never changes: numbers were published under its ids. What shall differ goes into a copy with another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import CheckFailed, ProtocolError
from quantkit.core.files import write_atomic
from quantkit.spec.protocol import Protocol, load_protocol, protocols_folder

LOCK_NAME = "LOCK"
ID_NAMES = ("protocol_id", "eval_id", "plan_id", "imatrix_id", "mtp_id")

_HEAD = f"# name {' '.join(ID_NAMES)}\n"


class LockState(NamedTuple):
    """A protocol against its LOCK. `changed` names the ids that differ; an unlocked one has none."""

    protocol: Protocol
    locked: bool
    changed: tuple[str, ...]


def read_lock(folder: Path) -> dict[str, dict[str, str]]:
    """name → ids by name, from the LOCK of a folder; empty if there is none.

    Raises:
        ProtocolError: a line that is not a name and five ids, or a name twice; names the line.
    """
    path = folder / LOCK_NAME
    if not path.is_file():
        return {}
    locked: dict[str, dict[str, str]] = {}
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        name, *ids = line.split() or ["#"]
        if name.startswith("#"):
            continue
        if len(ids) != len(ID_NAMES) or name in locked:
            raise ProtocolError(f"{path}, line {number}: expected a new name and {len(ID_NAMES)} ids, got {line[:80]!r}; "
                                "undo the change")
        locked[name] = dict(zip(ID_NAMES, ids, strict=True))
    return locked


def lock_state(path: Path) -> LockState:
    """A protocol file against the LOCK beside it.

    Raises:
        ProtocolError: the file is not valid, is called other than the protocol, or is derived.
    """
    protocol = load_protocol(path)
    if protocol.name != path.stem:
        raise ProtocolError(f"{path}: name: expected {path.stem!r} as the file is called, got {protocol.name!r}")
    if protocol.derived:
        raise ProtocolError(f"{path}: derived: expected [] in a protocol of its own, got {len(protocol.derived)} settings: give "
                            "the file a name of its own and clear the list")
    ids = read_lock(path.parent).get(protocol.name)
    changed = tuple(name for name in ID_NAMES if ids is not None and ids[name] != protocol.ids()[name])
    return LockState(protocol, ids is not None, changed)


def require_locked(state: LockState) -> None:
    """Refuse a locked protocol that has changed.

    Raises:
        CheckFailed: names the ids that differ.
    """
    if state.changed:
        name = state.protocol.name
        raise CheckFailed(f"the locked protocol {name} has changed: expected the {', '.join(state.changed)} that LOCK holds; "
                          f"undo the change, or put it into a copy with another name, such as {_next_name(name)}")


def lock_protocol(path: Path) -> LockState:
    """Add a protocol file to the LOCK beside it; one that is locked and unchanged stays as it is.

    Raises:
        ProtocolError: the file cannot be locked.
        CheckFailed: it is locked with other ids.
    """
    state = lock_state(path)
    require_locked(state)
    if not state.locked:
        write_lock(path.parent, {**read_lock(path.parent), state.protocol.name: state.protocol.ids()})
    return state


def write_lock(folder: Path, locked: Mapping[str, Mapping[str, str]]) -> None:
    """Write a LOCK, sorted by name."""
    lines = [f"{name} {' '.join(locked[name][key] for key in ID_NAMES)}\n" for name in sorted(locked)]
    write_atomic(folder / LOCK_NAME, "".join([_HEAD, *lines]).encode())


def locked_name(protocol: Protocol) -> str | None:
    """The name under which a protocol of these ids is published with the package; None if it is not."""
    for name, ids in read_lock(protocols_folder()).items():
        if ids == protocol.ids():
            return name
    return None


def _next_name(name: str) -> str:
    stem, mark, number = name.rpartition("-v")
    return f"{stem}-v{int(number) + 1}" if mark and number.isascii() and number.isdigit() else f"{name}-v2"
