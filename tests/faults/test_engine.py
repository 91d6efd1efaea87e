"""Real workers that are killed or stopped from outside while a run is under way: their step is named, the run goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from quantkit.core.errors import EngineKilled
from quantkit.engine import liveness
from quantkit.job import foreign, tier_files
from quantkit.job.ladder import run_ladder
from quantkit.job.progress import Silent
from quantkit.job.rundir import read_json
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model
from tests.job.test_run import workers_of

pytestmark = pytest.mark.engine
SETTINGS = ["eval.chunks=spread", "eval.n_chunk=4", "imatrix.chunks=first", "imatrix.n_chunk=2"]


class Harming(Silent):
    """Sends a signal to every worker once, when a step begins; remembers what is said."""

    def __init__(self, step: str, harm: signal.Signals) -> None:
        self._step, self._harm, self.notes = step, harm, ""

    def start(self, step: str, total: int) -> None:
        if step == self._step:
            self._step = ""
            for pid in workers_of(os.getpid()):
                os.kill(pid, self._harm)

    def note(self, text: str) -> None:
        self.notes += text + "\n"


@pytest.mark.parametrize(("harm", "words"), [
    (signal.SIGKILL, r"was killed \(signal 9\): probably out of memory"),
    (signal.SIGSTOP, r"did nothing and said nothing for \d s, so it was ended"),
], ids=["out of memory", "hang"])
def test_a_tier_whose_worker_ends_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: signal.Signals,
                                              words: str) -> None:
    foreign._child.close()  # of an earlier test; it has limits of its own
    base = tiny_model(tmp_path / "tiny-BF16.gguf", n_embd=256, n_ff=256)[0]
    protocol, progress = load_protocol("demo-v1", SETTINGS), Harming("quantize Q8_0 Q4_K_M", harm)
    monkeypatch.setattr(tier_files, "n_side", lambda *_: 1)  # the first tier meets it, the second has a worker of its own
    if harm == signal.SIGSTOP:
        monkeypatch.setattr(liveness, "POLL_S", 0.1)
        monkeypatch.setattr(liveness, "QUIET_S", 5.0)
    result = run_ladder(base, protocol, tmp_path / "run", ["Q8_0", "Q4_K_M"], progress)
    [(failed, error)] = result.failed.items()
    [other] = {"Q8_0", "Q4_K_M"} - {failed}
    assert isinstance(error, EngineKilled)
    assert re.search(f"^quantize {failed}: the worker process {words}", str(error))
    assert list(read_json(tmp_path / "run" / "manifest.json")["tiers"]) == [other]
    assert [path.name for path in (tmp_path / "run" / "quants").iterdir()] == [f"tiny-{other}.gguf"]
    assert run_ladder(base, protocol, tmp_path / "run", ["Q8_0", "Q4_K_M"], Silent()).failed == {}
