"""The trunk alone, timed for tiers without a head: over a fake engine with a clock that stands still, then with llama.cpp."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.core.errors import EngineError
from quantkit.job import mtp_speed
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.mtp_speed import read_speed, time_tier, time_tiers
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.report.check import check_report
from quantkit.report.run_report import write_report
from quantkit.spec.protocol import load_protocol
from tests.engine.fake import BUILD, InProcessPool
from tests.gguf_factory import tiny_model
from tests.job import mtp_fakes
from tests.job.mtp_fakes import TEXT, World, protocol


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    mtp_fakes.install(monkeypatch, found)

    @contextmanager
    def pool(run: RunFolder) -> Iterator[InProcessPool]:
        yield InProcessPool()

    monkeypatch.setattr(mtp_speed, "_pool", pool)
    monkeypatch.setattr(mtp_speed, "tokenize", mtp_fakes._tokenize)
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Subject:
    return read_subject(tiny_model(tmp_path / "tier.gguf")[0], "Q8_0")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path / "run")


def test_fixed_times_give_exact_speeds(world: World, tier: Subject, run: RunFolder) -> None:
    speed = time_tier(run, protocol(), tier, BUILD, TEXT, Silent())
    # A decode takes a second whatever its length: 7 of a prompt's 8 tokens in one, then one token each.
    assert (speed.plain.prompt_tokens_per_s, speed.plain.decode_tokens_per_s) == (7.0, 1.0)
    assert (speed.plain.noise.value, speed.plain.peak_memory_bytes > 0) == (1.0, True)
    assert (speed.n_prompt, speed.n_voided, speed.repeats, speed.drafts, speed.best_n_draft) == (3, 0, 3, (), None)
    assert world.opened == ["plain tier.gguf", "close plain"]
    assert read_speed(run, "Q8_0") == speed
    assert not (run.path / "mtp").exists()  # a check of a head there is none


def test_text_that_repeats_itself_is_timed_too(world: World, tier: Subject, run: RunFolder) -> None:
    world.loops = True
    assert time_tier(run, protocol(), tier, BUILD, TEXT, Silent()).plain.decode_tokens_per_s == 1.0


@pytest.mark.slow
def test_what_was_timed_is_not_timed_again_unless_something_changed(world: World, tier: Subject, run: RunFolder) -> None:
    progress = Notes()
    first = time_tier(run, protocol(), tier, BUILD, TEXT, progress)
    world.plain_seconds = 2.0
    assert time_tier(run, protocol(), tier, BUILD, TEXT, progress) == first
    assert progress.notes == ["speed Q8_0: timed already"]
    others = [(protocol("mtp.n_predict=11"), tier, BUILD), (protocol(), dataclasses.replace(tier, sha256="0" * 64), BUILD),
              (protocol(), tier, dataclasses.replace(BUILD, system_info="another"))]
    for settings, subject, build in others:
        assert time_tier(run, settings, subject, build, TEXT, Silent()).plain.decode_tokens_per_s == 0.5
    run.record("speed", "Q8_0").write_text("{")
    assert time_tier(run, protocol(), tier, BUILD, TEXT, Silent()).plain.decode_tokens_per_s == 0.5


def test_a_tier_that_cannot_be_timed_is_told_and_leaves_the_others(world: World, tier: Subject, run: RunFolder,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    true_time = mtp_speed.time_tier

    def fail(run: RunFolder, settings: object, subject: Subject, *rest: object) -> object:
        if subject.name == "broken":
            raise EngineError("it does not load")
        return true_time(run, settings, subject, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mtp_speed, "time_tier", fail)
    progress = Notes()
    time_tiers(run, protocol(), [dataclasses.replace(tier, name="broken"), tier], BUILD, TEXT, progress)
    assert progress.notes == ["speed of broken was not measured: it does not load"]
    assert sorted(path.name for path in (run.parts / "speed").iterdir()) == ["Q8_0.json"]


def test_a_text_that_is_too_short_costs_the_speed_alone(world: World, tier: Subject, run: RunFolder) -> None:
    progress = Notes()
    time_tiers(run, protocol(), [tier], BUILD, b"short", progress)
    assert len(progress.notes) == 1
    assert "expected at least 3 x 8 tokens" in progress.notes[0]


@pytest.mark.engine
def test_a_run_of_a_model_without_a_head_has_speeds(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "model-BF16.gguf", n_embd=256, n_ff=256)[0]
    settings = ["eval.chunks=spread", "eval.n_chunk=4", "mtp.n_prompt=2", "mtp.n_predict=8"]
    quick = load_protocol("demo-v1", settings)
    result = run_ladder(base, quick, tmp_path / "run", ["Q8_0"], Silent(), RunOptions(n_workers=1))
    assert result.failed == {}
    write_report(result.folder.path)
    check_report(result.folder.path)
    (held,) = json.loads((result.folder.report / "speed.json").read_bytes())
    assert held["tier"] == "Q8_0"
    assert min(held["plain"]["prompt_tokens_per_s"], held["plain"]["decode_tokens_per_s"]) > 0
    assert 1e7 < held["plain"]["peak_memory_bytes"] < 1e9
    assert "| Q8_0 | none |" in (result.folder.report / "speed.md").read_text()
    assert "Decode tok/s" in (result.folder.report / "report.html").read_text()
    assert not (result.folder.path / "mtp").exists()
    progress = Notes()
    run_ladder(base, quick, tmp_path / "run", ["Q8_0"], progress, RunOptions(n_workers=1))
    assert "speed Q8_0: timed already" in progress.notes
