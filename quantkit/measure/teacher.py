"""Teacher-forced acceptance: a head's first guess against the trunk's choice, given the true text before.

    value  = mean over positions of [head's choice = trunk's choice]        0 to 1, better is higher
    chance = share of the trunk's most frequent choice                      what a head that says one thing always can reach

Thousands of positions, no loops, an error by article as of every other mean (`measure.summary`), and comparable between heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.core.stats import group_by
from quantkit.measure.numbers import Statistic
from quantkit.measure.summary import estimate
from quantkit.spec.mtp_records import TeacherForced

Choices = npt.NDArray[np.int32]

_MEAN = Statistic(lambda agree: agree, lambda mean: mean, lambda mean: 1.0, log=False)


def teacher_forced(trunk: Choices, head: Choices, chunks: npt.NDArray[np.integer],
                   articles: npt.NDArray[np.integer]) -> TeacherForced:
    """The share of equal choices with its error.

    Args:
        trunk, head: (n,) int32, choices at the same positions.
        chunks, articles: (n,) the chunk and the article of each position.
    """
    by_chunk, by_article = group_by(chunks), group_by(articles)
    found = estimate((trunk == head).astype(np.float64), _MEAN, by_chunk, by_article)
    return TeacherForced.of(found, n=len(trunk), n_chunk=by_chunk.n_group, n_article=by_article.n_group, chance=chance_level(trunk))


def chance_level(trunk: Choices) -> float:
    """Share of the trunk's most frequent choice, 0 to 1."""
    _, counts = np.unique(trunk, return_counts=True)
    return float(counts.max() / len(trunk))


def dead_reason(found: TeacherForced, reference: TeacherForced | None, dead_ratio: float) -> str | None:
    """Why a head counts as dead; None where it lives.

    Args:
        found: the head's.
        reference: the unquantized head's on the same trunk, if there is one.
        dead_ratio: the least share of the reference's acceptance that a live head keeps.
    """
    if found.value <= found.chance:
        return (f"dead head: its first choice is the trunk's in {found.value:.2%} of {found.n} positions, and always guessing one "
                f"token would be right in {found.chance:.2%}")
    if reference is not None and found.value < dead_ratio * reference.value:
        return (f"dead head: its first choice is the trunk's in {found.value:.2%} of {found.n} positions, the unquantized head's "
                f"in {reference.value:.2%}; less than {dead_ratio:g} of that counts as dead")
    return None
