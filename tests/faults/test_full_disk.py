"""A disk that is full at every write of a run: one sentence, nothing half-written, and the same bundle once there is room."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.core.errors import EngineError, NoSpace, QuantkitError
from quantkit.core.files import sha256_file
from quantkit.job import quantize
from quantkit.job.ladder import run_ladder
from quantkit.job.parts import PartFile
from quantkit.job.progress import Silent
from quantkit.job.standalone import collect_to_file, quantize_to_file
from quantkit.spec.protocol import load_protocol
from tests.faults import fakes
from tests.faults.mounts import PAGE, grow, small_disk
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.system

FULL = r"\A(the disk is full (while writing|at) .*: free some space and run again|.* needs .*, but .* free: free some space.*)\Z"
MOST = 400  # pages or files that a run of the fakes never needs


def assert_nothing_half_written(run: Path, expected: dict[str, str]) -> None:
    """Every file that has its final name is the one of an undisturbed run; the manifest may be of an earlier step."""
    if not run.exists():
        return
    assert [path.name for path in run.rglob(".*") if path.name != ".lock"] == []
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if name in ("manifest.json", "run.json", "report/speed.manifest.json"):
            json.loads(path.read_bytes())
        elif name in expected:
            assert (name, sha256_file(path)) == (name, expected[name])


def fault_of(job: fakes.Job, run: Path) -> NoSpace | None:
    """How a run ended; None for a good end."""
    try:
        assert job.run(run).failed == {}
    except NoSpace as error:
        return error
    return None


def fill(part: PartFile, rows: list[npt.NDArray[np.void]]) -> None:
    """Add the rows of every chunk to a part file, and close it."""
    with part:
        for own in rows:
            part.append(own)


def runs_until_done(job: fakes.Job, run: Path, expected: dict[str, str], more: Iterator[None]) -> int:
    """Run, find the disk full, give it a little more room, go on; returns how often it was full."""
    for n_full, _ in enumerate(more):
        fault = fault_of(job, run)
        if fault is None:
            return n_full
        assert re.search(FULL, str(fault))
        assert fault.exit_code == 3
        assert_nothing_half_written(run, expected)
    pytest.fail("the run never ended")


@pytest.mark.parametrize("unit", ["n_page", "n_inode"])
def test_a_disk_that_is_full_at_every_write(job: fakes.Job, tmp_path: Path, expected: dict[str, str], unit: str) -> None:
    """Full of bytes, and full of files."""
    with small_disk(tmp_path / "disk", **{unit: 2}) as disk:
        def more() -> Iterator[None]:
            for n in range(3, MOST):
                yield
                grow(disk, **{unit: n})

        assert runs_until_done(job, disk / "run", expected, more()) > 20
        assert fakes.bundle_of(disk / "run") == expected
        assert list((disk / "run" / "parts").rglob("*.rows")) == []


def test_a_disk_that_says_so_only_when_it_is_flushed(job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed allocation, a quota on a server: fsync fails, at every call in turn."""
    allowed, real = [0], os.fsync

    def fsync(handle: int) -> None:
        if allowed[0] == 0:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        allowed[0] -= 1
        real(handle)

    def more() -> Iterator[None]:
        for n in range(0, MOST, 2):
            allowed[0] = n
            yield

    monkeypatch.setattr(os, "fsync", fsync)
    assert runs_until_done(job, tmp_path / "run", expected, more()) > 10
    assert fakes.bundle_of(tmp_path / "run") == expected


