"""The calibration step as a user meets it: resumed, refused, mended, recorded.

FAULTS of importance matrices, and where each is held:

    14  zeros zero the weights            here (TestZeros), tests/job/test_tensor_check.py
    15  no data for the MTP block         here (TestPreflight), tests/spec/test_plan_coverage.py
    16  a missing entry is found late     here (TestPreflight), tests/spec/test_plan_coverage.py
    17  misnamed entries are ignored      here (TestPreflight), tests/spec/test_plan_coverage.py
    18  an entry of another length        here (TestPreflight), tests/spec/test_plan_coverage.py
    19  experts without data              here (TestExperts), tests/spec/test_imatrix_file.py
    21  old and new containers            here (TestPreflight), tests/spec/test_imatrix_file.py
    23  merging sums, means, chunk sizes  tests/engine/test_collect.py, tests/spec/test_imatrix_file.py, tests/cli/test_imatrix.py
    24  other bytes every time            here (TestCollection), tests/spec/test_imatrix_file.py
    25  provenance missing or leaking     here (TestProvenance)
    26  calibrated on the test text       here (TestLeak), tests/measure/test_ngrams.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import CorpusError, EngineError, ImatrixError, InputError, PlanError, RunLocked
from quantkit.core.files import FolderLock, sha256_file
from quantkit.engine.pool import WorkerPool
from quantkit.job import imatrix
from quantkit.job.evaluation import read_subject
from quantkit.job.imatrix_state import EMPTY, CollectState, load_state, save_state, state_beside
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.plans import resolve_tier
from quantkit.job.quantize import Importances, prepare_importances, quantize_tier
from quantkit.job.rundir import read_json
from quantkit.job.standalone import collect_to_file, quantize_to_file
from quantkit.report.run_report import write_report
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.spec.protocol import Protocol, load_protocol

DEMO = Path(__file__).parents[2] / "quantkit" / "data" / "demo"
MODEL = DEMO / "tiny-qwen35-mtp-BF16.gguf"
EXPERTS = "blk.0.ffn_up_exps.weight"
SETTINGS = ["eval.chunks=spread", "eval.n_chunk=4", "floors.n_chunk=2"]


class Notes:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.advanced: list[int] = []

    def start(self, step: str, total: int) -> None:
        self.steps.append((step, total))

    def advance(self, n: int = 1) -> None:
        self.advanced.append(n)

    def finish(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    """The demo's, measured on little of its text."""
    return load_protocol("demo-v1", SETTINGS)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, protocol: Protocol) -> Path:
    """The demo's matrix, collected without a break."""
    target = tmp_path_factory.mktemp("matrix") / "imatrix.gguf"
    collect_to_file(MODEL, protocol, target, Notes())
    return target


def changed(matrix: Path, target: Path, entries: Mapping[str, ImatrixEntry | None]) -> Path:
    """A copy of a matrix with some entries replaced, or taken out (None)."""
    held = read_imatrix(matrix)
    new = {name: entry for name, entry in {**held.entries, **entries}.items() if entry is not None}
    write_imatrix(target, replace(held, entries=new))
    return target


def left_in(folder: Path) -> list[str]:
    """Every file below a folder, hidden ones too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.engine
class TestCollection:
    def test_two_runs_write_the_same_bytes_and_leave_nothing_else(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        collect_to_file(MODEL, protocol, tmp_path / "imatrix.gguf", Notes())
        assert sha256_file(tmp_path / "imatrix.gguf") == sha256_file(matrix)
        assert [path.name for path in tmp_path.iterdir()] == ["imatrix.gguf"]

    @pytest.mark.parametrize("n_workers", [1, 2])
    def test_so_with_one_worker_and_with_two(self, matrix: Path, protocol: Protocol, tmp_path: Path, n_workers: int,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
        """Two of one thread, or one of two where there are two cores."""
        monkeypatch.setattr(imatrix, "_most_workers", lambda *_: n_workers)
        collect_to_file(MODEL, protocol, tmp_path / "imatrix.gguf", Notes())
        assert sha256_file(tmp_path / "imatrix.gguf") == sha256_file(matrix)

    def test_an_output_that_exists_is_refused_before_any_work(self, protocol: Protocol, tmp_path: Path) -> None:
        (tmp_path / "imatrix.gguf").write_bytes(b"mine")
        with pytest.raises(InputError, match="exists already"):
            collect_to_file(MODEL, protocol, tmp_path / "imatrix.gguf", Notes())
        with pytest.raises(InputError, match="is the input"):
            collect_to_file(MODEL, protocol, DEMO / "demo-eval.txt", Notes(), corpus=DEMO / "demo-eval.txt", force=True)
        assert left_in(tmp_path) == ["imatrix.gguf"]

    def test_a_text_that_is_too_short_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        protocol = load_protocol("demo-v1", ["imatrix.chunks=first", "imatrix.n_chunk=1000"])
        with pytest.raises(InputError, match=r"expected 1000 chunks of 512 tokens in the calibration text demo-calibration\.txt"):
            collect_to_file(MODEL, protocol, tmp_path / "imatrix.gguf", Notes())
        assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from quantkit.job import imatrix
from quantkit.cli.main import run

def save(path, state, save=imatrix.save_state):
    save(path, state)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    imatrix._SAVE_EVERY_S = 0.0
    imatrix.save_state = save
    run(sys.argv[1:])
"""

