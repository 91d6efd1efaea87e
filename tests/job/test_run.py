"""The whole job on a model of 250 kB: the bundle is the same however the work was spread, stopped or resumed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantkit.core.errors import GgufError, InputError, RunLocked
from quantkit.core.files import FolderLock
from quantkit.job.audit import AuditOptions
from quantkit.job.ladder import RunOptions, RunResult, audit_files, run_ladder
from quantkit.job.manifest import APART, is_apart
from quantkit.job.progress import Silent
from quantkit.job.rundir import read_json
from quantkit.report.run_report import write_report
from quantkit.spec.protocol import Protocol, load_protocol
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.engine

TIERS = ["Q8_0", "Q4_K_M", "Q3_K_M"]  # the I-quants' tables take seconds to make
SETTINGS = ["eval.chunks=spread", "eval.n_chunk=16", "floors.n_chunk=8", "imatrix.chunks=first", "imatrix.n_chunk=2",
            "mtp.n_prompt=1", "mtp.n_predict=4"]


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", SETTINGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama whose rows 256 divides."""
    return tiny_model(tmp_path_factory.mktemp("a model") / "bäse model-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.fixture(scope="module")
def bundle(base: Path, protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of an undisturbed run with one worker, by hash."""
    return bundle_of(finish(run_ladder(base, protocol, tmp_path_factory.mktemp("reference") / "run", TIERS, Silent(),
                                       RunOptions(n_workers=1))))


def finish(result: RunResult) -> Path:
    assert result.failed == {}
    write_report(result.folder.path)
    return result.folder.path


def bundle_of(run: Path) -> dict[str, str]:
    """Every file but logs, parts, times and the lock, and what shows times."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in sorted(names)
            if name.split("/")[0] not in {"logs", "parts", "run.json", ".lock"} and name != APART and not is_apart(name)}


def test_the_manifest_lists_every_file_of_the_bundle(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    run = finish(run_ladder(base, protocol, tmp_path / "run", ["Q8_0"], Silent()))
    listed = {name: facts["sha256"] for name, facts in read_json(run / "manifest.json")["files"].items()}
    assert listed == {name: sha for name, sha in bundle_of(run).items() if name != "manifest.json"}


def test_what_shows_times_is_the_speeds_and_the_page(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    run = finish(run_ladder(base, protocol, tmp_path / "run", ["Q8_0"], Silent()))
    assert sorted(read_json(run / APART)["files"]) == ["report/report.html", "report/speed.json", "report/speed.md"]


def test_no_file_of_the_bundle_names_a_folder_of_this_machine(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    run = finish(run_ladder(base, protocol, tmp_path / "run", ["Q8_0", "Q4_K_M"], Silent()))
    for name in (*bundle_of(run), *read_json(run / APART)["files"]):
        data = (run / name).read_bytes()
        assert str(tmp_path).encode() not in data
        assert str(base.parent).encode() not in data


@pytest.mark.parametrize("options", [
    RunOptions(n_workers=2), RunOptions(n_workers=3, audit=AuditOptions(max_group=1)), RunOptions(n_workers=2, drop_files=True),
    RunOptions(n_workers=2, audit=AuditOptions(memory_bytes=1)),  # nothing fits beside base: panels
], ids=["two workers", "groups of one", "files dropped", "panels"])
def test_the_bundle_does_not_depend_on_how_the_work_is_spread(base: Path, protocol: Protocol, bundle: dict[str, str],
                                                              tmp_path: Path, options: RunOptions) -> None:
    found = bundle_of(finish(run_ladder(base, protocol, tmp_path / "run", TIERS, Silent(), options)))
    dropped = {"manifest.json", *(name for name in bundle if name.startswith("quants/"))} if options.drop_files else set()
    assert {k: v for k, v in found.items() if k not in dropped} == {k: v for k, v in bundle.items() if k not in dropped}


def test_a_second_run_measures_nothing_again_and_changes_nothing(base: Path, protocol: Protocol, bundle: dict[str, str],
                                                                 tmp_path: Path) -> None:
    finish(run_ladder(base, protocol, tmp_path / "run", TIERS, Silent()))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "quants").iterdir()}
    assert bundle_of(finish(run_ladder(base, protocol, tmp_path / "run", TIERS, Silent()))) == bundle
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "quants").iterdir()} == times


@pytest.mark.parametrize("damage", ["quants/bäse model-Q4_K_M.gguf", "audit/Q4_K_M/rows.parquet", "audit/Q4_K_M/summary.json",
                                    "imatrix.gguf", "plan/Q4_K_M.json"])
def test_a_damaged_output_is_made_again(base: Path, protocol: Protocol, bundle: dict[str, str], tmp_path: Path,
                                        damage: str) -> None:
    finish(run_ladder(base, protocol, tmp_path / "run", TIERS, Silent()))
    path = tmp_path / "run" / damage
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)  # what an interrupted quantize run leaves
    path.write_bytes(data)
    assert bundle_of(finish(run_ladder(base, protocol, tmp_path / "run", TIERS, Silent()))) == bundle


