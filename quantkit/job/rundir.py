"""A run directory: who may write in it, what it belongs to, and where things are.

    run/ manifest.json  protocol.toml  plan/<tier>.json, or source/<tier>.json  imatrix.gguf  quants/*.gguf
         audit/<tier>/rows.parquet, summary.json, slices.json, floor.json  audit/pairs.json  report/...         <- the bundle
         audit/<tier>/<corpus>/...  audit/<corpus>/pairs.json                      <- the same of a second and later text
         run.json  logs/  parts/                                                   <- times, hardware, native logs, part files
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import InputError
from quantkit.core.files import FolderLock, pretty_json, remove_leftovers, write_atomic
from quantkit.spec.protocol import Protocol, load_protocol, write_protocol

_LARGEST_JSON = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of one run directory.

    Attributes:
        corpus: "" for the first evaluation text; the name of a further one, whose results lie one folder deeper.
    """

    path: Path
    corpus: str = ""

    @property
    def protocol(self) -> Path:
        return self.path / "protocol.toml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def facts(self) -> Path:
        """run.json: times and hardware, not part of the bundle."""
        return self.path / "run.json"

    @property
    def imatrix(self) -> Path:
        return self.path / "imatrix.gguf"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def quants(self) -> Path:
        return self.path / "quants"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def plan(self, tier: str) -> Path:
        return self.path / "plan" / f"{_plain(tier)}.json"

    def source(self, tier: str) -> Path:
        """Where a file that came from elsewhere is from; it has this in a plan's place."""
        return self.path / "source" / f"{_plain(tier)}.json"

    def audited(self, tier: str) -> Path:
        """The folder of what was measured of a tier on this text."""
        return self.path / "audit" / _plain(tier) / self._text

    def rows(self, tier: str) -> Path:
        return self.audited(tier) / "rows.parquet"

    def summary(self, tier: str) -> Path:
        return self.audited(tier) / "summary.json"

    def slices(self, tier: str) -> Path:
        return self.audited(tier) / "slices.json"

    def floor(self, name: str) -> Path:
        """The noise floor of a tier, or of the base as `base`."""
        return self.audited(name) / "floor.json"

    def floor_rows(self, name: str, kernel: str) -> Path:
        return self.audited(name) / "floor" / f"{kernel}.parquet"

    def weights(self, tier: str) -> Path:
        """What a tier's weights alone do, in the same F32 arithmetic as base's; only where it was asked for."""
        return self.audited(tier) / "weights.json"

    def weights_rows(self, tier: str) -> Path:
        return self.audited(tier) / "weights.parquet"

    @property
    def pairs(self) -> Path:
        """Verdicts between all tiers on this text."""
        return self.path / "audit" / self._text / "pairs.json"

    @property
    def screening(self) -> Path:
        """The looks of a screening that may stop early; only of such a run."""
        return self.path / "audit" / self._text / "screening.json"

    @property
    def token_classes(self) -> Path:
        """The class of every token of this text, so that slices can be made again without a model."""
        return self.path / "audit" / self._text / "tokens.json"

    def shortfall(self, tier: str) -> Path:
        """By how much a reference pack's KLD falls short, row by row; only of a tier that was measured against one."""
        return self.audited(tier) / "shortfall.json"

    def record(self, step: str, tier: str) -> Path:
        """What a finished step left for the next start to check: hashes of what went in and came out."""
        return self.parts / step / f"{_plain(tier)}.json"

    @property
    def _text(self) -> str:
        return _plain(self.corpus) if self.corpus else ""


def _plain(name: str) -> str:
    """A name that stays in its folder: manifests of strangers name tiers and texts too.

    Raises:
        InputError: it would lead elsewhere.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InputError(f"expected the name of a tier or a text, got {name!a:.100}, which is no name of one file: the manifest "
                         "is damaged or hostile; fetch the bundle again")
    return name


@contextlib.contextmanager
def open_run(path: Path, protocol: Protocol) -> Iterator[RunFolder]:
    """Lock a run directory, make it if it is new, and clear what a killed run left half-written.

    Raises:
        RunLocked: another process works in it.
        InputError: it holds a run of another protocol, or files that are no run at all.
    """
    refuse_foreign_folder(path)
    run = RunFolder(path=path)
    with FolderLock(path):
        remove_leftovers(path)
        if run.protocol.exists():
            check_protocol(run, protocol)
        else:
            write_atomic(run.protocol, write_protocol(protocol))
        yield run


def refuse_foreign_folder(path: Path) -> None:
    """Refuse a path that no run can be at.

    Raises:
        InputError: it is a file, or a folder with files that are no run.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"expected a folder for the run, found the file {path}: choose another path")
    if path.exists() and not RunFolder(path=path).protocol.exists() and any(
            p.name != ".lock" and not p.name.startswith(".protocol.toml.") for p in path.iterdir()):
        raise InputError(f"expected an empty folder or a run of quantkit, found other files in {path}: choose another folder")


def check_protocol(run: RunFolder, protocol: Protocol) -> None:
    """Refuse a run of another protocol.

    Raises:
        InputError: names both.
    """
    held = load_protocol(run.protocol)
    if held.protocol_id != protocol.protocol_id:
        raise InputError(f"{run.path} holds a run of protocol {held.name} ({held.protocol_id[:12]}), not of {protocol.name} "
                         f"({protocol.protocol_id[:12]}): choose another run directory")


def read_json(path: Path) -> Any:
    """A JSON file's value, or None where the file is missing or not JSON: the step is then done again."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            return None
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # half of a character, which JSON can say, cannot be told to anybody
    except (OSError, ValueError, RecursionError):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomic(path, pretty_json(value))
