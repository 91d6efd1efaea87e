"""Devices and the cache's types: what every verb hands to the engine, what a protocol fixes, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.cli.main import run as run_command
from quantkit.engine.pool import Worker
from quantkit.engine.settings import Offload
from quantkit.job.ladder import RunOptions, audit_files
from quantkit.job.progress import Silent
from quantkit.job.refpack import make_refpack
from quantkit.job.rundir import read_json
from quantkit.job.standalone import collect_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.engine

INTERRUPTED = 130
KV = ["type_k=F32", "type_v=BF16"]
SMALL = ["eval.chunks=spread", "eval.n_chunk=4", "imatrix.chunks=first", "imatrix.n_chunk=2", "floors.n_chunk=2",
         "search.search_n_chunk=3", "search.select_n_chunk=3", "search.report_n_chunk=12", "search.quick_n_chunk=2",
         "gate.min_n_chunk=12"]
DEVICES = ["--n-gpu-layers", "7", "--main-gpu", "1", "--tensor-split", "3,1"]
ASKED = Offload(n_gpu_layers=7, main_gpu=1, tensor_split=(3.0, 1.0))
FIXED = ["eval.offload.fixed=true", "eval.offload.n_gpu_layers=5", "eval.offload.main_gpu=2", "eval.offload.tensor_split=[1, 2]"]
VERBS = {  # the verb, the part of the protocol whose context it is, the engine's command that opens the model
    "run": (["run", "-b", "{base}", "--tiers", "Q4_K_M", "-o", "{out}"], "imatrix", "open_collect"),
    "imatrix": (["imatrix", "-b", "{base}", "-o", "{out}.gguf"], "imatrix", "open_collect"),
    "audit": (["audit", "{base}", "-b", "{base}", "-o", "{out}"], "eval", "open_audit"),
    "audit in panels": (["audit", "{base}", "-b", "{base}", "-o", "{out}", "--memory", "1"], "eval", "open_panel"),
    "mtp check": (["mtp", "check", "{head}", "-o", "{out}"], "mtp", "open_plain"),
    "mtp matrix": (["mtp", "matrix", "{head}", "-b", "{head}", "-o", "{out}"], "mtp", "open_plain"),
    "refpack": (["refpack", "make", "-b", "{base}", "-o", "{out}.safetensors"], "eval", "open_pack"),
    "search": (["search", "-b", "{base}", "-o", "{out}", "--bpw", "6"], "eval", "open_trials"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"base": tiny_model(tmp_path_factory.mktemp("models") / "base-BF16.gguf", n_embd=256, n_ff=256)[0],
            "head": Path(quantkit.__file__).parent / "data" / "demo" / "tiny-qwen35-mtp-BF16.gguf"}


def opened(monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str]) -> dict[str, Any]:
    """Run a verb until it opens a model in the engine; returns what it hands over."""
    found: dict[str, Any] = {}
    send = Worker.send

    def watch(worker: Worker, step: str, asked: Any, given: dict[str, Any]) -> None:
        if asked.__name__ == command:
            found.update(given)
            raise KeyboardInterrupt
        send(worker, step, asked, given)

    monkeypatch.setattr(Worker, "send", watch)
    assert run_command(arguments) == INTERRUPTED
    return found


@pytest.mark.parametrize("fixes", [False, True], ids=["asked for", "fixed"])
@pytest.mark.parametrize("name", VERBS)
def test_devices_and_cache_types_reach_the_engine(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  name: str, fixes: bool) -> None:
    verb, part, command = VERBS[name]
    settings = [*SMALL, *(FIXED if fixes else []), *(f"{part}.{setting}" for setting in KV)]
    given = opened(monkeypatch, command, [
        *(word.format(out=tmp_path / "out", **models) for word in verb), "-p", "demo-v1", *DEVICES,
        *(word for setting in settings for word in ("--set", setting))])
    assert given["offload"] == (Offload(n_gpu_layers=5, main_gpu=2, tensor_split=(1.0, 2.0)) if fixes else ASKED)
    assert (given["settings"].type_k, given["settings"].type_v) == ("F32", "BF16")


def test_devices_are_recorded(models: dict[str, Path], tmp_path: Path) -> None:
    """A build without devices takes and ignores them."""
    protocol, base, offload = load_protocol("demo-v1", SMALL), models["base"], Offload(n_gpu_layers=7, tensor_split=(3.0, 1.0))
    audit_files(base, protocol, tmp_path / "run", [base], Silent(), RunOptions(offload=offload))
    build = read_json(tmp_path / "run" / "manifest.json")["build"]
    assert (build["backend"], build["n_gpu_layers"], build["main_gpu"], build["tensor_split"]) == ("CPU", 7, 0, [3.0, 1.0])
    pack = make_refpack(base, protocol, tmp_path / "pack.safetensors", Silent(), offload=offload)
    assert (pack.facts.arithmetic.n_gpu_layers, pack.facts.arithmetic.tensor_split) == (7, (3.0, 1.0))
    collect_to_file(base, protocol, tmp_path / "m.gguf", Silent(), offload=offload)
    assert keys_of(tmp_path / "m.gguf") == {"quantkit.n_gpu_layers": "7", "quantkit.main_gpu": "0", "quantkit.tensor_split": "3,1"}


def test_a_matrix_of_other_devices_is_collected_again_and_one_of_the_cpu_names_none(
        models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = ["run", "-b", str(models["base"]), "-p", "demo-v1", "--tiers", "Q4_K_M", "-o", str(tmp_path / "run"),
              *(word for setting in SMALL for word in ("--set", setting))]
    assert opened(monkeypatch, "open_audit", common)["offload"] == Offload()
    assert keys_of(tmp_path / "run" / "imatrix.gguf") == {}
    assert opened(monkeypatch, "open_collect", [*common, *DEVICES])["offload"] == ASKED


def keys_of(matrix: Path) -> dict[str, Any]:
    return {key: value for key, value in read_header(matrix).metadata.items() if key.startswith("quantkit.")}
