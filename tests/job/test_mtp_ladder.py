"""A ladder's tiers keep their head, lose it, or share one file; each is checked, and one that fails leaves the others whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quantkit.core.errors import EngineError
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.mtp_files import split_model
from quantkit.job.mtp_ladder import check_tiers, separate_head, write_tier
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from tests.engine.fake import BUILD, InProcessPool
from tests.job import mtp_fakes
from tests.job.mtp_fakes import TEXT, World, protocol
from tests.mtp_factory import headed_model


@pytest.fixture
def base(tmp_path: Path) -> Subject:
    return read_subject(headed_model(tmp_path / "base.gguf")[0], "base")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path / "run")


@pytest.mark.parametrize(("mode", "n_nextn"), [("inside", 1), ("strip", 0), ("separate", 0)])
def test_a_tiers_file_has_the_head_or_not_as_the_protocol_says(base: Subject, run: RunFolder, mode: str, n_nextn: int) -> None:
    target = run.quants / "m-Q8_0.gguf"

    def quantize(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(base.path, path)
        return "made"

    assert write_tier(run, protocol(f"plan.mtp_mode={mode}"), base, "Q8_0", target, quantize) == "made"
    assert describe_model(read_header(target)).n_nextn == n_nextn
    assert list(run.path.rglob("*.whole.gguf")) == []


def test_a_quantization_that_fails_leaves_nothing(base: Subject, run: RunFolder) -> None:
    def quantize(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        raise EngineError("no")

    with pytest.raises(EngineError):
        write_tier(run, protocol("plan.mtp_mode=strip"), base, "Q8_0", run.quants / "m.gguf", quantize)
    assert [path for path in run.path.rglob("*") if path.is_file()] == []


def test_the_ladders_own_head_is_named_after_the_model_and_its_type(base: Subject, run: RunFolder,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.job.mtp_heads.read_build", lambda *_, **__: BUILD)
    pool = InProcessPool()
    separate = protocol("plan.mtp_mode=separate", 'plan.mtp_type=""')
    head = separate_head(run, pool, separate, base, "tiny", Silent(), None)  # type: ignore[arg-type]
    assert head is not None
    assert head.path == run.quants / "mtp-tiny-BF16.gguf"
    assert head.model.is_head_only
    written = head.path.stat().st_mtime_ns
    again = separate_head(run, pool, separate, base, "tiny", Silent(), None)  # type: ignore[arg-type]
    assert again is not None
    assert (again.sha256, again.path.stat().st_mtime_ns) == (head.sha256, written)
    for mode in ("inside", "strip"):
        assert separate_head(run, pool, protocol(f"plan.mtp_mode={mode}"), base, "tiny", Silent(), None) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_tiers_are_checked_with_their_own_head_or_the_ladders(base: Subject, run: RunFolder, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    mtp_fakes.install(monkeypatch, world)
    split_model(base.path, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    whole = read_subject(headed_model(tmp_path / "whole.gguf", type_name="Q8_0")[0], "whole")
    trunk, head = read_subject(tmp_path / "trunk.gguf", "trunk"), read_subject(tmp_path / "head.gguf", "head")
    assert check_tiers(run, protocol(), base, [whole, trunk], head, TEXT, Silent()) == {}
    assert {"draft whole.gguf whole.gguf", "draft trunk.gguf head.gguf"} <= set(world.opened)


@pytest.mark.slow
def test_one_tier_that_fails_leaves_the_others_whole(base: Subject, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    world = World(teacher_right={"dead.gguf": 0.0})
    mtp_fakes.install(monkeypatch, world)
    tiers = [read_subject(headed_model(tmp_path / f"{name}.gguf", type_name="Q8_0", seed=i)[0], name)
             for i, name in enumerate(("dead", "alive"))]
    failed = check_tiers(run, protocol(), base, tiers, None, TEXT, Silent())
    assert list(failed) == ["dead"]
    assert failed["dead"].exit_code == 1
    assert sorted(path.name for path in (run.path / "mtp").iterdir()) == ["alive.json", "dead.json"]