def test_the_first_fault_is_told_and_not_the_full_disk_that_met_its_end(job: fakes.Job, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("the first fault")

    def full(*_: object) -> None:
        raise NoSpace("no room for run.json")

    monkeypatch.setattr("quantkit.job.session.measure_tiers", fail)
    monkeypatch.setattr("quantkit.job.timing.write_json", full)
    with pytest.raises(EngineError, match="the first fault"):
        job.run(tmp_path / "run")


def test_what_a_part_file_had_no_room_for_is_measured_again(tmp_path: Path) -> None:
    tokens = fakes.tokens_of(40)
    with small_disk(tmp_path / "disk", n_page=2) as disk:
        path = disk / "audit.rows"
        rows = [fakes.rows_of(tokens, chunk) for chunk in range(40)]
        n_fit = 2 * PAGE // rows[0].nbytes
        assert 0 < n_fit < 39
        with pytest.raises(NoSpace, match=r"the disk is full while writing .*audit\.rows"):
            fill(PartFile(path, fakes.N_CTX, tokens), rows)
        grow(disk, n_page=40)
        again = PartFile(path, fakes.N_CTX, tokens)
        assert sorted(again.chunks) == list(range(n_fit))
        fill(again, rows)
        assert path.read_bytes() == b"".join(own.tobytes() for own in rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that llama.cpp can quantize to any type."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.mark.engine
class TestEngine:
    """llama.cpp itself on a small disk."""

    def test_a_tier_that_does_not_fit_is_refused_before_a_byte(self, base: Path, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", n_page=20) as disk:
            with pytest.raises(NoSpace, match=r"tier Q8_0 needs .* MiB, but .* has .* free: free some space or choose"):
                quantize_to_file(base, load_protocol("demo-v1"), "Q8_0", disk / "tier.gguf", Silent())
            assert list(disk.iterdir()) == []

    def test_a_disk_that_fills_while_the_library_writes(self, base: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody else takes the room; llama.cpp says `iostream error`, we say what it is."""
        monkeypatch.setattr(quantize, "require_space", lambda *_: None)
        with small_disk(tmp_path / "disk", n_page=20) as disk:
            with pytest.raises(NoSpace, match=r"the disk is full while writing .*tier\.gguf: free some space and run again"):
                quantize_to_file(base, load_protocol("demo-v1"), "Q8_0", disk / "tier.gguf", Silent())
            assert list(disk.iterdir()) == []
            grow(disk, n_page=2000)
            made = quantize_to_file(base, load_protocol("demo-v1"), "Q8_0", disk / "tier.gguf", Silent())
            assert made.sha256 == sha256_file(disk / "tier.gguf")

    def test_a_matrix_alone(self, base: Path, tmp_path: Path) -> None:
        """`quantkit imatrix`: its state, its report and the matrix in turn have no room; then all is as if it had been there."""
        protocol = load_protocol("demo-v1", ["imatrix.chunks=first", "imatrix.n_chunk=2"])
        collect_to_file(base, protocol, tmp_path / "expected.gguf", Silent())
        faults = []
        with small_disk(tmp_path / "disk", n_page=1) as disk:
            target = disk / "imatrix.gguf"
            for n_page in range(2, 200, 6):
                try:
                    collect_to_file(base, protocol, target, Silent())
                    break
                except NoSpace as error:
                    faults.append(str(error))
                assert not target.exists()
                grow(disk, n_page=n_page)
            assert sha256_file(target) == sha256_file(tmp_path / "expected.gguf")
            assert list(disk.iterdir()) == [target]
        assert len(faults) > 1
        assert all(re.search(FULL, fault) for fault in faults)

    def test_a_whole_run(self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Too little for the matrix, the tier's file and the rows in turn; then enough. Room is asked for first, and goes away."""
        monkeypatch.setattr("quantkit.job.doctor_work.require_space", lambda *_: None)
        monkeypatch.setattr(quantize, "require_space", lambda *_: None)
        protocol = load_protocol("demo-v1", ["eval.chunks=spread", "eval.n_chunk=4", "imatrix.chunks=first", "imatrix.n_chunk=2"])
        faults: list[Exception] = []
        with small_disk(tmp_path / "disk", n_page=10) as disk:
            for n_page in (12, 30, 60, 110, 4000):
                grow(disk, n_page=n_page)
                try:
                    result = run_ladder(base, protocol, disk / "run", ["Q8_0"], Silent())
                    faults += result.failed.values()
                except QuantkitError as error:
                    faults.append(error)
                assert [path.name for path in (disk / "run").rglob(".*") if path.name != ".lock"] == []
            assert [type(fault) for fault in faults] == [NoSpace] * 4
            assert result.failed == {}
            assert result.result_id is not None
