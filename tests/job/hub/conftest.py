"""A hub on loopback that huggingface_hub talks to, and a run directory to publish."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quantkit.job.manifest import APART, is_apart
from tests.gguf_factory import tiny_gguf
from tests.hub_server import HubServer

RESULT_ID = "ab" * 32


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """The library's own code and HTTP client, with nothing beyond this machine in reach; waiting before a retry takes no time."""
    import huggingface_hub.utils
    from huggingface_hub import constants

    utils: Any = huggingface_hub.utils
    cache = tmp_path_factory.mktemp("hub-home")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        for name, value in {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": "",
                            "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_IMPLICIT_TOKEN": True,
                            "HF_HUB_OFFLINE": False, "HF_TOKEN_PATH": str(cache / "token"),
                            "AGENT_HARNESSES_PATH": str(cache / "harnesses.json")}.items():
            monkeypatch.setattr(constants, name, value, raising=False)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        utils.disable_progress_bars()
        yield server
        utils.close_session()
        utils.enable_progress_bars()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two tiers: three large files, some small ones, a card, and what must stay at home."""
    files = {"protocol.toml": b"schema = 1\n", "plan/Q8_0.json": b"{}\n", "audit/Q8_0/rows.parquet": b"PAR1" + bytes(5000),
             "report/retention.md": b"| Tier |\n", "README.md": b"---\nlicense: mit\n---\n# A card\n"}
    folder = make_run(tmp_path / "a run", files)
    (folder / "logs").mkdir()
    (folder / "logs" / "quantize.log").write_bytes(b"at /home/USER/models")
    (folder / "run.json").write_bytes(b"{}")
    return folder


def make_run(folder: Path, files: Mapping[str, bytes], models: tuple[str, ...] = ("Q8_0", "Q4_K")) -> Path:
    """A run directory whose manifest lists these files and a small GGUF for each model."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for i, name in enumerate(models):
        (folder / "quants").mkdir(exist_ok=True)
        tiny_gguf(folder / "quants" / f"m-{name}.gguf", {"a.weight": ((256, 1200), "F32")}, {"general.name": name}, seed=i)
    list_anew(folder)
    return folder


def list_anew(folder: Path, result_id: str = RESULT_ID) -> None:
    """Write the manifest of what is there."""
    held = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    files = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)} for name, data in held.items()
             if name not in ("manifest.json", "run.json", ".lock", APART) and name.split("/")[0] not in ("logs", "parts")}
    (folder / "manifest.json").write_text(json.dumps({"result_id": result_id, "files": files}), "utf-8")


def list_apart(folder: Path, result_id: str = RESULT_ID) -> None:
    """Move what names a machine, a page and its speeds, from the manifest to a listing of its own."""
    for name in ("report/report.html", "report/speed.json"):
        (folder / name).write_text(name)
    list_anew(folder)
    value = json.loads((folder / "manifest.json").read_text("utf-8"))
    apart = {name: value["files"].pop(name) for name in [*value["files"]] if is_apart(name)}
    (folder / "manifest.json").write_text(json.dumps(value), "utf-8")
    (folder / APART).write_text(json.dumps({"result_id": result_id, "files": apart}), "utf-8")
