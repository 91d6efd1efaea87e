"""Faults of plans, files and the binding that other tools have had, where no other test shows that they cannot occur here.

`docs/FAULTS.md` lists all of them with their tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantkit.core.errors import GgufError
from quantkit.engine.model import Model
from quantkit.engine.pool import WorkerPool
from quantkit.engine.worker import WorkerState
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.progress import Silent
from quantkit.spec.gguf_header import read_header
from quantkit.spec.protocol import Protocol, load_protocol
from tests.gguf_factory import Tensors, model_metadata, model_tensors, tiny_gguf, tiny_model
from tests.spec.plan_models import resolve, rule
from tests.spec.test_plan_engine import dry_run, model_at

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", ["eval.chunks=spread", "eval.n_chunk=8"])


@pytest.mark.engine
def test_a_rule_for_the_default_type_is_what_the_file_has(tmp_path: Path) -> None:
    """The library once dropped an override that named the default type, and its mix then gave some layers another."""
    path = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256, n_block=8)[0]
    plan = resolve(model_at(path), rule("blk.*.ffn_down.weight", "Q4_K"))
    plain = dry_run(path, "Q4_K_M")[0]
    found = dry_run(path, "Q4_K_M", dict(plan.override_patterns()))[0]
    down = [f"blk.{i}.ffn_down.weight" for i in range(8)]
    assert {found[name] for name in down} == {"Q4_K"}
    assert "Q6_K" in {plain[name] for name in down}


def refuse(tensors: Tensors, protocol: Protocol, tmp_path: Path) -> str:
    """The words of a run that is refused, which must have written no tier."""
    base = tiny_gguf(tmp_path / "base.gguf", tensors, model_metadata(n_embd=256))[0]
    with pytest.raises(GgufError) as caught:
        run_ladder(base, protocol, tmp_path / "run", ["Q8_0", "Q4_K_M"], Silent(), RunOptions(n_workers=1))
    assert list(tmp_path.glob("run/quants/*")) == []
    return str(caught.value)


@pytest.mark.engine
def test_a_stray_tensor_is_told_before_any_tier_is_written(protocol: Protocol, tmp_path: Path) -> None:
    words = refuse({**model_tensors(n_embd=256), "blk.0.unheard_of.weight": ((256, 256), "BF16")}, protocol, tmp_path)
    assert re.search(r"base\.gguf: llama\.cpp cannot load it \(.*wrong number of tensors; expected 22, got 21", words)


@pytest.mark.engine
def test_a_missing_tensor_is_told_before_any_tier_is_written(protocol: Protocol, tmp_path: Path) -> None:
    tensors = {name: value for name, value in model_tensors(n_embd=256).items() if name != "blk.1.ffn_up.weight"}
    assert re.search(r"llama\.cpp cannot load it \(.*blk\.1\.ffn_up\.weight", refuse(tensors, protocol, tmp_path))


def load_and_free(state: WorkerState, *, path: Path, n: int) -> list[int]:
    """Command: resident bytes of the process after each of some loads."""
    resident = []
    for _ in range(n):
        Model(path).close()
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        resident.append(pages * 4096)
    return resident


@pytest.mark.engine
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_loading_a_model_again_and_again_keeps_no_memory(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_embd=512, n_ff=2048, n_block=4)[0]
    size_bytes = read_header(path).file_bytes
    with WorkerPool(1) as pool:
        resident: list[int] = pool.call("load", load_and_free, path=path, n=6)
    assert size_bytes > 20 << 20
    assert resident[-1] - resident[1] < size_bytes / 4  # four loads more, and not a quarter of one is kept


def test_no_log_probabilities_are_asked_of_a_server() -> None:
    """Servers have renamed and dropped these fields; ours comes from the library, and the smoke test reads text alone."""
    named = [path.name for path in (ROOT / "quantkit").rglob("*.py")
             if re.search(r"[\"'](logprobs|top_logprobs|n_probs|echo|completion_probabilities)[\"']", path.read_text("utf-8"))]
    assert named == []
