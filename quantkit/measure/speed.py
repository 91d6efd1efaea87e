"""Paired speed: the same prompts with and without a draft head. Times in, ratios out.

Each prompt is decoded both ways several times. x_p = the mean over repeats of ln(seconds a token without / seconds a token with)
of prompt p; the speedup is exp(mean x_p), its interval Student's t over prompts. The machine's drift hits both ways alike when the
order alternates; what is left shows in the plain way against itself, which should hold 1.

A verify step costs c plain tokens and yields m (mean_accepted_len): the head pays where m > c. With drafts of n_draft tokens,
m = 1 + n_draft · acceptance_rate, so it breaks even at acceptance_rate = (c − 1) / n_draft.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantkit.core.stats import student_quantile
from quantkit.spec.speed_records import Ratio

Times = npt.NDArray[np.float64]

LEVEL = 0.95


def paired_ratio(slow: Times, fast: Times) -> Ratio:
    """How many times faster `fast` is: above 1 where it is faster.

    Args:
        slow, fast: (n_prompt, n_repeat) float64, seconds a token, above 0; the same prompts in the same order.
    """
    if not len(slow):
        return Ratio(value=None, reason="no prompt left to time")
    x = np.log(slow / fast).mean(axis=1)
    value = float(np.exp(x.mean()))
    if len(x) < 2:
        return Ratio(value=value, n_prompt=len(x), reason="one prompt has no interval")
    reach = student_quantile((1 + LEVEL) / 2, len(x) - 1) * float(np.std(x, ddof=1)) / np.sqrt(len(x))
    return Ratio(value=value, lo=float(np.exp(x.mean() - reach)), hi=float(np.exp(x.mean() + reach)), n_prompt=len(x))


def against_itself(times: Times) -> Ratio:
    """The noise floor of `paired_ratio`: the even repeats of one way against its odd ones; 1 where there is no noise.

    Args:
        times: (n_prompt, n_repeat) float64; of an odd number of repeats the last is left out.
    """
    n = times.shape[1] // 2 * 2 if len(times) else 0
    if not n:
        return Ratio(value=None, reason="fewer than two repeats")
    return paired_ratio(times[:, 0:n:2], times[:, 1:n:2])


def rate(n_tokens: npt.NDArray[np.int64], times: Times) -> float | None:
    """Tokens a second over everything: Σ tokens / Σ seconds. None where nothing was timed.

    Args:
        n_tokens: (n_prompt,) tokens of each run of a prompt.
        times: (n_prompt, n_repeat) float64, seconds of each run.
    """
    total = float(times.sum())
    return float((n_tokens * times.shape[1]).sum()) / total if total > 0 else None


def break_even_acceptance(step_cost: float, n_draft: int) -> float:
    """The acceptance_rate at which drafting n_draft tokens neither gains nor loses: (c − 1) / n_draft; above 1 it cannot pay.

    Args:
        step_cost: seconds of a verify step / seconds of a plain token.
        n_draft: tokens drafted a step.
    """
    return max(0.0, (step_cost - 1) / n_draft)
