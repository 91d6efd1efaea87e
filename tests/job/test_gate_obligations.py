"""Heads that were lost, not checked, dead, or measured with and without an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quantkit.job.gate_obligations import TierEvidence, compare_tier, first_ranks
from quantkit.measure.obligations import Obligation
from quantkit.spec.mtp_records import MtpResult, TeacherForced
from quantkit.spec.protocol import Protocol, load_protocol
from tests.job.bundles import base_rows_of

_EMPTY: dict[str, Any] = {
    "status": "measured", "reason": None, "check_id": "c", "mtp_id": "m", "tier": "A", "file": "f", "sha256": "s", "head": None,
    "rollback": None, "n_draft": 4, "n_drafted": 100, "n_accepted": 70, "acceptance_rate": 0.7, "acceptance_rate_se": None,
    "mean_accepted_len": None, "acceptance_by_position": (), "by_n_draft": (), "without_prompt": None,
    "teacher_forced_acceptance": None, "reference": None, "head_errors": (), "lossless": {}, "first_fork": None, "forks": (),
    "voided_prompts": (), "prompts": (), "problems": (), "speed": "", "arithmetic": None,
}


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1")


def head(**changes: Any) -> MtpResult:
    return MtpResult(**{**_EMPTY, **changes})


def forced(value: float, se: float | None = 0.005) -> MtpResult:
    teacher = TeacherForced(value=value, se=se, lo=None, hi=None, se_iid=None, se_chunk=None, n=4000, n_chunk=79, n_article=16,
                            chance=0.1, reason=None)
    return head(teacher_forced_acceptance=teacher)


def compare(incumbent: MtpResult | None, candidate: MtpResult | None, protocol: Protocol) -> Obligation:
    a = TierEvidence(size_bytes=1000, rows={"": base_rows_of()}, mtp=incumbent, smoke=None)
    b = dataclasses.replace(a, mtp=candidate and dataclasses.replace(candidate, check_id="another"))
    return compare_tier(a, b, protocol, "")[-1]


@pytest.mark.parametrize(("incumbent", "candidate", "verdict"), [
    (None, forced(0.7), "not compared"),
    (head(status="not applicable", reason="no MTP head"), forced(0.7), "not compared"),
    (forced(0.7), None, "worse"),
    (forced(0.7), head(status="not applicable", reason="no MTP head"), "worse"),
    (forced(0.7), forced(0.7), "not worse"),
    (forced(0.7, 0.02), forced(0.7, 0.02), "not shown"),  # two measurements with such errors could hide a loss
    (forced(0.7), forced(0.75), "better"),
    (forced(0.7), forced(0.69), "not shown"),  # within 0.02, but 0.01 away from it is 1.4 errors
    (forced(0.7), forced(0.6), "worse"),
    (forced(0.7, None), forced(0.69, None), "not worse"),
    (forced(0.7, None), forced(0.6, None), "worse"),
    (head(), head(acceptance_rate=0.5), "worse"),
    (forced(0.7), dataclasses.replace(forced(0.75), problems=("the head is dead",)), "worse"),
])
def test_heads(incumbent: MtpResult | None, candidate: MtpResult | None, verdict: str, protocol: Protocol) -> None:
    assert compare(incumbent, candidate, protocol).verdict == verdict


def test_the_same_check_has_no_error_between_the_two(protocol: Protocol) -> None:
    evidence = TierEvidence(size_bytes=1000, rows={"": base_rows_of()}, mtp=forced(0.7, 0.02), smoke=None)
    assert compare_tier(evidence, evidence, protocol, "")[-1].verdict == "not worse"


def test_a_lost_head_says_why(protocol: Protocol) -> None:
    assert compare(forced(0.7), head(status="not applicable", reason="no MTP head"), protocol).reason == "no MTP head"
    assert compare(forced(0.7), None, protocol).reason == "the candidate's head was not checked"


def test_ranks_of_a_head_count_margins_to_full_acceptance(protocol: Protocol) -> None:
    evidence = TierEvidence(size_bytes=1000, rows={"": base_rows_of()}, mtp=forced(0.7), smoke=None)
    assert first_ranks(evidence, protocol)["acceptance_rate"] == 15


@pytest.mark.parametrize(("candidate", "verdict"), [
    (10_000, "not worse"), (10_001, "worse"), (9_991, "not worse"), (9_989, "better"), (5_000, "better"),
])
def test_sizes_have_the_incumbents_budget(protocol: Protocol, candidate: int, verdict: str) -> None:
    a = TierEvidence(size_bytes=10_000, rows={"": base_rows_of()}, mtp=None, smoke=None)
    found = {o.name: o.verdict for o in compare_tier(a, dataclasses.replace(a, size_bytes=candidate), protocol, "")}
    assert found["size_bytes"] == verdict
