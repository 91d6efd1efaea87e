"""Counting for `coverage.py`: how often the truth is inside the intervals of drawn texts, and how often verdicts are false.

Thousands of texts at once, so the formulas of `measure.summary` and `measure.verdict` stand here a second time, over arrays of
texts; `check` holds them to what those functions give for some of the texts, and nothing is counted if they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from coverage_draws import DESIGNS, LAST_LOOK, QUANTILE_DESIGNS, Cell, Cells, Drawn, Key, collect, parts_of
from redraw import KLD_LEVELS, MEANS, Source

from quantkit.core.stats import Floats, group_by, quantile_limits
from quantkit.measure.numbers import STATISTICS, Statistic
from quantkit.measure.summary import MIN_ARTICLES, estimate_mean
from quantkit.measure.verdict import PairStatistic, compare_means

PAIR_STATISTICS: tuple[PairStatistic, ...] = ("kld", "ln_ppl_ratio", "same_top_p")
MARGIN = float(np.log(1.05))

Bools = npt.NDArray[np.bool_]


class Contrast(NamedTuple):
    """θ, its error and degrees of freedom in D texts, and in which of them anything is printed."""

    theta: Floats
    se: Floats
    df: Floats
    printed: Bools

    def reach(self, level: float = 0.95) -> Floats:
        """Half the width of an interval."""
        from scipy.special import stdtrit

        return np.asarray(stdtrit(self.df, (1 + level) / 2) * self.se)

    def covers(self, truth: float, level: float = 0.95) -> Floats:
        """1 where an interval holds the truth, 0 where not, NaN where there is none."""
        return np.where(self.printed, np.abs(self.theta - truth) <= self.reach(level), np.nan)


def contrast(drawn: Drawn, theta: Floats, without: Floats) -> Contrast:
    """Error and degrees of freedom from θ without each article (D, G); as `core.stats` has them for one text."""
    n, is_there = drawn.sizes, drawn.sizes > 0
    n_article = is_there.sum(axis=1)
    without = np.where(is_there, without, 0.0)
    n_whole = np.square(n).sum(axis=1) ** 2 / (n**4).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # one article, or one that carries it all: not printed
        d = np.where(is_there, without - (without.sum(axis=1) / n_article)[:, None], 0.0)
        squares = np.square(d).sum(axis=1)
        excess = np.nan_to_num((d**4).sum(axis=1) / squares**2 - 1 / n_article)
        df = np.maximum(1.0, 0.75 * (np.minimum(n_whole, np.where(excess > 0, 2 / excess, np.inf)) - 1))
    se = np.sqrt((n_article - 1) / n_article * squares)
    return Contrast(theta, se, df, (n_whole >= MIN_ARTICLES - 1e-9) & np.isfinite(theta) & np.isfinite(se))


def means_of(drawn: Drawn, tier: str, name: str, *, log: bool) -> tuple[Floats, Floats]:
    """θ of a statistic's mean, (D,), and without each article, (D, G)."""
    n, sums = drawn.sizes, drawn.sums[tier, name]
    n_all, all_of_it = n.sum(axis=1, keepdims=True), sums.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole, without = (all_of_it / n_all)[:, 0], (all_of_it - sums) / (n_all - n)
        return (np.log(whole), np.log(without)) if log else (whole, without)


def pair_contrast(drawn: Drawn, a: str, b: str, name: PairStatistic) -> Contrast:
    """A against B; of the share of flips, since that of equal top tokens is the same with the other sign."""
    x, y = (means_of(drawn, tier, name, log=name == "kld") for tier in (a, b))
    return contrast(drawn, x[0] - y[0], x[1] - y[1])


def theta_of(statistic: Statistic, value: float) -> float:
    """The scale of the interval at a published value."""
    mean = {True: value**2, False: value}[statistic is STATISTICS["p_diff_rms"]]
    mean = 1 - value if statistic is STATISTICS["same_top_p"] else mean
    return float(np.log(mean)) if statistic.log else mean


def check(source: Source, seed: int, n_text: int = 5) -> None:
    """These formulas and those of the package must agree to rounding, for means, pairs and quantiles."""
    drawn, _ = collect(source, n_text, seed)
    rng = np.random.default_rng(seed)
    with_tokens = any(truth.quantiles for truth in source.truths.values())
    texts = [source.draw(rng, with_tokens) for _ in range(n_text)]
    a, b = list(source.truths)[:2]
    for i, text in enumerate(texts):
        for design in ("all", "spread 64"):
            part = parts_of(text, i, len(text.chunks))[design]
            articles, x = group_by(part.articles), {tier: text.tiers[tier].means["kld"][part.chunks] for tier in (a, b)}
            mine = contrast(drawn[design], *means_of(drawn[design], a, "kld", log=True))
            own = estimate_mean(x[a], STATISTICS["kld"], group_by(np.arange(len(part.chunks))), articles)
            _agree(own.hi, float(np.exp(mine.theta[i] + mine.reach()[i])), mine.printed[i])
            pair = pair_contrast(drawn[design], a, b, "kld")
            _agree(compare_means(x, "kld", articles, margin=MARGIN)[0].hi, float(pair.theta[i] + pair.reach()[i]), pair.printed[i])
    part = texts[0].take(np.arange(0, len(texts[0].chunks), 4))
    tokens = group_by(np.repeat(part.articles, part.n_scored))
    for ranked in part.tiers[a].tokens.values():
        for q, ends in zip(KLD_LEVELS, ranked.limits(part.chunks, group_by(part.articles), KLD_LEVELS), strict=True):
            slow = quantile_limits(ranked.tokens[part.chunks].reshape(-1), q, tokens, 0.95)
            for end, published in zip(ends, slow[:2], strict=True):
                _agree(published, end if end is not None else np.nan, end is not None)


