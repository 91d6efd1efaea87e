"""Result records beyond a tier's summary: verdicts between tiers, noise floors, slices. Tables, plots and cards read these.

    audit/pairs.json              Verdicts    which tiers are told apart, and which from their own noise
    audit/<tier>/slices.json      Slices      where a tier differs from base
    audit/<tier>/floor.json       Floor       the same file against itself in other arithmetic
    audit/base/floor.json         Floor       base's own
    audit/<tier>/weights.json     WeightsKld  what the tier's weights alone do

A second and later text has its own, see `job.rundir`. Units as in `records`; undefined is None with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.spec.records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """What paired rows say about two tiers; see measure/verdict.

    Attributes:
        a, b: the tiers. statistic: kld, ln_ppl_ratio or same_top_p.
        difference: θ: ln(KLD_a / KLD_b) for kld, a − b otherwise. se: its jackknife error over articles.
        lo, hi: 95 % interval of this pair alone. lo_simultaneous, hi_simultaneous: over all pairs at once (Bonferroni).
        p, p_holm: of no difference, alone and in the family. p_equivalent, p_equivalent_holm: of a difference beyond the margin.
        detectable: the |θ| that this text shows in four of five cases, in the family.
        n_article_needed: articles like these that would make the margin detectable.
        verdict: "better" or "worse" (a than b), either with ", by less than the margin"; "equivalent"; "not resolved".
        arithmetic: the KLDs differ by less than either file differs from itself in other arithmetic; None where no noise floor
            was measured, or another statistic is compared.
        reason: why the numbers are None.
    """

    a: str
    b: str
    statistic: str
    difference: float | None = None
    se: float | None = None
    lo: float | None = None
    hi: float | None = None
    lo_simultaneous: float | None = None
    hi_simultaneous: float | None = None
    p: float | None = None
    p_holm: float | None = None
    p_equivalent: float | None = None
    p_equivalent_holm: float | None = None
    detectable: float | None = None
    n_article_needed: int | None = None
    verdict: str
    arithmetic: bool | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorVerdict:
    """A tier's KLD beside its own noise floor, on the floor's chunks; see measure/noise.

    Attributes:
        kernel: the perturbation that moves this file the most; its KLD is the floor.
        kld, floor: means over those chunks, nats. ratio: kld / floor; lo, hi: its 95 % interval, of this tier alone.
        p, p_holm: of a ratio at or above the protocol's factor, alone and over all tiers.
        indistinguishable: p_holm is below alpha: base and tier differ by no more than the factor times what arithmetic does.
        reason: why the numbers are None.
    """

    tier: str
    kernel: str | None = None
    kld: float | None = None
    floor: float | None = None
    ratio: float | None = None
    lo: float | None = None
    hi: float | None = None
    p: float | None = None
    p_holm: float | None = None
    indistinguishable: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All pairs of the table by one statistic, in the order of the table.

    Attributes:
        margin: below which a difference does not matter, on the scale of θ.
        letters: of each tier; two tiers share one where no verdict says better or worse.
    """

    statistic: str
    margin: float
    pairs: tuple[PairVerdict, ...]
    letters: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What the paired rows of a table say. The family is all pairs of its tiers: another tier makes it another table.

    Attributes:
        tiers: by size, largest first; the order of pairs.
        rows_sha256: of each tier's rows, what this was computed from.
        n_looks: how often the errors were spent: 1, or the looks of a screening that may stop early.
        floor_factor: the protocol's, for `floors`, which is empty where no floors were measured.
    """

    tiers: tuple[str, ...]
    rows_sha256: Mapping[str, str]
    n_article: int
    g_eff: float
    alpha: float
    n_looks: int
    comparisons: tuple[Comparison, ...]
    floor_factor: float
    floors: tuple[FloorVerdict, ...]

    def comparison(self, statistic: str) -> Comparison:
        """The comparison by one statistic.

        Raises:
            KeyError: there is none.
        """
        for comparison in self.comparisons:
            if comparison.statistic == statistic:
                return comparison
        raise KeyError(f"no comparison by {statistic}: there are {', '.join(c.statistic for c in self.comparisons)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFloor:
    """A file against itself in one other arithmetic. `kld` and `same_top_p` as in a summary, `kld_max` the largest row."""

    rows_sha256: str
    kernel: str
    flash_attn: str
    use_extra_bufts: bool
    n_ubatch: int
    kld: Estimate
    kld_max: float
    same_top_p: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A file's noise floor: what changes when its weights stay and its arithmetic moves.

    Attributes:
        floor_id: hash of everything that it depends on.
        chunks: numbers of the chunks that it was measured on, a spread part of the evaluation's.
        kernels: one for each perturbation of the protocol that is not the evaluation's own arithmetic.
    """

    floor_id: str
    name: str
    sha256: str
    chunks: tuple[int, ...]
    n_scored: int
    n_article: int
    kernels: tuple[KernelFloor, ...]

    def largest(self) -> KernelFloor | None:
        """The perturbation that moves the file the most; None where the protocol has none."""
        return max(self.kernels, key=lambda kernel: kernel.kld.value or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsKld:
    """The weights' share of a tier's KLD: base and tier both written as F32 and run in the same F32 arithmetic.

    Attributes:
        weights_id: hash of everything that it depends on.
        rows_sha256: of its rows. kld, same_top_p: as in a summary, on the evaluation's chunks.
    """

    weights_id: str
    rows_sha256: str
    tier: str
    sha256: str
    n_scored: int
    n_article: int
    kld: Estimate
    same_top_p: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of the scored tokens, and what a tier does there.

    Attributes:
        kind: entropy, margin, position or token. name: of the part, for people.
        lo, hi: lo <= x < hi, in nats (entropy, margin) or positions; None where there is no end, and for tokens.
        share: of the scored tokens. kld_share: of the sum of KLD. flip_share: of all flips; each 0 to 1, None of nothing.
        kld, same_top_p: as in a summary, over these tokens; None without tokens.
    """

    kind: str
    name: str
    lo: float | None
    hi: float | None
    n_scored: int
    n_article: int
    share: float
    kld_share: float | None
    flip_share: float | None
    kld: Estimate | None
    same_top_p: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Where a tier differs from base: the scored tokens cut in four ways, each token once in each way."""

    tier: str
    rows_sha256: str
    slices: tuple[Slice, ...]