INTERRUPTED = """
import os, signal, sys
from quantkit.cli import bars
from quantkit.cli.main import run

def advance(self, n=1):
    if n == 4:
        os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    bars.Lines.advance = advance
    sys.exit(run(sys.argv[1:]))
"""


def end_early(script: str, *words: str | Path) -> int:
    """Run quantkit in a process of its own that ends in the midst; its exit code."""
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.engine
class TestResume:
    """The demo's text has 7 chunks and state is kept after each 4."""

    @pytest.mark.parametrize(("script", "code"), [(KILLED, -signal.SIGKILL), (INTERRUPTED, 130)])
    def test_beside_a_target(self, matrix: Path, protocol: Protocol, tmp_path: Path, script: str, code: int) -> None:
        target = tmp_path / "imatrix.gguf"
        assert end_early(script, "imatrix", "-b", MODEL, "-p", "demo-v1", "-o", target) == code
        assert not target.exists()
        assert [path.name for path in tmp_path.iterdir()] == [".imatrix.gguf.quantkit-state"]
        listener = Notes()
        collect_to_file(MODEL, protocol, target, listener)
        assert listener.advanced == [4, 3]
        assert sha256_file(target) == sha256_file(matrix)
        assert left_in(tmp_path) == ["imatrix.gguf"]

    def test_in_a_run_directory(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        run = tmp_path / "run"
        options = [part for setting in SETTINGS for part in ("--set", setting)]
        code = end_early(KILLED, "run", "-b", MODEL, "-p", "demo-v1", *options, "-o", run, "--tiers", "Q6_K")
        assert code == -signal.SIGKILL
        assert len(list((run / "parts" / "imatrix").glob("*.sums"))) == 1
        listener = Notes()
        assert run_ladder(MODEL, protocol, run, ["Q6_K"], listener).failed == {}
        assert listener.advanced[:2] == [4, 3]
        assert sha256_file(run / "imatrix.gguf") == sha256_file(matrix)
        assert list((run / "parts" / "imatrix").glob("*.sums")) == []

    @pytest.mark.parametrize("damage", [0, 100, -1, "cut"])
    def test_a_damaged_state_is_done_again(self, matrix: Path, protocol: Protocol, tmp_path: Path, damage: int | str) -> None:
        target = tmp_path / "imatrix.gguf"
        end_early(KILLED, "imatrix", "-b", MODEL, "-p", "demo-v1", "-o", target)
        state, = tmp_path.rglob("*.sums")
        data = bytearray(state.read_bytes())
        if isinstance(damage, int):
            data[damage] ^= 1
        state.write_bytes(data if isinstance(damage, int) else data[:5000])
        listener = Notes()
        collect_to_file(MODEL, protocol, target, listener)
        assert listener.advanced == [0, 4, 3]
        assert sha256_file(target) == sha256_file(matrix)

    def test_the_state_of_another_collection_is_not_taken(self, protocol: Protocol, tmp_path: Path) -> None:
        target = tmp_path / "imatrix.gguf"
        end_early(KILLED, "imatrix", "-b", MODEL, "-p", "demo-v1", "--set", "imatrix.output=false", "-o", target)
        listener = Notes()
        collect_to_file(MODEL, protocol, target, listener)
        assert listener.advanced == [0, 4, 3]
        assert left_in(tmp_path) == ["imatrix.gguf"]

    def test_a_second_process_is_told_and_changes_nothing(self, protocol: Protocol, tmp_path: Path) -> None:
        target = tmp_path / "imatrix.gguf"
        with FolderLock(tmp_path / ".imatrix.gguf.quantkit-state"):
            before = left_in(tmp_path)
            with pytest.raises(RunLocked, match=r"another process \(pid \d+\) works on .*imatrix\.gguf: wait for it"):
                collect_to_file(MODEL, protocol, target, Notes())
            assert left_in(tmp_path) == before


class TestState:
    def state(self) -> CollectState:
        from quantkit.engine.collect import Sums

        return EMPTY.plus({"a": Sums(np.array([[0.1, 2.0]]), np.array([7]))}, 4)

    def test_round_trip(self, tmp_path: Path) -> None:
        save_state(tmp_path / "x.sums", self.state())
        held = load_state(tmp_path / "x.sums")
        assert held is not None
        assert (held.n_done, held.sums["a"].in_sum2.tolist(), held.sums["a"].counts.tolist()) == (4, [[0.1, 2.0]], [7])

    def test_every_damaged_byte_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.sums"
        save_state(path, self.state())
        data = path.read_bytes()
        for i in range(0, len(data), 7):
            path.write_bytes(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1:])
            assert load_state(path) is None
        path.write_bytes(b"")
        assert load_state(path) is None
        assert load_state(tmp_path / "none") is None

    def test_adding_leaves_the_state_before_as_it_was(self) -> None:
        first = self.state()
        second = first.plus(first.sums, 4)
        assert (first.sums["a"].in_sum2.tolist(), second.sums["a"].in_sum2.tolist()) == ([[0.1, 2.0]], [[0.2, 4.0]])
        assert (second.n_done, second.sums["a"].counts.tolist()) == (8, [14])

    def test_the_folder_beside_a_target_stays_only_with_a_state_in_it(self, tmp_path: Path) -> None:
        target = tmp_path / ("x" * 255)
        def fail(*, with_state: bool) -> None:
            with state_beside(target) as folder:
                if with_state:
                    save_state(folder / "imatrix" / "x.sums", self.state())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail(with_state=False)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ZeroDivisionError):
            fail(with_state=True)
        assert [path.name for path in tmp_path.iterdir()] == [f".{'x' * 200}.quantkit-state"]
        with state_beside(target):
            pass
        assert list(tmp_path.iterdir()) == []


