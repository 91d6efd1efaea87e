"""The state of a collection under way: what a killed one left, so that the next goes on and writes the same bytes.

A state file belongs to one collection (its name is a hash of everything that the sums depend on) and begins with the sha256 of
the rest, so a damaged one is told and done again. It is replaced whole. Beside a target outside a run directory it lies in the
hidden folder `.<target>.quantkit-state`, which is locked while a process collects and removed when the matrix is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.files import FolderLock, atomic_path, remove_leftovers
from quantkit.engine.collect import Sums

STATE_VERSION = 2  # raised when sums are added in another way
_SUFFIX = ".sums"
_STEM_BYTES = 200  # of the target's name, so that the folder's fits into 255
_HASH_BYTES = 65  # hex and a newline


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectState:
    """Sums over the first `n_done` chunks of a collection."""

    sums: Mapping[str, Sums]
    n_done: int

    def plus(self, more: Mapping[str, Sums], n: int) -> CollectState:
        """With the sums of the next n chunks; this one stays as it is, so that no interruption finds half a sum."""
        both = dict(self.sums)
        for name, sums in more.items():
            held = both.get(name)
            both[name] = sums if held is None else Sums(held.in_sum2 + sums.in_sum2, held.counts + sums.counts)
        return CollectState(sums=both, n_done=self.n_done + n)


EMPTY = CollectState(sums={}, n_done=0)


def state_path(folder: Path, key: str) -> Path:
    """Where the state of the collection with this key lies below a folder."""
    return folder / "imatrix" / (key + _SUFFIX)


def save_state(path: Path, state: CollectState) -> None:
    """Write a state file, whole or not at all."""
    arrays: dict[str, npt.NDArray[Any]] = {f"s:{name}": sums.in_sum2 for name, sums in state.sums.items()}
    arrays |= {f"c:{name}": sums.counts for name, sums in state.sums.items()}
    with atomic_path(path) as temp, temp.open("w+b") as file:
        file.write(bytes(_HASH_BYTES))
        np.savez(file, n_done=np.array(state.n_done), **arrays)  # type: ignore[arg-type]
        file.seek(_HASH_BYTES)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        file.write(f"{digest}\n".encode())


def load_state(path: Path) -> CollectState | None:
    """The state that a killed collection left; None where there is none, or where its bytes are not those that were written."""
    try:
        with path.open("rb") as file:
            expected = file.read(_HASH_BYTES)
            if expected != f"{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode():
                return None
            file.seek(_HASH_BYTES)
            with np.load(file, allow_pickle=False) as held:
                names = [key[2:] for key in held.files if key.startswith("s:")]
                return CollectState(sums={name: Sums(held[f"s:{name}"], held[f"c:{name}"]) for name in names},
                                    n_done=int(held["n_done"]))
    except OSError:
        return None


@contextlib.contextmanager
def state_beside(target: Path, suffix: str = _SUFFIX) -> Iterator[Path]:
    """A locked folder for the state of work on `target`; it stays only if the block fails and a state is in it.

    Args:
        suffix: what the names of state files end with.

    Raises:
        RunLocked: another process works on the same target.
    """
    folder = target.with_name(f".{os.fsencode(target.name)[:_STEM_BYTES].decode(errors='ignore')}.quantkit-state")
    lock = FolderLock(folder, target).__enter__()
    try:
        remove_leftovers(folder)
        yield folder
        shutil.rmtree(folder)
    finally:
        if folder.exists() and not any(folder.rglob(f"*{suffix}")):
            shutil.rmtree(folder)
        lock.__exit__(None, None, None)
