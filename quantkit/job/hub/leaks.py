"""What must not be published: tokens, keys, paths and names of the machine that a run was made on.

Every file of a bundle is searched as bytes, whatever its kind; of a model the metadata are, not the tokenizer's own texts and not
the weights. A manifest, a plot's metadata or a card written by hand is where such things have slipped out.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from quantkit.core.units import MIB
from quantkit.spec.gguf_part import ArrayValue, read_part

_STEP = 4 * MIB
_OVERLAP = 4096
_SHOWN = 60

# A path is told from a part of an address or of base64 by what stands before it.
_PATTERNS = {
    "an absolute path": re.compile(
        rb"(?<![\w.:/~+-])/(?:home|Users|root|tmp|mnt|media|data|workspace|var|opt|srv|private|scratch|usr|etc)/[\w.@~+-]"
        rb"[^\s\"'<>|)\]},]*|(?<!\w)[A-Za-z]:\\{1,2}Users\\[^\s\"'<>|]*|file:///[^\s\"'<>|]*"),
    "an access token": re.compile(
        rb"(?<![A-Za-z0-9_])(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|sk-[A-Za-z0-9_-]{32,}"
        rb"|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{20,}|glpat-[A-Za-z0-9_-]{20,})"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}


def find_leaks(path: Path, folder: Path) -> list[str]:
    """What a file holds that must not be published, one text each with its kind and the byte where it stands.

    Args:
        path: a file of a bundle.
        folder: the run directory, whose own path must not be in it.

    Raises:
        GgufError: a model whose header is damaged.
    """
    patterns = {**_PATTERNS, **_own_patterns(folder)}
    return [f"{kind} ({_shown(kind, match)}) at {where}" for kind, pattern in patterns.items()
            for where, text in _texts(path) for match in [pattern.search(text)] if match]


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


def _own_patterns(folder: Path) -> dict[str, re.Pattern[bytes]]:
    """This machine's own: the run's folder, the home folder, and a host name that is no ordinary word."""
    found = {"the path of the run": re.escape(str(folder.resolve()).encode())}
    try:
        home = str(Path.home())
    except RuntimeError:
        home = "/"
    if home.count("/") > 1:
        found["the home folder"] = re.escape(home.encode())
    host = socket.gethostname().split(".")[0]
    if len(host) > 5 and not host.isalpha():
        found["the host's name"] = rb"(?<![A-Za-z0-9-])" + re.escape(host.encode()) + rb"(?![A-Za-z0-9-])"
    return {kind: re.compile(pattern) for kind, pattern in found.items()}


def _shown(kind: str, match: re.Match[bytes]) -> str:
    """Enough to find it, and of a secret no more than its beginning."""
    length = 6 if kind in ("an access token", "a private key") else _SHOWN
    return match[0][:length].decode(errors="replace") + ("..." if len(match[0]) > length else "")
