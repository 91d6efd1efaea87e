"""What heads are worth, as tables: acceptance (in the bundle) and speed (apart, since it names this machine).

    report/mtp.md                 one row a tier, from RUN/mtp/<tier>.json
    report/speed.json             every tier's times, from parts/speed/<tier>.json: what a report knows of speed
    report/speed.md               one row a tier and draft length, and what it means in words
Nothing is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quantkit.core.files import pretty_json, write_atomic
from quantkit.core.units import format_bytes
from quantkit.job.manifest import refresh_files
from quantkit.job.rundir import RunFolder, read_json
from quantkit.report.escape import md_text, with_error
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.mtp_records import ForkRecord, MtpResult
from quantkit.spec.speed_records import DraftSpeed, Ratio, SpeedResult

_Record = TypeVar("_Record", MtpResult, SpeedResult)

_MAX_BYTES = 64 << 20
_ACCEPTANCE = ("tier", "head", "head bytes", "n_draft", "drafted", "accepted", "acceptance", "tokens a step", "teacher-forced",
               "unquantized head", "without prompt", "lossless", "voided", "check")
_SPEED = ("tier", "n_draft", "prompt tok/s", "decode tok/s", "speedup", "95 %", "with prompt", "step costs", "step yields",
          "breaks even at", "peak memory")


def read_results(run: RunFolder) -> list[MtpResult]:
    """The checks of a run, by tier; a record of another version is left out."""
    return _read_all(run.path / "mtp", MtpResult)


def read_speeds(run: RunFolder) -> list[SpeedResult]:
    """The times that report/speed.json holds, by tier; of a bundle that came without any, none. The file may be a stranger's."""
    path = run.report / "speed.json"
    try:
        value = json.loads(path.read_bytes()) if path.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return []
    return _records(value if isinstance(value, list) else [], SpeedResult)


def keep_speeds(run: RunFolder) -> None:
    """Write report/speed.json from what was timed here; of a run that was timed elsewhere it stays as it is."""
    if speeds := _read_all(run.parts / "speed", SpeedResult):
        write_atomic(run.report / "speed.json", pretty_json([record_to_json(record) for record in speeds]))


def write_mtp_report(run: RunFolder) -> tuple[str, str]:
    """Write report/mtp.md, report/speed.md and report/speed.json, and list them; returns the texts of the first two."""
    keep_speeds(run)
    acceptance, speed = acceptance_md(read_results(run)), speed_md(read_speeds(run))
    write_atomic(run.report / "mtp.md", acceptance.encode())
    write_atomic(run.report / "speed.md", speed.encode())
    if run.manifest.exists():
        refresh_files(run)
    return acceptance, speed


def acceptance_md(results: Sequence[MtpResult]) -> str:
    """The acceptance table, with what failed and what was voided below it."""
    rows = [_acceptance_row(result) for result in results]
    notes = [f"- {md_text(result.tier)}: {md_text(note)}" for result in results for note in _notes(result)]
    return "# MTP heads\n\n" + md_table(_ACCEPTANCE, rows) + ("\n" + "\n".join(notes) + "\n" if notes else "")


def speed_md(speeds: Sequence[SpeedResult]) -> str:
    """The speed table, the machine, and each tier's verdict in words."""
    rows = [row for speed in speeds for row in _speed_rows(speed)]
    lines = [f"- {md_text(speed.tier)}: {words}" for speed in speeds for words in describe_speed(speed)]
    machines = sorted({f"{machine_words(speed)}; {_runs(speed)}" for speed in speeds})
    return ("# Speed on this machine\n\n" + "\n".join(md_text(machine) for machine in machines) + "\n\n" + md_table(_SPEED, rows)
            + ("\n" + "\n".join(lines) + "\n" if lines else ""))


def describe_speed(speed: SpeedResult) -> list[str]:
    """What a tier's times mean, in sentences."""
    if not speed.drafts:
        return []
    noise = speed.plain.noise
    out = []
    timed = [d for d in speed.drafts if d.speedup.value is not None]
    if not timed:
        return ["no prompt was left to time: all of them were voided"]
    best = next((d for d in timed if d.n_draft == speed.best_n_draft), None)
    if best is not None:
        sure = best.speedup.lo is not None and best.speedup.lo > 1
        out.append(f"drafting {best.n_draft} is best: {_percent(best)} faster than the trunk alone"
                   + ("" if sure else ", not resolved from no gain"))
    else:
        least = max(timed, key=lambda d: d.speedup.value or 0.0)
        out.append(f"on this machine the head costs {_percent(least)} at its best draft length, {least.n_draft}: leave it off")
    for d in timed:
        if d.step_cost is not None and d.mean_accepted_len is not None and d.break_even_acceptance is not None:
            even = (f"it breaks even at an acceptance of {d.break_even_acceptance:.0%}" if d.break_even_acceptance <= 1
                    else "no acceptance pays for it")
            out.append(f"n_draft {d.n_draft}: a verify step takes as long as {d.step_cost:.2f} plain tokens and yields "
                       f"{d.mean_accepted_len:.2f}; {even} (here {d.acceptance_rate or 0:.0%})")
    if noise.lo is not None and noise.hi is not None:
        out.append(f"the trunk alone against itself: {noise.value:.3f} ({noise.lo:.3f} to {noise.hi:.3f}); a ratio so near 1 is "
                   "noise")
    return out


