"""What the tables say: every number from its record, words that follow from it, nothing where nothing was measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from quantkit.job.mtp_check import mtp_path
from quantkit.job.rundir import RunFolder, write_json
from quantkit.report.mtp_matrix import COLUMNS, matrix_csv, matrix_md, write_matrix
from quantkit.report.mtp_report import acceptance_md, describe_speed, read_results, speed_md, write_mtp_report
from quantkit.spec.json_records import record_to_json
from quantkit.spec.mtp_records import Acceptance, ForkRecord, HeadFacts, MtpResult, ReferenceHead, Rollback, TeacherForced
from quantkit.spec.refpack_records import PackArithmetic
from quantkit.spec.speed_records import DraftSpeed, Machine, MatrixCell, PlainSpeed, Ratio, SpeedResult

TEACHER = TeacherForced(value=0.6156, se=0.0081, lo=0.59, hi=0.64, se_iid=0.005, se_chunk=0.008, n=8176, n_chunk=16, n_article=9,
                        chance=0.11, reason=None)
ACCEPTANCE = Acceptance(n_draft=3, n_text=4, n_step=160, n_drafted=480, n_accepted=92, acceptance_rate=92 / 480,
                        acceptance_rate_se=0.0358, mean_accepted_len=1.575, acceptance_by_position=())
HEAD = HeadFacts(file="model-Q4_K_M.gguf", sha256="0" * 64, type="Q8_0", block_bytes=1 << 20, n_nextn=1)
RESULT = MtpResult(
    status="measured", reason=None, check_id="c", mtp_id="m", tier="Q4_K_M", file="model-Q4_K_M.gguf", sha256="0" * 64, head=HEAD,
    arithmetic=PackArithmetic(backend="CPU", llama_cpp_python="0", llama_cpp_commit="c", system_info="s", n_gpu_layers=0,
                              main_gpu=0, tensor_split=()),
    rollback=Rollback(mode="plain KV", n_rs_seq=0), n_draft=3, n_drafted=480, n_accepted=92, acceptance_rate=92 / 480,
    acceptance_rate_se=0.0358, mean_accepted_len=1.575, acceptance_by_position=(), by_n_draft=(ACCEPTANCE,),
    without_prompt=dataclasses.replace(ACCEPTANCE, acceptance_rate=0.15), teacher_forced_acceptance=TEACHER,
    reference=ReferenceHead(head=HEAD, teacher_forced_acceptance=dataclasses.replace(TEACHER, value=0.62), acceptance=ACCEPTANCE),
    head_errors=(), lossless={"greedy": "identical", "sampled": "near-tie"}, first_fork=None, forks=(), voided_prompts=(2,),
    prompts=(), problems=(), speed="report/speed.json")
BARE = dataclasses.replace(
    RESULT, tier="Q8_0", status="not applicable", reason="no MTP head", head=None, rollback=None, n_draft=None, n_drafted=None,
    n_accepted=None, acceptance_rate=None, acceptance_rate_se=None, mean_accepted_len=None, by_n_draft=(), without_prompt=None,
    teacher_forced_acceptance=None, reference=None, lossless={}, voided_prompts=())
PLAIN = PlainSpeed(prompt_tokens_per_s=900.0, decode_tokens_per_s=25.04, peak_memory_bytes=3 << 30,
                   noise=Ratio(value=1.002, lo=0.99, hi=1.014, n_prompt=4))
MACHINE = Machine(processor="Some CPU", n_cores=8, n_threads=4, backend="CPU", llama_cpp_commit="abc", system_info="AVX2 = 1")


def drafts(n_draft: int, speedup: float, lo: float, hi: float, *, cost: float = 1.5, even: float = 0.25) -> DraftSpeed:
    return DraftSpeed(n_draft=n_draft, prompt_tokens_per_s=800.0, decode_tokens_per_s=30.0,
                      speedup=Ratio(value=speedup, lo=lo, hi=hi, n_prompt=4), wall_speedup=Ratio(value=1.1, n_prompt=4),
                      step_cost=cost, mean_accepted_len=1.9, acceptance_rate=0.45, break_even_acceptance=even)


def speed(*found: DraftSpeed, best: int | None) -> SpeedResult:
    return SpeedResult(check_id="c", tier="Q4_K_M", file="model-Q4_K_M.gguf", machine=MACHINE, n_prompt=4, n_voided=0, repeats=3,
                       n_warmup=1, sampling="temperature 0.8", plain=PLAIN, drafts=found, draft_peak_memory_bytes=4 << 30,
                       best_n_draft=best)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def row_of(text: str, tier: str) -> list[str]:
    return cells_of(next(line for line in text.splitlines() if line.startswith(f"| {tier} ")))


def test_acceptance_row_holds_the_records_numbers() -> None:
    assert row_of(acceptance_md([RESULT]), "Q4_K_M") == [
        "Q4_K_M", "Q8_0", "1.00 MiB", "3", "480", "92", "0.192 ± 0.036", "1.57", "0.6156 ± 0.0081 (n 8176)", "0.6200 (n 8176)",
        "0.1500", "greedy: identical, sampled: near-tie", "1 of 0", "passed"]


def test_a_tier_without_a_head_says_so_and_has_no_number() -> None:
    row = row_of(acceptance_md([BARE]), "Q8_0")
    assert row[1] == "not applicable: no MTP head"
    assert set(row[2:]) == {""}


def test_failures_and_forks_stand_below_the_table() -> None:
    fork = ForkRecord(mode="greedy", n_draft=3, prompt=1, position=45, plain=5, drafted=6, margin=0.0016, difference=0.002,
                      shape_difference=0.0019, verdict="near-tie")
    text = acceptance_md([dataclasses.replace(RESULT, problems=("dead head: it is <dead>",), first_fork=fork)])
    assert "- Q4_K_M: dead head: it is &lt;dead&gt;" in text
    assert "greedy text with drafts of 3 first parts from the trunk's at token 45 after prompt 1: near-tie" in text
    assert row_of(text, "Q4_K_M")[-1] == "failed"


def test_speed_rows_hold_plain_and_drafted() -> None:
    text = speed_md([speed(drafts(1, 1.2, 1.1, 1.3), drafts(3, 1.1, 0.9, 1.35), best=1)])
    rows = [cells_of(line) for line in text.splitlines() if line.startswith("| Q4")]
    assert rows[0] == ["Q4_K_M", "none", "900.0", "25.0", *[""] * 6, "3.00 GiB"]
    assert rows[1] == ["Q4_K_M", "1", "800.0", "30.0", "1.200", "1.100 to 1.300", "1.100", "1.50", "1.90", "25%", "4.00 GiB"]
    assert "Some CPU, 8 cores, 4 threads, CPU, llama.cpp abc; 4 prompts, 3 repeats, 1 warm-up runs dropped" in text


@pytest.mark.parametrize(("found", "words"), [
    (speed(drafts(2, 1.2, 1.1, 1.3), best=2), "drafting 2 is best: 20% faster than the trunk alone"),
    (speed(drafts(2, 1.05, 0.9, 1.2), best=2), "5% faster than the trunk alone, not resolved from no gain"),
    (speed(drafts(1, 0.8, 0.7, 0.9), drafts(3, 0.5, 0.4, 0.6), best=0),
     "on this machine the head costs 25% more time at its best draft length, 1: leave it off"),
    (speed(drafts(2, 1.2, 1.1, 1.3), best=2),
     "n_draft 2: a verify step takes as long as 1.50 plain tokens and yields 1.90; it breaks even at an acceptance of 25% "
     "(here 45%)"),
    (speed(drafts(1, 0.5, 0.4, 0.6, cost=2.3, even=1.3), best=0), "no acceptance pays for it (here 45%)"),
    (speed(drafts(1, 0.5, 0.4, 0.6), best=0), "the trunk alone against itself: 1.002 (0.990 to 1.014)"),
    (dataclasses.replace(speed(best=None), drafts=(dataclasses.replace(
        drafts(1, 1, 1, 1), speedup=Ratio(value=None, reason="no prompt left to time")),)), "all of them were voided"),
])
def test_words_follow_from_the_numbers(found: SpeedResult, words: str) -> None:
    assert [line for line in describe_speed(found) if words in line]


def test_without_a_head_there_is_nothing_to_say() -> None:
    assert describe_speed(speed(best=None)) == []


def test_report_is_written_from_what_stands_and_skips_what_is_no_record(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path)
    write_json(mtp_path(run, "Q4_K_M"), record_to_json(RESULT))
    write_json(mtp_path(run, "old"), {"status": "measured"})
    write_json(run.record("speed", "Q4_K_M"), record_to_json(speed(drafts(1, 1.2, 1.1, 1.3), best=1)))
    acceptance, speed_text = write_mtp_report(run)
    assert read_results(run) == [RESULT]
    assert (run.report / "mtp.md").read_text() == acceptance
    assert (run.report / "speed.md").read_text() == speed_text
    assert json.loads((run.report / "speed.json").read_text())[0]["best_n_draft"] == 1


CELL = MatrixCell(tier="Q4_K_M", head_type="Q8_0", trunk_bytes=4 << 20, head_block_bytes=1 << 20, head_file_bytes=3 << 20,
                  n_draft=3, n_drafted=480, n_accepted=92, acceptance_rate=92 / 480, mean_accepted_len=1.575,
                  teacher_forced_acceptance=0.6156, teacher_forced_acceptance_se=0.0081,
                  teacher_forced_acceptance_lo=0.59, teacher_forced_acceptance_hi=0.64,
                  speedup_n_draft=1, speedup=Ratio(value=1.2, lo=1.1, hi=1.3, n_prompt=4), best_n_draft=1, problems=())
FAILED = dataclasses.replace(CELL, head_type="Q4_K", n_drafted=None, n_accepted=None, acceptance_rate=None, mean_accepted_len=None,
                             teacher_forced_acceptance=None, teacher_forced_acceptance_se=None, teacher_forced_acceptance_lo=None,
                             teacher_forced_acceptance_hi=None, speedup=Ratio(value=None, reason="it crashed"), best_n_draft=None,
                             problems=("it crashed",))


def test_matrix_rows_hold_acceptance_speed_and_bytes() -> None:
    rows = [cells_of(line) for line in matrix_md([CELL, FAILED]).splitlines() if line.startswith("| Q4")]
    assert rows[0] == ["Q4_K_M", "4.00 MiB", "Q8_0", "1.00 MiB", "3.00 MiB", "0.1917 (92 of 480, n_draft 3)", "0.6156 ± 0.0081",
                       "1.200 (1.100 to 1.300) at n_draft 1", "1", "passed"]
    assert rows[1][5:] == ["", "", "", "", "it crashed"]


def test_matrix_csv_is_full_precision_and_empty_where_undefined() -> None:
    header, first, second = matrix_csv([CELL, FAILED]).splitlines()
    assert header == ",".join(COLUMNS)
    assert first.split(",")[8] == repr(92 / 480)
    assert second.split(",")[8] == ""


@pytest.mark.slow
def test_matrix_pictures_are_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_matrix(RunFolder(path=tmp_path / name), [CELL, FAILED])
    for kind in ("png", "svg", "md", "csv", "json"):
        one, two = ((tmp_path / name / "report" / f"speed.matrix.{kind}").read_bytes() for name in ("a", "b"))
        assert one == two
