"""What a draft head's guesses are worth, from the verify steps of a decode. Counts in, shares out.

A **verify step** is one decode of the trunk over the last token and a draft of d tokens; it accepts the first a of them (each
equals what the trunk itself chose) and adds one token of its own. Position i counts the draft's tokens from 1.

    n_drafted            Σ d                                 draft tokens that the trunk was asked about
    n_accepted           Σ a
    acceptance_rate      n_accepted / n_drafted              0 to 1, better is higher; llama-speculative-simple's `accept`
    mean_accepted_len    Σ (a + 1) / n_step                  tokens a verify step, the trunk's own included; 1 to n_draft + 1
    by position i        n_offered: steps with d >= i        n_reached: of those, steps with a >= i − 1
                         n_accepted: steps with a >= i
        conditional      n_accepted / n_reached              given that all before it were accepted
        per_step         n_accepted / n_offered              of all steps that drafted so far

The last steps of a text draft less than n_draft, since no more tokens are wanted; steps that drafted nothing count as steps.
An undefined share is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantkit.core.stats import jackknife_se
from quantkit.spec.mtp_records import Acceptance, PositionAcceptance


class VerifyStep(NamedTuple):
    """One decode of the trunk: how long the draft was, and how much of it was right."""

    n_drafted: int
    n_accepted: int


def count_acceptance(texts: Sequence[Sequence[VerifyStep]], n_draft: int) -> Acceptance:
    """All shares of some texts, each given by its verify steps.

    Args:
        texts: one sequence of steps a text.
        n_draft: the draft length that was asked for: positions 1 … n_draft are told.
    """
    steps = np.array([step for text in texts for step in text], np.int64).reshape(-1, 2)
    drafted, accepted = steps[:, 0], steps[:, 1]
    n_step, n_drafted, n_accepted = len(steps), int(drafted.sum()), int(accepted.sum())
    return Acceptance(
        n_draft=n_draft, n_text=len(texts), n_step=n_step, n_drafted=n_drafted, n_accepted=n_accepted,
        acceptance_rate=share(n_accepted, n_drafted), acceptance_rate_se=_rate_se(texts),
        mean_accepted_len=share(n_accepted + n_step, n_step),
        acceptance_by_position=tuple(_at_position(i, drafted, accepted) for i in range(1, n_draft + 1)))


def share(part: int, whole: int) -> float | None:
    """part / whole, None where the whole is 0."""
    return part / whole if whole else None


def _at_position(i: int, drafted: np.ndarray[tuple[int], np.dtype[np.int64]],
                 accepted: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PositionAcceptance:
    n_offered, n_accepted = int((drafted >= i).sum()), int((accepted >= i).sum())
    n_reached = int(((drafted >= i) & (accepted >= i - 1)).sum())
    return PositionAcceptance(position=i, n_offered=n_offered, n_reached=n_reached, n_accepted=n_accepted,
                              conditional=share(n_accepted, n_reached), per_step=share(n_accepted, n_offered))


def _rate_se(texts: Sequence[Sequence[VerifyStep]]) -> float | None:
    """Jackknife over texts of Σ accepted / Σ drafted."""
    drafted = np.array([sum(step.n_drafted for step in text) for text in texts], np.float64)
    accepted = np.array([sum(step.n_accepted for step in text) for text in texts], np.float64)
    rest = drafted.sum() - drafted
    if len(texts) < 2 or (rest <= 0).any():
        return None
    return jackknife_se((accepted.sum() - accepted) / rest)