def _agree(published: float | None, mine: float, printed: bool) -> None:
    if (published is not None) != printed or (published is not None and not np.isclose(published, mine, rtol=1e-7)):
        raise SystemExit(f"the benchmark's interval ends at {mine} ({printed}), the package's at {published}")


# Counts.


def coverage(source: Source, drawn: Mapping[str, Drawn], cells: Cells) -> Cells:
    """Counts of every interval of means and of pairs; `cells` has those of quantiles."""
    for design in DESIGNS:
        if design not in drawn:
            continue
        for name in (name for name in MEANS if STATISTICS[name].no_interval is None):
            for tier, truth in source.truths.items():
                got = contrast(drawn[design], *means_of(drawn[design], tier, name, log=STATISTICS[name].log))
                cells[Key(name, design)].add(tier, got.covers(theta_of(STATISTICS[name], truth.numbers[name])))
        for tier, kind in drawn[design].plain:
            off = np.abs(means_of(drawn[design], tier, "kld", log=False)[0] - source.truths[tier].numbers["kld"])
            cells[Key(f"kld, {kind}", design)].add(tier, (off <= 1.959964 * drawn[design].plain[tier, kind]).astype(np.float64))
        for a, b in combinations(source.truths, 2):
            for statistic in PAIR_STATISTICS:
                cells[Key(f"pair: {statistic}", design)].add(f"{a} {b}", pair_contrast(drawn[design], a, b, statistic).covers(
                    true_difference(source, a, b, statistic)))
    return cells


def true_difference(source: Source, a: str, b: str, name: PairStatistic) -> float:
    """θ of a pair in the long run."""
    x, y = (source.truths[tier].numbers[name] for tier in (a, b))
    return float(np.log(x / y)) if name == "kld" else y - x if name == "same_top_p" else x - y


class FalseVerdicts(NamedTuple):
    """Shares of texts, 0 to 1: any pair of equal tiers told apart; with looks; a pair at the margin called equivalent, each way."""

    apart: dict[str, float]
    with_looks: float
    equivalent: list[float]


def false_verdicts(source: Source, drawn: Mapping[str, Drawn]) -> FalseVerdicts:
    """How often a table of equal tiers is wrong about any pair.

    Tiers scaled to one KLD in the long run are equal, and as dependent as they were: their θ is what a pair's θ is off its truth.
    Holm rejects something exactly where the smallest p times the number of pairs is below 5 %.
    """
    from scipy.special import stdtr

    pairs = list(combinations(source.truths, 2))

    def told_apart(design: str, n_looks: int = 1) -> Bools:
        smallest = np.full(len(drawn[design].sizes), 1.0)
        for a, b in pairs:
            got = pair_contrast(drawn[design], a, b, "kld")
            p = 2 * stdtr(got.df, -np.abs(got.theta - true_difference(source, a, b, "kld")) / got.se)
            smallest = np.fmin(smallest, np.where(got.printed, p, 1.0))
        return smallest * len(pairs) * n_looks < 0.05

    looks = [design for design in drawn if design.startswith("look ")]
    equal = []
    for (a, b), at in product(pairs, (-MARGIN, MARGIN)):
        got = pair_contrast(drawn["all"], a, b, "kld")
        room = MARGIN - np.abs(got.theta - true_difference(source, a, b, "kld") + at)
        equal.append(float((got.printed & (stdtr(got.df, -room / got.se) < 0.05)).mean()))
    return FalseVerdicts({design: float(told_apart(design).mean()) for design in QUANTILE_DESIGNS if design in drawn},
                         float(np.any([told_apart(look, len(looks)) for look in looks], axis=0).mean()), equal)


def stopped_coverage(source: Source, drawn: Mapping[str, Drawn], target: float) -> dict[float, Cell]:
    """Coverage of kld where each tier stops at the first look with se / value below a target, by level."""
    cells: dict[float, Cell] = {0.95: Cell(), 0.97: Cell()}
    looks = [design for design in drawn if design.startswith("look ")]
    for tier, truth in source.truths.items():
        found = [contrast(drawn[look], *means_of(drawn[look], tier, "kld", log=True)) for look in looks]
        stops = np.array([(got.printed & (got.se < target)) | (look == LAST_LOOK) for got, look in zip(found, looks, strict=True)])
        for level, cell in cells.items():
            covered = np.array([got.covers(float(np.log(truth.numbers["kld"])), level) for got in found])
            cell.add(tier, covered[np.argmax(stops, axis=0), np.arange(stops.shape[1])])
    return cells