def raw(matrix: Path, entries: Mapping[str, Any]) -> Importances:
    """Importances as they are handed to the library, with nothing mended."""
    return Importances(file=matrix.name, sha256=sha256_file(matrix), n_entries=len(entries), values=entries, datasets=("x.txt",),
                       chunk_count=1, zero_columns={}, missing_experts={})


@pytest.mark.engine
class TestZeros:
    """FAULT 14: ones, and the first 256 values of one tensor zero."""

    NAME = "blk.1.ffn_down.weight"

    def ones(self, matrix: Path, target: Path) -> Path:
        held = read_imatrix(matrix)
        entries = {name: ImatrixEntry(in_sum2=np.full_like(e.in_sum2, 100), counts=np.full_like(e.counts, 100))
                   for name, e in held.entries.items()}
        entries[self.NAME].in_sum2[0, :256] = 0
        write_imatrix(target, replace(held, entries=entries))
        return target

    @pytest.mark.parametrize("tier", ["Q4_K_M", "Q3_K_M"])
    def test_raw_they_lose_the_weights_and_the_check_says_so(self, matrix: Path, protocol: Protocol, tmp_path: Path,
                                                             tier: str) -> None:
        path = self.ones(matrix, tmp_path / "ones.gguf")
        values = {name: (e.in_sum2 / 100).ravel() for name, e in read_imatrix(path).entries.items()}
        with WorkerPool(1, tmp_path / "logs") as pool:
            base = read_subject(MODEL, "base")
            plan = resolve_tier(pool, base.model, protocol, protocol.plan.tier(tier), read_imatrix(path).lengths())
            with pytest.raises(EngineError, match=rf"{self.NAME} lost its weights as Q\d_K: .* found .* \(1\.000\); zeros"):
                quantize_tier(pool, base.model, plan, tmp_path / "out" / "q.gguf", raw(path, values), Notes())
            assert left_in(tmp_path / "out") == []

    @pytest.mark.parametrize("tier", ["Q4_K_M", "Q3_K_M"])
    def test_floored_they_do_not_and_are_listed(self, matrix: Path, protocol: Protocol, tmp_path: Path, tier: str) -> None:
        listener = Notes()
        made = quantize_to_file(MODEL, protocol, tier, tmp_path / "q.gguf", listener,
                                imatrix=self.ones(matrix, tmp_path / "ones.gguf"))
        error = next(e for e in made.errors if e.name == self.NAME)
        assert error.worst_run_error < 0.2
        assert (f"imatrix: 256 columns of 1 tensors were never hit and get a fraction of the mean: {self.NAME} (256)"
                in listener.notes)

    def test_the_manifest_lists_them(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        path = self.ones(matrix, tmp_path / "ones.gguf")
        run_ladder(MODEL, protocol, tmp_path / "run", ["Q6_K"], Notes(), RunOptions(imatrix=path))
        facts = read_json(tmp_path / "run" / "manifest.json")["imatrix"]
        assert (facts["zero_columns"], facts["zero_floor"], facts["missing_experts"]) == ({self.NAME: 256}, 0.001, {})


@pytest.mark.engine
class TestPreflight:
    """Refused before a byte is written: no output, no folder for it, no temporary file."""

    def refused(self, tmp_path: Path, path: Path, tier: str, *settings: str) -> str:
        with pytest.raises((ImatrixError, PlanError)) as caught:
            quantize_to_file(MODEL, load_protocol("demo-v1", settings), tier, tmp_path / "out" / "q.gguf", Notes(), imatrix=path)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    def test_the_mtp_block_in_low_bits_without_data(self, shared: Path, tmp_path: Path) -> None:
        message = self.refused(tmp_path, shared / "oracle" / "imatrix-tiny.gguf", "IQ1_M", "plan.mtp_type=IQ2_XXS")
        assert "blk.4." in message

    def test_and_with_ours_it_is_written(self, matrix: Path, tmp_path: Path) -> None:
        protocol = load_protocol("demo-v1", ["plan.mtp_type=IQ2_XXS"])
        quantize_to_file(MODEL, protocol, "IQ1_M", tmp_path / "q.gguf", Notes(), imatrix=matrix)
        types = {t.name: t.type.name for t in read_header(tmp_path / "q.gguf").tensors if t.name.startswith("blk.4.")}
        matrices = {name for name in types if name.split(".")[-2] in
                    {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "eh_proj"}}
        assert {types[name] for name in matrices} == {"IQ2_XXS"}
        assert len(matrices) == 8
        assert {kind for name, kind in types.items() if name not in matrices} == {"F32"}

    def test_a_late_missing_entry(self, matrix: Path, tmp_path: Path) -> None:
        path = changed(matrix, tmp_path / "i.gguf", {"blk.3.ffn_up.weight": None})
        assert "blk.3.ffn_up.weight" in self.refused(tmp_path, path, "IQ2_S")

    def test_names_without_their_suffix(self, matrix: Path, tmp_path: Path) -> None:
        held = read_imatrix(matrix)
        bare = {name.removesuffix(".weight"): entry for name, entry in held.entries.items()}
        write_imatrix(tmp_path / "i.gguf", replace(held, entries=bare))
        message = self.refused(tmp_path, tmp_path / "i.gguf", "Q4_K_M")
        assert "got 0%: 0 tensors have an entry, none for 40" in message
        assert "no tensor for 40 (blk.0.attn_gate," in message

    @pytest.mark.parametrize("tier", ["Q4_K_M", "IQ2_S"])
    def test_an_entry_of_another_length(self, matrix: Path, tmp_path: Path, tier: str) -> None:
        entry = read_imatrix(matrix).entries["blk.3.ffn_up.weight"]
        short = ImatrixEntry(in_sum2=entry.in_sum2[:, :-1], counts=entry.counts)
        path = changed(matrix, tmp_path / "i.gguf", {"blk.3.ffn_up.weight": short})
        message = self.refused(tmp_path, path, tier)
        assert "blk.3.ffn_up.weight" in message
        assert "255" in message

    def test_values_that_are_not_finite(self, matrix: Path, tmp_path: Path) -> None:
        entry = read_imatrix(matrix).entries["blk.3.ffn_up.weight"]
        bad = ImatrixEntry(in_sum2=np.where(np.arange(256) == 5, np.nan, entry.in_sum2).astype(np.float32), counts=entry.counts)
        message = self.refused(tmp_path, changed(matrix, tmp_path / "i.gguf", {"blk.3.ffn_up.weight": bad}), "Q4_K_M")
        assert "sums of squares for blk.3.ffn_up.weight" in message
        assert "the first in column 5" in message

    def test_what_a_matrix_lacks_is_noted_where_it_may(self, shared: Path, protocol: Protocol, tmp_path: Path) -> None:
        """K types go without importances for the MTP block; the calibration text of a given matrix is unknown."""
        listener = Notes()
        quantize_to_file(MODEL, protocol, "Q6_K", tmp_path / "q.gguf", listener, imatrix=shared / "oracle" / "imatrix-tiny.gguf")
        notes = [note for note in listener.notes if note.startswith("imatrix: ")]
        assert notes == [
            "imatrix: the matrix was given and its format does not hold the calibration text's hash: whether that is the text "
            "measured on is unknown",
            "imatrix: in Q6_K: quantized without importances: tensors 9 (output.weight, blk.4.ffn_gate.weight, "
            "blk.4.ffn_up.weight, ...)"]

    def test_the_container_is_told_by_content(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        shutil.copy(matrix, tmp_path / "imatrix.dat")
        legacy = legacy_file(tmp_path / "legacy.gguf", read_imatrix(matrix))
        made = [quantize_to_file(MODEL, protocol, "Q6_K", tmp_path / f"{path.stem}-q.gguf", Notes(), imatrix=path)
                for path in (tmp_path / "imatrix.dat", legacy)]
        data = [{t.name: tensor_bytes(tmp_path / m.file, t.name) for t in read_header(tmp_path / m.file).tensors} for m in made]
        assert data[0] == data[1]


def tensor_bytes(path: Path, name: str) -> bytes:
    tensor = next(t for t in read_header(path).tensors if t.name == name)
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.size_bytes)


def legacy_file(path: Path, matrix: Imatrix) -> Path:
    """The same importances as the old tool would have kept them: means times one call."""
    import struct

    data = struct.pack("<i", len(matrix.entries))
    for name, entry in matrix.entries.items():
        values = (entry.in_sum2 / entry.counts[:, None]).astype("<f4").ravel()
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values)) + values.tobytes()
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def experts(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The matrix of the expert model, and one in which an expert of one tensor was never hit."""
    folder = tmp_path_factory.mktemp("experts")
    collect_to_file(moe_model, load_protocol("demo-v1"), folder / "whole.gguf", Notes())
    entry = read_imatrix(folder / "whole.gguf").entries[EXPERTS]
    counts, sums = entry.counts.copy(), entry.in_sum2.copy()
    counts[1], sums[1] = 0, 0
    changed(folder / "whole.gguf", folder / "missing.gguf", {EXPERTS: ImatrixEntry(in_sum2=sums, counts=counts)})
    return folder / "whole.gguf", folder / "missing.gguf"


@pytest.mark.engine
class TestExperts:
    """FAULT 19 on a model of 4 experts a layer."""

    def test_counts_are_kept_per_expert(self, experts: tuple[Path, Path]) -> None:
        entry = read_imatrix(experts[0]).entries[EXPERTS]
        assert len(entry.counts) == len(entry.in_sum2) > 1
        assert len(set(entry.counts.tolist())) > 1

    def test_a_missing_expert_is_neutral_and_told(self, moe_model: Path, experts: tuple[Path, Path], tmp_path: Path) -> None:
        listener = Notes()
        made = quantize_to_file(moe_model, load_protocol("demo-v1"), "Q4_K_M", tmp_path / "q.gguf", listener, imatrix=experts[1])
        assert f"imatrix: 1 experts of 1 tensors were never hit and are neutral: {EXPERTS} (1)" in listener.notes
        assert next(e for e in made.errors if e.name == EXPERTS).worst_run_error < 0.2
        ready = prepare_importances(experts[1], read_imatrix(experts[1]), [EXPERTS], 0.001)
        assert ready.missing_experts == {EXPERTS: (1,)}
        n = len(read_imatrix(experts[1]).entries[EXPERTS].counts)
        assert (ready.values[EXPERTS].reshape(n, -1)[1] == 1).all()

    def test_more_than_the_limit_is_refused_where_importances_are_needed(self, moe_model: Path, experts: tuple[Path, Path],
                                                                         tmp_path: Path) -> None:
        with pytest.raises(ImatrixError, match=rf"expected at most 5% of experts without rows behind {EXPERTS} .*, got 1 of \d+"):
            quantize_to_file(moe_model, load_protocol("demo-v1"), "IQ2_S", tmp_path / "out" / "q.gguf", Notes(),
                             imatrix=experts[1])
        assert not (tmp_path / "out").exists()


@pytest.mark.engine
class TestProvenance:
    """FAULT 25: what made the file, and nothing of whose computer it was."""

    def test_a_quantized_file_names_its_matrix_and_no_folder(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        folder = tmp_path / "home" / "jane doe"
        folder.mkdir(parents=True)
        held = read_imatrix(matrix)
        write_imatrix(folder / "my imatrix.gguf", replace(held, datasets=("/home/user/texts/calibration, v1.txt", "b.txt")))
        shutil.copy(MODEL, folder / "m.gguf")
        made = quantize_to_file(folder / "m.gguf", protocol, "Q6_K", folder / "q.gguf", Notes(), imatrix=folder / "my imatrix.gguf")
        found = {key: value for key, value in read_header(folder / made.file).metadata.items() if key.startswith("quantize.")}
        assert found == {
            "quantize.imatrix.file": "my imatrix.gguf", "quantize.imatrix.dataset": "calibration, v1.txt, b.txt",
            "quantize.imatrix.entries_count": 40, "quantize.imatrix.chunks_count": 7,
            "quantize.imatrix.sha256": sha256_file(folder / "my imatrix.gguf")}
        self.assert_no_folder(folder / made.file, tmp_path)

    def test_a_run_writes_the_same_keys(self, protocol: Protocol, tmp_path: Path) -> None:
        run = tmp_path / "home" / "jane doe" / "run"
        run_ladder(MODEL, protocol, run, ["Q6_K"], Notes())
        path, = (run / "quants").iterdir()
        keys = read_header(path).metadata
        assert (keys["quantize.imatrix.file"], keys["quantize.imatrix.dataset"]) == ("imatrix.gguf", "demo-calibration.txt")
        for file in (path, run / "imatrix.gguf", run / "manifest.json"):
            self.assert_no_folder(file, tmp_path)

    def test_without_a_matrix_there_are_no_keys(self, protocol: Protocol, tmp_path: Path) -> None:
        quantize_to_file(MODEL, protocol, "Q6_K", tmp_path / "q.gguf", Notes())
        assert [key for key in read_header(tmp_path / "q.gguf").metadata if key.startswith("quantize.imatrix")] == []

    def test_what_a_legacy_file_does_not_say_is_left_out(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        legacy = legacy_file(tmp_path / "i.dat", read_imatrix(matrix))
        quantize_to_file(MODEL, protocol, "Q6_K", tmp_path / "q.gguf", Notes(), imatrix=legacy)
        keys = read_header(tmp_path / "q.gguf").metadata
        assert {key for key in keys if key.startswith("quantize.imatrix")} == {
            "quantize.imatrix.file", "quantize.imatrix.entries_count", "quantize.imatrix.sha256"}

    @staticmethod
    def assert_no_folder(path: Path, *folders: Path) -> None:
        data = path.read_bytes()
        for text in (*map(str, folders), "jane doe", "/home/", os.path.expanduser("~/")):  # noqa: PTH111 - as text
            assert text.encode() not in data, (path, text)


class TestLeak:
    """FAULT 26."""

    def leaking(self, folder: Path, calibration: bytes) -> Path:
        """demo-v1 calibrated on another text."""
        (folder / "texts").mkdir()
        (folder / "texts" / "leak.txt").write_bytes(calibration)
        shutil.copy(DEMO / "demo-eval.txt", folder / "texts")
        text = (Path(__file__).parents[2] / "protocols" / "demo-v1.toml").read_text()
        old = (DEMO / "demo-calibration.txt").read_bytes()
        text = text.replace(hashlib.sha256(old).hexdigest(), hashlib.sha256(calibration).hexdigest())
        text = text.replace('file = "demo-calibration.txt"', 'file = "leak.txt"').replace(f"size_bytes = {len(old)}",
                                                                                         f"size_bytes = {len(calibration)}")
        text = text.replace('name = "demo-v1"', 'name = "leaking"')
        (folder / "leaking.toml").write_text(text)
        return folder / "leaking.toml"

    def test_the_test_text_as_calibration_is_refused(self, protocol: Protocol, tmp_path: Path) -> None:
        with pytest.raises(CorpusError):  # by its hash, as any other text
            collect_to_file(MODEL, protocol, tmp_path / "i.gguf", Notes(), calibration=DEMO / "demo-eval.txt")
        with pytest.raises(InputError, match="a text that is not evaluated on"):
            load_protocol("demo-v1", ["imatrix.corpus=demo-eval.txt"])

    @pytest.mark.parametrize("verb", ["imatrix", "run"])
    @pytest.mark.system
    def test_passages_of_the_test_text_are_refused_before_any_work(self, tmp_path: Path, verb: str) -> None:
        measured = (DEMO / "demo-eval.txt").read_bytes()
        text = (DEMO / "demo-calibration.txt").read_bytes() + b"\n" + measured[3000:6000].lower().replace(b" , ", b", ")
        protocol = load_protocol(str(self.leaking(tmp_path, text)))
        texts = tmp_path / "texts"
        before = left_in(tmp_path)

        def start() -> None:
            if verb == "imatrix":
                collect_to_file(MODEL, protocol, tmp_path / "i.gguf", Notes(), calibration=texts, corpus=texts)
            else:
                run_ladder(MODEL, protocol, tmp_path / "run", None, Notes(), RunOptions(calibration=texts, corpus=texts))

        with pytest.raises(CorpusError) as caught:
            start()
        message = str(caught.value)
        assert "shares at most 1.00% with the evaluation text" in message
        assert hashlib.sha256(text).hexdigest() in message
        assert hashlib.sha256(measured).hexdigest() in message
        assert left_in(tmp_path) == before

    @pytest.mark.engine
    def test_the_manifest_holds_both_hashes_and_the_share(self, protocol: Protocol, tmp_path: Path) -> None:
        listener = Notes()
        run_ladder(MODEL, protocol, tmp_path / "run", ["Q6_K"], listener)
        facts = read_json(tmp_path / "run" / "manifest.json")["imatrix"]
        calibration, evaluation = (hashlib.sha256((DEMO / f"demo-{kind}.txt").read_bytes()).hexdigest()
                                   for kind in ("calibration", "eval"))
        overlap, = facts["overlap"]
        assert (facts["given"], facts["corpus_sha256"]) == (False, calibration)
        assert (overlap["calibration_sha256"], overlap["evaluation_sha256"]) == (calibration, evaluation)
        assert (overlap["ngram"], overlap["n_shared"], overlap["share"]) == (13, 0, 0.0)
        assert any("shares 0.00% of its 13-grams with demo-eval.txt" in note for note in listener.notes)
        assert (f"- Calibration: demo-calibration.txt, sha256 {calibration}; 0.00% of its 13-grams are in demo-eval.txt, sha256 "
                f"{evaluation}\n") in write_report(tmp_path / "run").markdown
        assert facts["coverage"]["Q6_K"]["n_matched"] == 40
        assert (facts["coverage"]["Q6_K"]["without_entry"], facts["coverage"]["Q6_K"]["unknown"]) == ([], [])

    @pytest.mark.engine
    def test_of_a_given_matrix_the_text_is_unknown_and_said_so(self, matrix: Path, protocol: Protocol, tmp_path: Path) -> None:
        listener = Notes()
        run_ladder(MODEL, protocol, tmp_path / "run", ["Q6_K"], listener, RunOptions(imatrix=matrix))
        facts = read_json(tmp_path / "run" / "manifest.json")["imatrix"]
        assert (facts["given"], facts["corpus_sha256"], facts["overlap"]) == (True, None, None)
        assert any("whether that is the text measured on is unknown" in note for note in listener.notes)
        assert "- Calibration: a given matrix, sha256 " in write_report(tmp_path / "run").markdown

    @pytest.mark.system
    def test_a_missing_evaluation_text_is_noted_where_only_a_matrix_is_collected(self, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "nothing").mkdir()
        monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(tmp_path / "nothing"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
        listener = Notes()
        protocol = load_protocol("demo-v1", ["eval.corpora=[\"wiki.test.raw\"]", "imatrix.n_chunk=1000", "imatrix.chunks=first"])
        with pytest.raises(InputError, match="expected 1000 chunks"):
            collect_to_file(MODEL, protocol, tmp_path / "i.gguf", listener)
        assert listener.notes == ["imatrix: the evaluation text wiki.test.raw is not at hand, so whether the calibration text has "
                                  "passages of it is not known: --corpus names it"]