SCRIPT = """
import sys
from pathlib import Path
from quantkit.cli.main import main
settings = [part for setting in sys.argv[4:] for part in ("--set", setting)]
main(["run", "-b", sys.argv[1], "-p", "demo-v1", "-o", sys.argv[2], "--tiers", sys.argv[3], "--workers", "2", *settings])
"""


def test_a_run_killed_anywhere_resumes_to_the_same_bundle(base: Path, protocol: Protocol, bundle: dict[str, str],
                                                          tmp_path: Path) -> None:
    rng = random.Random(4)
    run = tmp_path / "killed run"
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(base), str(run), ",".join(TIERS), *SETTINGS],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.2, 1.4))
        child.send_signal(signal.SIGKILL)
        child.wait()
    wait_for_orphans(run)
    assert bundle_of(finish(run_ladder(base, protocol, run, TIERS, Silent()))) == bundle
    assert [path.name for path in run.rglob(".*") if path.name != ".lock"] == []
    assert [path.name for path in (run / "parts").rglob("*.rows")] == []


def test_a_worker_that_is_killed_fails_its_step_and_the_next_run_completes(base: Path, protocol: Protocol,
                                                                           bundle: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(base), str(run), ",".join(TIERS), *SETTINGS],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    deadline = time.monotonic() + 60
    while not (run / "quants").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in workers_of(child.pid):
        os.kill(pid, signal.SIGKILL)
    _, err = child.communicate()
    assert "Traceback" not in err
    assert bundle_of(finish(run_ladder(base, protocol, run, TIERS, Silent()))) == bundle


def workers_of(pid: int) -> list[int]:
    """Child processes that run a worker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and b"spawn_main" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def wait_for_orphans(run: Path) -> None:
    """Workers notice within a second that their parent is gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(str(run).encode() in path.read_bytes() for path in _cmdlines()):
        time.sleep(0.1)
    time.sleep(1.5)


def _cmdlines() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists() and path.parent.name != str(os.getpid())]


def test_a_run_of_another_base_or_protocol_is_refused(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(run_ladder(base, protocol, run, ["Q8_0"], Silent()))
    other = tiny_model(tmp_path / "other-BF16.gguf", n_embd=256, n_ff=256, seed=1)[0]
    with pytest.raises(InputError, match="holds a run of another base: expected sha256"):
        run_ladder(other, protocol, run, ["Q8_0"], Silent())
    with pytest.raises(InputError, match="holds a run of protocol demo-v1"):
        run_ladder(base, load_protocol("demo-v1", ["imatrix.zero_floor=0.01"]), run, ["Q8_0"], Silent())


def test_a_touched_base_is_another_base(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    copy = tmp_path / "copy-BF16.gguf"
    copy.write_bytes(base.read_bytes())
    finish(run_ladder(copy, protocol, tmp_path / "run", ["Q8_0"], Silent()))
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with pytest.raises(InputError, match="holds a run of another base"):
        run_ladder(copy, protocol, tmp_path / "run", ["Q8_0"], Silent())


def test_a_folder_with_other_files_and_a_held_folder_are_refused(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="found other files in"):
        run_ladder(base, protocol, tmp_path, ["Q8_0"], Silent())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with FolderLock(tmp_path / "run"), pytest.raises(RunLocked, match="another process"):
        run_ladder(base, protocol, tmp_path / "run", ["Q8_0"], Silent())


def test_files_of_other_publishers_stand_beside_the_ladder(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    run = finish(run_ladder(base, protocol, tmp_path / "run", ["Q8_0", "Q4_K_M"], Silent()))
    foreign = tmp_path / "Q8_0.gguf"  # the name of one of ours, other bytes
    foreign.write_bytes((run / "quants" / "bäse model-Q4_K_M.gguf").read_bytes())
    finish(audit_files(base, protocol, run, [foreign], Silent()))
    tiers = json.loads((run / "report" / "retention.json").read_text())["tiers"]
    names = {tier["tier"]: tier["sha256"] for tier in tiers}
    sha = hashlib.sha256(foreign.read_bytes()).hexdigest()
    assert sorted(names) == sorted(["BF16", "Q8_0", "Q4_K_M", f"Q8_0-{sha[:8]}"])
    assert names[f"Q8_0-{sha[:8]}"] == names["Q4_K_M"] == sha


def test_a_file_of_another_tokenizer_fails_alone(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    stranger = tiny_model(tmp_path / "stranger.gguf", n_embd=256, n_ff=256, add_bos=True)[0]
    result = audit_files(base, protocol, tmp_path / "run", [base, stranger], Silent())
    assert list(result.failed) == ["stranger"]
    assert "is not a tier of this base" in str(result.failed["stranger"])
    assert result.folder.summary(base.stem).exists()


def test_a_truncated_file_is_refused_before_any_work(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[:-100])
    with pytest.raises(GgufError, match=r"cut\.gguf"):
        audit_files(base, protocol, tmp_path / "run", [base, cut], Silent())
    assert not (tmp_path / "run").exists()
