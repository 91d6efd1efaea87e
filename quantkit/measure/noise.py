"""Noise floors: what arithmetic alone does to a file, and which tiers differ from base by no more than that.

KLD belongs to a file and an arithmetic. The floor of a file is its KLD from itself in another arithmetic (other kernels, the
same numbers on paper); of several, the largest. For a tier A, over the same tokens,

    θ = ln(KLD(base ‖ A) / KLD(A ‖ A in the other arithmetic))

with the jackknife over articles. A is "indistinguishable from base here" where θ >= ln factor is rejected, Holm over all tiers:
the upper limit of the ratio is below the factor. That speaks of this arithmetic, not of the weights (see kld_weights).
KLD = 0 is never tested; it would always be rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quantkit.core.errors import InputError
from quantkit.core.stats import degrees_of_freedom, group_by, holm, jackknife_se, student_quantile, student_upper_tail
from quantkit.measure.numbers import STATISTICS, Rows, kld
from quantkit.measure.summary import LEVEL, estimate, sorted_rows, too_few
from quantkit.spec.verdict_records import FloorVerdict, KernelFloor, PairVerdict


class KernelSettings(NamedTuple):
    """One perturbed arithmetic: its name in the protocol and what is different in it."""

    name: str
    flash_attn: str
    use_extra_bufts: bool
    n_ubatch: int


def summarize_floor(rows: Rows, kernel: KernelSettings, rows_sha256: str) -> KernelFloor:
    """A file against itself under one kernel.

    Args:
        rows: of `ROW_DTYPE`, the file in the evaluation's arithmetic as base and itself in the other one as tier.
        rows_sha256: of the file that holds them.

    Raises:
        InputError: see `summary.summarize`.
    """
    rows = sorted_rows(rows)
    chunks, articles = group_by(rows["chunk"]), group_by(rows["article"])
    return KernelFloor(
        rows_sha256=rows_sha256, kernel=kernel.name,
        flash_attn=kernel.flash_attn, use_extra_bufts=kernel.use_extra_bufts, n_ubatch=kernel.n_ubatch,
        kld=estimate(rows, STATISTICS["kld"], chunks, articles), kld_max=float(kld(rows).max()),
        same_top_p=estimate(rows, STATISTICS["same_top_p"], chunks, articles),
    )  # fmt: skip


def compare_to_floors(tiers: Mapping[str, Rows], floors: Mapping[str, Mapping[str, Rows]], *, factor: float,
                      alpha: float = 0.05) -> tuple[FloorVerdict, ...]:
    """Each tier beside its own floor, in the order of the tiers.

    Args:
        tiers: rows of `ROW_DTYPE` by name. All tiers with a floor: they are the family.
        floors: for each tier, its rows against itself by kernel, on some of the same chunks.
        factor: how many times its floor a tier's KLD may be, at its upper limit.
        alpha: error of calling any of them indistinguishable.

    Raises:
        InputError: a floor whose tokens the tier's rows do not hold.
    """
    verdicts = [_beside(tier, sorted_rows(rows), floors[tier], factor) for tier, rows in tiers.items()]
    p_holm = holm([1.0 if v.p is None else v.p for v in verdicts])
    return tuple(replace(v, p_holm=p, indistinguishable=p < alpha) if v.p is not None else v
                 for v, p in zip(verdicts, p_holm, strict=True))


def _beside(tier: str, rows: Rows, kernels: Mapping[str, Rows], factor: float) -> FloorVerdict:
    if not kernels:
        return FloorVerdict(tier=tier, reason="the protocol perturbs nothing")
    name, largest = max(((name, sorted_rows(own)) for name, own in kernels.items()), key=lambda item: float(np.mean(kld(item[1]))))
    same = rows[np.isin(rows["chunk"], largest["chunk"])]
    if not all(len(same) == len(largest) and np.array_equal(same[column], largest[column]) for column in ("chunk", "pos", "token")):
        raise InputError(f"expected the floor of {tier} on tokens that its rows hold, found others: measure its floor again")
    own, noise = kld(same), kld(largest)
    known = FloorVerdict(tier=tier, kernel=name, kld=float(np.mean(own)), floor=float(np.mean(noise)))
    articles = group_by(same["article"])
    few = too_few(articles)
    if few is not None:
        return replace(known, reason=few)
    if not own.any():
        return replace(known, indistinguishable=True, reason="equal to base in every row")
    without_own, without_noise = articles.means_without(own), articles.means_without(noise)
    if min(without_own.min(), without_noise.min()) <= 0:
        return replace(known, reason="no other arithmetic moves it, or in one article only")
    theta = math.log(np.mean(own) / np.mean(noise))
    without = np.log(without_own) - np.log(without_noise)
    se, df = jackknife_se(without), degrees_of_freedom(articles, without)
    reach = student_quantile((1 + LEVEL) / 2, df) * se
    room = math.log(factor) - theta
    p = student_upper_tail(room / se, df) if se else float(room <= 0)
    return replace(known, ratio=math.exp(theta), lo=math.exp(theta - reach), hi=math.exp(theta + reach), p=p)


def mark_arithmetic(pair: PairVerdict, kld_a: float, kld_b: float, floor_a: float | None, floor_b: float | None) -> PairVerdict:
    """A pair with its mark: the KLDs differ by less than the larger of the two floors; None without both floors."""
    if floor_a is None or floor_b is None:
        return pair
    return replace(pair, arithmetic=abs(kld_a - kld_b) < max(floor_a, floor_b))
