"""The check with llama.cpp: quantized trunks and heads, a dead head, a matrix, and the same bytes twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from quantkit.cli.mtp import mtp
from quantkit.core.errors import CheckFailed
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import context_settings
from quantkit.job.mtp_check import mtp_path, require_passed
from quantkit.job.mtp_files import split_model, strip_head
from quantkit.job.mtp_prompts import Prompt
from quantkit.job.mtp_runs import ArmFiles, Arms, Runs, find_forks
from quantkit.job.mtp_standalone import check_file, matrix_files
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.report.mtp_matrix import write_matrix
from quantkit.report.mtp_report import write_mtp_report
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.protocol import load_protocol
from tests.mtp_factory import with_zeros

pytestmark = pytest.mark.engine

SETTINGS = ["mtp.n_prompt=2", "mtp.prompt_n_tokens=32", "mtp.n_predict=24", "mtp.n_draft=[2]", "mtp.teacher_chunks=first",
            "mtp.teacher_n_chunk=3", 'mtp.head_types=["Q8_0", "Q4_K"]']
PROTOCOL = load_protocol("demo-v1", SETTINGS)


def check(model: Path, run: Path, *, head: Path | None = None, base: Path | None = None) -> MtpResult:
    return check_file(model, head, base, PROTOCOL, run, None, Silent())


def test_quantized_tiers_pass_beside_the_unquantized_head(shared: Path, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("stock-Q8_0", "stock-Q4_K_M"):
        result = check(shared / "oracle" / f"{name}.gguf", tmp_path / "run", base=tiny_model)
        require_passed(result)
        assert result.rollback is not None
        assert (result.tier, result.rollback.mode) == (name, "recurrent snapshots")
        assert set(result.lossless.values()) <= {"identical", "near-tie"}
        own, reference = result.teacher_forced_acceptance, result.reference
        assert own is not None
        assert reference is not None
        assert (own.n, reference.teacher_forced_acceptance.n) == (3 * 511, 3 * 511)
        assert own.value > 0.5
        assert abs(own.value - reference.teacher_forced_acceptance.value) < 0.05
        assert {loss.name for loss in result.head_errors} > {"blk.4.nextn.eh_proj.weight", "blk.4.ffn_down.weight"}
        assert all(loss.relative_error < 0.2 for loss in result.head_errors)
    acceptance, speed = write_mtp_report(RunFolder(path=tmp_path / "run"))
    assert [line.split(" | ")[0] for line in acceptance.splitlines() if line.startswith("| stock")] == [
        "| stock-Q4_K_M", "| stock-Q8_0"]
    assert "a verify step takes as long as" in speed


def test_the_bundles_record_is_the_same_bytes_twice(tiny_model: Path, tmp_path: Path) -> None:
    for run in ("one", "two"):
        check(tiny_model, tmp_path / run)
    one, two = (mtp_path(RunFolder(path=tmp_path / run), tiny_model.stem) for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    before = one.stat().st_mtime_ns
    check(tiny_model, tmp_path / "one")
    assert one.stat().st_mtime_ns == before
    assert "/" not in json.loads(one.read_text())["file"]


def test_a_dead_head_fails_with_exit_1_though_its_text_is_right(tiny_model: Path, tmp_path: Path) -> None:
    dead = with_zeros(tiny_model, tmp_path / "dead.gguf", "blk.4.nextn.eh_proj.weight")
    arguments = [arg for setting in SETTINGS for arg in ("--set", setting)]
    done = CliRunner().invoke(mtp, ["check", str(dead), "-b", str(tiny_model), "-p", "demo-v1", "-o", str(tmp_path / "run"),
                                    *arguments])
    assert isinstance(done.exception, CheckFailed)
    assert done.exception.exit_code == 1
    assert "dead head" in str(done.exception)
    held = json.loads(mtp_path(RunFolder(path=tmp_path / "run"), "dead").read_text())
    assert set(held["lossless"].values()) <= {"identical", "near-tie"}
    errors = {loss["name"]: loss["relative_error"] for loss in held["head_errors"]}
    assert errors["blk.4.nextn.eh_proj.weight"] == 1.0


def test_a_head_in_its_own_file_and_a_trunk_without_one(tiny_model: Path, tmp_path: Path) -> None:
    split_model(tiny_model, tmp_path / "trunk.gguf", tmp_path / "head.gguf")
    inside = check(tiny_model, tmp_path / "run")
    apart = check(tmp_path / "trunk.gguf", tmp_path / "run", head=tmp_path / "head.gguf")
    assert (apart.n_drafted, apart.n_accepted) == (inside.n_drafted, inside.n_accepted)
    assert [p.sampled.tokens for p in apart.prompts] == [p.sampled.tokens for p in inside.prompts]
    strip_head(tiny_model, tmp_path / "bare.gguf")
    bare = check(tmp_path / "bare.gguf", tmp_path / "run")
    assert (bare.status, bare.reason, bare.acceptance_rate) == ("not applicable", "no MTP head", None)
    assert [p.sampled.tokens for p in bare.prompts] == [p.sampled.tokens for p in inside.prompts]
    acceptance, speed = write_mtp_report(RunFolder(path=tmp_path / "run"))
    assert "| bare | not applicable: no MTP head |" in acceptance
    assert [line for line in speed.splitlines() if line.startswith("| bare | none |")]


def test_a_token_that_was_put_in_by_hand_is_a_defect_though_rows_are_near(shared: Path) -> None:
    """The rows of all block lengths come from llama.cpp; the token after them comes from here."""
    model = shared / "oracle" / "stock-Q4_K_M.gguf"
    prompt = Prompt(index=0, source="here", tokens=np.array([260, 220, 16, 24, 23, 15, 82, 305], np.int32))
    files = ArmFiles(name="t", trunk=model, head=model, settings=context_settings(PROTOCOL.mtp), offload=Offload(), n_draft_max=2)
    with WorkerPool(1) as plain, WorkerPool(1) as drafting:
        arms = Arms(files, plain, drafting, together=True, warm_up={}, n_warmup=0)
        runs = Runs("sampled")
        for n_draft in (0, 2):
            runs.add(n_draft, 0, arms.run(prompt, 24, n_draft, prompt.sampler(PROTOCOL.mtp)))
        assert all(fork.verdict == "near-tie" for fork in find_forks(arms, runs, [prompt], PROTOCOL.mtp))
        found = runs.found[2, 0][0]
        wrong = (*found.tokens[:7], found.tokens[7] + 1, *found.tokens[8:])
        runs.found[2, 0] = [dataclasses.replace(found, tokens=wrong)]
        (fork,) = find_forks(arms, runs, [prompt], PROTOCOL.mtp)
    assert (fork.position, fork.verdict) == (7, "defect")
    assert fork.difference is not None
    assert fork.shape_difference is not None
    assert fork.difference < 0.5
    assert fork.shape_difference < 0.5


def test_matrix_of_one_trunk_and_two_heads(shared: Path, tiny_model: Path, tmp_path: Path) -> None:
    cells = matrix_files(tiny_model, [shared / "oracle" / "stock-Q4_K_M.gguf"], PROTOCOL, tmp_path / "run", None, Silent())
    assert [(c.tier, c.head_type, c.problems) for c in cells] == [("stock-Q4_K_M", "Q8_0", ()), ("stock-Q4_K_M", "Q4_K", ())]
    assert cells[0].head_block_bytes > cells[1].head_block_bytes > 0
    run = RunFolder(path=tmp_path / "run")
    head = describe_model(read_header(run.parts / "mtp-head" / "mtp-base-Q4_K.gguf"))
    assert (head.is_head_only, head.problems) == (True, ())
    assert {t.type.name for t in head.header.tensors if len(t.shape) > 1} == {"Q4_K"}
    text = write_matrix(run, cells)
    assert len([line for line in text.splitlines() if line.startswith("| stock")]) == 2
    assert sorted(path.name for path in run.report.iterdir()) == [
        "speed.matrix.csv", "speed.matrix.json", "speed.matrix.md", "speed.matrix.png", "speed.matrix.svg"]
