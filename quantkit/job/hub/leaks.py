"""What must not be published: tokens, keys, paths and names of the machine that a run was made on.

Every file of a bundle is searched as bytes, whatever its kind; of a model the metadata are, not the tokenizer's own texts and not
the weights. A manifest, a plot's metadata or a card written by hand is where such things have slipped out.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quantkit.core.units import MIB
from quantkit.spec.gguf_part import ArrayValue, read_part

_STEP = 4 * MIB
_OVERLAP = 4096

class _Leak(NamedTuple):
    """What is looked for: a pattern that begins with fixed text, which is found fast, without a byte of `not_after` before it."""

    kind: str
    pattern: re.Pattern[bytes]
    not_after: re.Pattern[bytes] | None = None
    n_shown: int = 60


_PART_OF_A_WORD = re.compile(rb"[A-Za-z0-9_]")
_PART_OF_AN_ADDRESS = re.compile(rb"[\w.:/~+-]")  # or of base64
_LEAKS = (
    _Leak("an absolute path", re.compile(
        rb"/(?:home|Users|root|tmp|mnt|media|data|workspace|var|opt|srv|private|scratch|usr|etc)/[\w.@~+-][^\s\"'<>|)\]},]*"),
        _PART_OF_AN_ADDRESS),
    _Leak("an absolute path", re.compile(rb":\\{1,2}Users\\[^\s\"'<>|]*")),
    _Leak("an absolute path", re.compile(rb"file:///[^\s\"'<>|]*")),
    *(_Leak("an access token", re.compile(pattern), _PART_OF_A_WORD, 6) for pattern in (
        rb"hf_[A-Za-z0-9]{30,}", rb"gh[pousr]_[A-Za-z0-9]{30,}", rb"github_pat_[A-Za-z0-9_]{30,}", rb"sk-[A-Za-z0-9_-]{32,}",
        rb"AKIA[0-9A-Z]{16}", rb"xox[abprs]-[A-Za-z0-9-]{20,}", rb"glpat-[A-Za-z0-9_-]{20,}")),
    _Leak("a private key", re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"), None, 6),
)


def find_leaks(path: Path, folder: Path) -> list[str]:
    """What a file holds that must not be published, one text each with its kind and the byte where it stands.

    Args:
        path: a file of a bundle.
        folder: the run directory, whose own path must not be in it.

    Raises:
        GgufError: a model whose header is damaged.
    """
    leaks = (*_LEAKS, *_own_leaks(folder))
    found = [f"{leak.kind} ({shown}) at {where}" for where, text in _texts(path) for leak in leaks
             if (shown := _first_match(leak, text))]
    return list(dict.fromkeys(found))


def _first_match(leak: _Leak, text: bytes) -> str:
    """Enough of the first match to find it, and of a secret no more than its beginning; "" for none."""
    for match in leak.pattern.finditer(text):
        before = text[max(0, match.start() - 1):match.start()]
        if leak.not_after is None or not leak.not_after.match(before):
            return match[0][:leak.n_shown].decode(errors="replace") + ("..." if len(match[0]) > leak.n_shown else "")
    return ""


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".gguf":
        for key, value in read_part(path).metadata.items():
            if not key.startswith("tokenizer."):
                values = value.values or () if isinstance(value, ArrayValue) else (value,)
                yield f"the key {ascii(key)[:80]}", "\n".join(v for v in values if isinstance(v, str)).encode()
        return
    with path.open("rb") as file:
        at, tail = 0, b""
        while piece := file.read(_STEP):
            yield f"byte {at}" if at else "its start", tail + piece
            at, tail = at + len(piece), piece[-_OVERLAP:]


def _own_leaks(folder: Path) -> list[_Leak]:
    """This machine's own: the run's folder, the home folder, and a host name that is no ordinary word."""
    found = [_Leak("the path of the run", re.compile(re.escape(os.fsencode(folder.resolve()))))]
    with contextlib.suppress(RuntimeError):  # no home
        home = Path.home()
        if len(home.parts) > 2:
            found.append(_Leak("the home folder", re.compile(re.escape(os.fsencode(home)))))
    host = socket.gethostname().split(".")[0]
    if len(host) > 5 and not host.isalpha():
        found.append(_Leak("the host's name", re.compile(re.escape(host.encode()) + rb"(?![A-Za-z0-9-])"),
                           re.compile(rb"[A-Za-z0-9-]")))
    return found
