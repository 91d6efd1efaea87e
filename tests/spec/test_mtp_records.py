"""Records survive being written and read; what is not such a record is not taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.mtp_records import Acceptance, ForkRecord, PositionAcceptance, Rollback, TeacherForced
from quantkit.spec.records import Estimate
from quantkit.spec.speed_records import Ratio

POSITION = PositionAcceptance(position=1, n_offered=4, n_reached=4, n_accepted=3, conditional=0.75, per_step=0.75)
ACCEPTANCE = Acceptance(n_draft=1, n_text=2, n_step=4, n_drafted=4, n_accepted=3, acceptance_rate=0.75, acceptance_rate_se=None,
                        mean_accepted_len=1.75, acceptance_by_position=(POSITION,))
FORK = ForkRecord(mode="greedy", n_draft=3, prompt=0, position=7, plain=5, drafted=None, margin=0.1, difference=None,
                  shape_difference=None, verdict="defect")


@pytest.mark.parametrize("record", [ACCEPTANCE, FORK, Ratio(value=None, reason="why"), Rollback(mode="checkpoint", n_rs_seq=0)],
                         ids=lambda record: type(record).__name__)
def test_what_was_written_is_read(record: Any) -> None:
    assert record_from_json(type(record), json.loads(json.dumps(record_to_json(record)))) == record


@pytest.mark.parametrize("spoil", [
    lambda data: data.pop("n_step"), lambda data: data.update(extra=1), lambda data: data.update(acceptance_by_position=3),
    lambda data: data["acceptance_by_position"][0].pop("position"),
])
def test_another_record_is_not_taken_for_one(spoil: Any) -> None:
    data = record_to_json(ACCEPTANCE)
    spoil(data)
    with pytest.raises((KeyError, TypeError)):
        record_from_json(Acceptance, data)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_what_is_no_object_is_no_record(data: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        record_from_json(Acceptance, data)


def test_an_estimate_keeps_its_errors_and_its_reason() -> None:
    found = TeacherForced.of(Estimate(value=0.6, se_iid=0.01, se_chunk=0.02, reason="2 articles"), n=100, n_chunk=4, n_article=2,
                             chance=0.1)
    assert (found.value, found.se, found.se_iid, found.se_chunk, found.reason) == (0.6, None, 0.01, 0.02, "2 articles")
