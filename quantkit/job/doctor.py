"""`quantkit doctor`: everything that can go wrong later, found before any work; and the part of it that `quantkit run` does first.

Every check is done even when another one fails. A problem would stop a run; a warning would not. What the run itself finds out in
its first moments, or says anyway, it does not look for twice: see `CHECKS`.

    exit code    0 nothing blocks; 2 some input must be mended; 3 only this machine is in the way
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from quantkit.core.errors import EnvironmentFault, QuantkitError
from quantkit.job.doctor_base import look_at_header, look_at_loading, look_at_mtp, look_at_source, look_at_tokenizer
from quantkit.job.doctor_case import Case, Finding, Unknown, not_applicable, problem
from quantkit.job.doctor_host import look_at_build, look_at_libraries, look_at_library, look_at_places
from quantkit.job.doctor_plan import look_at_imatrix, look_at_plans, look_at_protocol, look_at_shapes
from quantkit.job.doctor_run import look_at_leftovers, look_at_run
from quantkit.job.doctor_texts import look_at_calibration, look_at_mtp_text, look_at_overlap, look_at_texts
from quantkit.job.doctor_work import look_at_disk, look_at_memory, look_at_time
from quantkit.spec.plan import Plan


class Check(NamedTuple):
    """One look at a case. `in_run`: a run looks too, and stops at problems, or notes warnings as well; "" where it need not."""

    name: str
    look: Callable[[Case], Iterable[Finding]]
    in_run: Literal["", "problems", "warnings"]


CHECKS = (
    Check("protocol", look_at_protocol, "problems"),
    Check("llama.cpp", look_at_library, ""),  # each worker of a run does
    Check("build", look_at_build, ""),
    Check("libraries", look_at_libraries, "problems"),
    Check("source", look_at_source, "warnings"),
    Check("header", look_at_header, "warnings"),
    Check("tokenizer", look_at_tokenizer, "warnings"),
    Check("MTP head", look_at_mtp, "warnings"),
    Check("loading", look_at_loading, ""),
    Check("plans", look_at_plans, "warnings"),
    Check("shapes", look_at_shapes, ""),  # a run notes them with its plans
    Check("importance matrix", look_at_imatrix, "problems"),
    Check("evaluation texts", look_at_texts, ""),  # a run reads all texts before it hashes the base
    Check("calibration text", look_at_calibration, ""),
    Check("overlap of texts", look_at_overlap, ""),
    Check("prompt text", look_at_mtp_text, ""),
    Check("disk", look_at_disk, "problems"),
    Check("memory", look_at_memory, ""),  # a run notes its layout
    Check("time", look_at_time, ""),
    Check("run directory", look_at_run, "problems"),
    Check("leftovers", look_at_leftovers, ""),  # a run removes them, or takes them up
    Check("places", look_at_places, "problems"),
)


def examine(case: Case, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Every check's findings, in order; what a check raises is its finding."""
    for check in checks:
        try:
            yield from check.look(case)
        except Unknown as missing:
            yield not_applicable(check.name, f"not looked at without {missing}")
        except QuantkitError as error:
            yield problem(check.name, error)
        except OSError as error:
            where = f" at {error.filename}" if error.filename else ""
            yield problem(check.name, EnvironmentFault(f"the system refused{where}: {error.strerror or error}"),
                          "give this user the right to read and write there")


def exit_code(findings: Iterable[Finding]) -> int:
    """0 where nothing blocks, 2 where an input must be mended, 3 where only the machine is in the way."""
    codes = {finding.error.exit_code for finding in findings if finding.error is not None}
    return min(codes, default=0)


def require_healthy(case: Case) -> tuple[Plan, ...]:
    """What a run looks at first; takes no more than a moment, whatever the base's size.

    Returns:
        The plans of the tiers.

    Raises:
        QuantkitError: the first problem; its message says how many others there are.
    """
    noted = {check.name for check in CHECKS if check.in_run == "warnings"}
    problems: list[QuantkitError] = []
    for check in CHECKS:
        if not check.in_run:
            continue
        for finding in examine(case, [check]):
            if finding.error is not None:
                problems.append(finding.error)
            elif finding.state == "warning" and check.name in noted:
                case.progress.note(f"{finding.check}: {finding.found}; {finding.fix}")
    if problems:
        first, *others = problems
        if others:
            first = type(first)(f"{first}\n({len(others)} more problem(s): `quantkit doctor` lists them all)")
        raise first
    return case.ladder.plans