def md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table of cells that are markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _read_all(folder: Path, kind: type[_Record]) -> list[_Record]:
    return _records((read_json(path) for path in sorted(folder.glob("*.json"))), kind)


def _records(values: Iterable[Any], kind: type[_Record]) -> list[_Record]:
    """Values as records; those of another version are left out."""
    out = []
    for value in values:
        try:
            out.append(record_from_json(kind, value))
        except (KeyError, OverflowError, TypeError):
            continue
    return out


def _acceptance_row(result: MtpResult) -> list[str]:
    head, teacher, reference, bare = result.head, result.teacher_forced_acceptance, result.reference, result.without_prompt
    if result.status == "not applicable":
        return [md_text(result.tier), f"not applicable: {md_text(result.reason or '')}", *[""] * (len(_ACCEPTANCE) - 3),
                "failed" if result.problems else ""]
    assert head is not None
    assert teacher is not None
    return [
        md_text(result.tier), md_text(head.type), format_bytes(head.block_bytes), str(result.n_draft), str(result.n_drafted),
        str(result.n_accepted),
        "" if result.acceptance_rate is None else with_error(result.acceptance_rate, result.acceptance_rate_se),
        "" if result.mean_accepted_len is None else f"{result.mean_accepted_len:.2f}",
        f"{with_error(teacher.value, teacher.se)} (n {teacher.n})",
        "" if reference is None else f"{reference.teacher_forced_acceptance.value:.4f} (n {reference.teacher_forced_acceptance.n})",
        "" if bare is None or bare.acceptance_rate is None else f"{bare.acceptance_rate:.4f}",
        ", ".join(f"{mode}: {verdict}" for mode, verdict in result.lossless.items()),
        f"{len(result.voided_prompts)} of {len(result.prompts)}", "failed" if result.problems else "passed"]


def _notes(result: MtpResult) -> Iterator[str]:
    yield from result.problems
    if result.reason is not None and result.status == "measured":
        yield result.reason
    if result.first_fork is not None:
        yield _fork_words(result.first_fork)


def _fork_words(fork: ForkRecord) -> str:
    where = (f"{fork.mode} text with drafts of {fork.n_draft} first parts from the trunk's at token {fork.position} after prompt "
             f"{fork.prompt}: {fork.verdict}")
    if fork.margin is None or fork.difference is None:
        return where
    return (f"{where}; the trunk's two best choices are {fork.margin:.4f} nats apart there, the rows differ by "
            f"{fork.difference:.4f}, batch shapes alone make {fork.shape_difference:.4f}")


def _speed_rows(speed: SpeedResult) -> Iterator[list[str]]:
    plain = speed.plain
    yield [md_text(speed.tier), "none", _rate(plain.prompt_tokens_per_s), _rate(plain.decode_tokens_per_s), "", "", "", "", "", "",
           format_bytes(plain.peak_memory_bytes)]
    for d in speed.drafts:
        yield [md_text(speed.tier), str(d.n_draft), _rate(d.prompt_tokens_per_s), _rate(d.decode_tokens_per_s), _ratio(d.speedup),
               _interval(d.speedup), _ratio(d.wall_speedup), "" if d.step_cost is None else f"{d.step_cost:.2f}",
               "" if d.mean_accepted_len is None else f"{d.mean_accepted_len:.2f}",
               "" if d.break_even_acceptance is None else f"{d.break_even_acceptance:.0%}",
               "" if speed.draft_peak_memory_bytes is None else format_bytes(speed.draft_peak_memory_bytes)]


def machine_words(speed: SpeedResult) -> str:
    """What a tier was timed on."""
    m = speed.machine
    return f"{m.processor}, {m.n_cores} cores, {m.n_threads} threads, {m.backend}, llama.cpp {m.llama_cpp_commit}"


def _runs(speed: SpeedResult) -> str:
    voided = f" ({speed.n_voided} voided)" if speed.n_voided else ""
    return (f"{speed.n_prompt + speed.n_voided} prompts{voided}, {speed.repeats} repeats, {speed.n_warmup} warm-up runs dropped; "
            f"{speed.sampling}")


def _percent(d: DraftSpeed) -> str:
    value = d.speedup.value or 1.0
    return f"{value - 1:.0%}" if value > 1 else f"{1 / value - 1:.0%} more time"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _ratio(ratio: Ratio) -> str:
    return "" if ratio.value is None else f"{ratio.value:.3f}"


def _interval(ratio: Ratio) -> str:
    return "" if ratio.lo is None or ratio.hi is None else f"{ratio.lo:.3f} to {ratio.hi:.3f}"
