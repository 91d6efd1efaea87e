"""What workers send of trials, packs and texts is looked at before it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError
from quantkit.engine.draft import Generation
from quantkit.job.answers import check_encoded, check_generation, check_packed, check_trial
from quantkit.measure.acceptance import VerifyStep
from quantkit.measure.numbers import Rows
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.refpack_records import PACK_ROW_DTYPE


def rows_of(*chunks: int, n_scored: int = 3) -> Rows:
    rows = np.zeros(len(chunks) * n_scored, ROW_DTYPE)
    rows["chunk"] = np.repeat(chunks, n_scored)
    return rows


def generation(tokens: tuple[int, ...], steps: tuple[VerifyStep, ...]) -> Generation:
    return Generation(tokens=tokens, steps=steps, t_prompt_s=0.1, t_decode_s=0.1)


def broken(rows: Rows) -> Rows:
    rows["kld"][1] = np.nan
    return rows


def test_what_was_asked_for_passes() -> None:
    check_trial("search", rows_of(4, 9), (4, 9))
    check_packed("audit Q8_0", rows_of(4), np.full(3, np.nan), [4, 5])
    check_encoded("reference pack", 4, np.zeros(3, PACK_ROW_DTYPE), [4, 5], 3)
    check_generation("mtp", generation((1, 2, 3, 4), (VerifyStep(3, 2), VerifyStep(2, 0))), 4, 3)
    check_generation("mtp", generation((1, 2), (VerifyStep(3, 3),)), 4, 3)  # the text ended inside the draft


@pytest.mark.parametrize(("rows", "chunks"), [
    (rows_of(4, 9)[:-1], (4, 9)), (rows_of(4), (4, 9)), (rows_of(9, 4), (4, 9)), (rows_of(), (4, 9)),
    (np.zeros(6, PACK_ROW_DTYPE), (4, 9)), (broken(rows_of(4, 9)), (4, 9)),
])
def test_a_trial_cut_short_mixed_up_or_not_finite_is_refused(rows: Rows, chunks: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=r"search: expected .* run again, and if it comes back, report it"):
        check_trial("search", rows, chunks)


@pytest.mark.parametrize(("rows", "tails"), [
    (rows_of(6), np.zeros(3)), (rows_of(4), np.zeros(2)), (rows_of(4), np.zeros(3, np.float32)), (rows_of(4, 5), np.zeros(6)),
    (rows_of(), np.zeros(0)), (np.zeros(3, PACK_ROW_DTYPE), np.zeros(3)),
])
def test_rows_against_a_pack_are_of_one_chunk_that_was_asked_for(rows: Rows, tails: Any) -> None:
    with pytest.raises(EngineError, match=r"audit Q8_0: expected .* run again"):
        check_packed("audit Q8_0", rows, tails, [4, 5])


@pytest.mark.parametrize(("chunk", "numbers"), [
    (6, np.zeros(3, PACK_ROW_DTYPE)), (4, np.zeros(2, PACK_ROW_DTYPE)), (4, np.zeros((1, 3), PACK_ROW_DTYPE)), (4, rows_of(4)),
])
def test_an_encoded_chunk_has_a_row_for_every_scored_token(chunk: int, numbers: Rows) -> None:
    with pytest.raises(EngineError, match="reference pack: expected 3 rows of a chunk that was asked for"):
        check_encoded("reference pack", chunk, numbers, [4, 5], 3)


@pytest.mark.parametrize(("tokens", "steps"), [
    ((1, 2, 3, 4, 5), (VerifyStep(3, 3), VerifyStep(0, 0))),  # longer than asked
    ((1, 2, 3), (VerifyStep(3, 1),)), ((1, 2), ()),  # tokens that no step gave
    ((1, 2), (VerifyStep(1, 2),)), ((1, 2), (VerifyStep(4, 2),)), ((1, 2), (VerifyStep(3, -1), VerifyStep(3, 3))),
])
def test_a_text_that_its_steps_do_not_explain_is_refused(tokens: tuple[int, ...], steps: tuple[VerifyStep, ...]) -> None:
    with pytest.raises(EngineError, match="mtp: expected at most 4 tokens that the verify steps explain"):
        check_generation("mtp", generation(tokens, steps), 4, 3)
