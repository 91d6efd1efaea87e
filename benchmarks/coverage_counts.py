"""Counting for `coverage.py`: how often the truth is inside the intervals of drawn texts, and how often verdicts are false.

Thousands of texts at once, so the formulas of `measure.summary` and `measure.verdict` stand here a second time, over arrays of
texts; `check` holds them to what those functions give for some of the texts, and counts nothing if they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from redraw import KLD_LEVELS, MEANS, Source, Text, design_chunks

from quantkit.core.stats import Floats, group_by, quantile_limits
from quantkit.measure.articles import screening_order
from quantkit.measure.numbers import STATISTICS, Statistic
from quantkit.measure.summary import MIN_ARTICLES, estimate_mean, too_few
from quantkit.measure.verdict import PairStatistic, compare_means

DESIGNS = ("all", "spread 200", "spread 64", "spread 32", "spread 16", "first 200", "first 64", "first 16")
QUANTILE_DESIGNS = ("all", "spread 64", "spread 16")
LOOKS = (32, 64, 128, 256)
PAIR_STATISTICS: tuple[PairStatistic, ...] = ("kld", "ln_ppl_ratio", "same_top_p")
MARGIN = float(np.log(1.05))
NOT_PUBLISHED = " (not published)"
EVERY_QUANTILE = 4  # quantiles need the tokens and take most of the time: every so many texts
_LAST_LOOK = "look all"

Bools = npt.NDArray[np.bool_]


class Drawn(NamedTuple):
    """One design over D texts: sizes of articles in chunks (D, G), 0 where a text has fewer; sums by tier and statistic (D, G)."""

    sizes: Floats
    sums: Mapping[tuple[str, str], Floats]
    plain: Mapping[tuple[str, str], Floats]  # errors of kld by (tier, "iid" or "chunk"), (D,)


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


class Cell:
    """Counts of one number under one design, by tier or pair: how often the truth was inside, and in how many texts."""

    def __init__(self) -> None:
        self.inside: dict[str, int] = defaultdict(int)
        self.tried: dict[str, int] = defaultdict(int)
        self.n_none = 0

    def add(self, name: str, covered: Floats) -> None:
        """Count intervals: 1 holds the truth, 0 does not, NaN is none."""
        is_there = ~np.isnan(covered)
        self.n_none += int((~is_there).sum())
        self.tried[name] += int(is_there.sum())
        self.inside[name] += int(covered[is_there].sum())

    def shares(self) -> dict[str, float]:
        """Coverage of each tier or pair with 100 intervals at least, percent."""
        return {name: 100 * self.inside[name] / n for name, n in self.tried.items() if n >= 100}

    def outside(self, low: float = 93.0, high: float = 97.0) -> list[str]:
        """Tiers or pairs that are covered too rarely or too often, with how far that is in Monte Carlo errors."""
        found = []
        for name, share in self.shares().items():
            edge = low if share < low else high
            if not low <= share <= high:
                error = (edge * (100 - edge) / self.tried[name]) ** 0.5
                found.append(f"{name} {share:.1f} ({abs(share - edge) / error:.1f} Monte Carlo errors)")
        return found

    def __str__(self) -> str:
        shares = list(self.shares().values())
        if not shares:
            return "none"
        worst = max(shares, key=lambda share: abs(share - 95))
        missing = f" -{self.n_none / (self.n_none + sum(self.tried.values())):.0%}" if self.n_none else ""
        return f"{np.mean(shares):.1f} ({worst:.1f}){missing}"


class Key(NamedTuple):
    """A line and a column of a table."""

    line: str
    design: str


Cells = dict[Key, Cell]


# Texts.


def parts_of(text: Text, seed: int, n_typical: int) -> dict[str, Text]:
    """What each design evaluates of a text, and what a screening sees at each look, all chunks at the last.

    Looks are those that a text of `n_typical` chunks leaves room for, so that all texts of a source have the same.
    """
    n = len(text.chunks)
    parts = {}
    for design in DESIGNS:
        rule, _, count = design.partition(" ")
        chunks = design_chunks(rule, int(count or 0), n)
        if chunks is not None:
            parts[design] = text.take(chunks)
    order = screening_order(n, seed)
    parts |= {f"look {count}": text.take(np.sort(order[:count])) for count in LOOKS if count < 0.7 * n_typical}
    return parts | {_LAST_LOOK: text}


def collect(source: Source, n_draw: int, seed: int) -> tuple[dict[str, Drawn], Cells]:
    """Draw texts; for each design the articles' sizes and sums, and counts of the quantiles' limits."""
    rng = np.random.default_rng(seed)
    cells: Cells = defaultdict(Cell)
    rows: dict[str, list[tuple[Floats, Floats, Floats]]] = defaultdict(list)
    n_typical = len(source.draw(np.random.default_rng(0), False).chunks)
    for i in range(n_draw):
        with_tokens = i % EVERY_QUANTILE == 0 and any(truth.quantiles for truth in source.truths.values())
        text = source.draw(rng, with_tokens)
        keys = [(tier, statistic) for tier in text.tiers for statistic in MEANS]
        table = np.stack([text.tiers[tier].means[statistic] for tier, statistic in keys], axis=1)
        for design, part in parts_of(text, i, n_typical).items():
            starts = np.flatnonzero(np.diff(part.articles, prepend=-1))
            sizes = np.diff(starts, append=len(part.articles)).astype(np.float64)
            rows[design].append((sizes, np.add.reduceat(table[part.chunks], starts, axis=0), _plain_errors(part)))
            if design in QUANTILE_DESIGNS and with_tokens:
                _count_quantiles(cells, source, part, design)
    plain = [(tier, kind) for tier in source.truths for kind in ("iid", "chunk")]
    return {design: _padded(found, keys, plain) for design, found in rows.items()}, cells


def _plain_errors(part: Text) -> Floats:
    """Errors of mean kld with tokens, and with chunks, as independent; of each tier."""
    n, errors = len(part.chunks), []
    for tier in part.tiers.values():
        x = tier.means["kld"][part.chunks]
        tokens = max(0.0, tier.squares["kld"][part.chunks].mean() - x.mean() ** 2)
        errors += [np.sqrt(tokens / (part.n_scored * n - 1)), x.std() / np.sqrt(n - 1)]
    return np.array(errors)


def _padded(rows: list[tuple[Floats, Floats, Floats]], keys: list[tuple[str, str]], plain: list[tuple[str, str]]) -> Drawn:
    n_article = max(len(sizes) for sizes, _, _ in rows)
    sizes, sums = np.zeros((len(rows), n_article)), np.zeros((len(keys), len(rows), n_article))
    for i, (n, s, _) in enumerate(rows):
        sizes[i, :len(n)], sums[:, i, :len(n)] = n, s.T
    errors = np.array([row[2] for row in rows]).T
    return Drawn(sizes, dict(zip(keys, sums, strict=True)), dict(zip(plain, errors, strict=True)))


def _count_quantiles(cells: Cells, source: Source, text: Text, design: str) -> None:
    articles = group_by(text.articles)
    few = too_few(articles) is not None
    for name, tier in text.tiers.items():
        truth = source.truths[name].quantiles
        for kind, ranked in tier.tokens.items():
            levels = [q for own, q in truth if own == kind]
            limits = [(None, None)] * len(levels) if few else ranked.limits(text.chunks, articles, levels)
            for q, (lo, hi) in zip(levels, limits, strict=True):
                line = f"{kind} quantile {q:g}" + ("" if 0.05 <= q <= 0.95 else NOT_PUBLISHED)
                covered = np.nan if lo is None or hi is None else float(lo <= truth[kind, q] <= hi)
                cells[Key(line, design)].add(name, np.array([covered]))


# The published formulas over many texts.


def contrast(drawn: Drawn, theta: Floats, without: Floats) -> Contrast:
    """Error and degrees of freedom from θ without each article (D, G); as `core.stats` has them for one text."""
    n, is_there = drawn.sizes, drawn.sizes > 0
    n_article = is_there.sum(axis=1)
    without = np.where(is_there, without, 0.0)
    d = np.where(is_there, without - (without.sum(axis=1) / n_article)[:, None], 0.0)
    squares = np.square(d).sum(axis=1)
    n_whole = np.square(n).sum(axis=1) ** 2 / (n**4).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
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
    has_quantiles = any(truth.quantiles for truth in source.truths.values())
    texts = [source.draw(rng, has_quantiles and i % EVERY_QUANTILE == 0) for i in range(n_text)]
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
    """Shares of texts, 0 to 1: any pair of equal tiers told apart; with looks; tiers at the margin called equivalent."""

    apart: dict[str, float]
    with_looks: float
    equivalent: float


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
    got = pair_contrast(drawn["all"], *pairs[0], "kld")
    room = MARGIN - np.abs(got.theta - true_difference(source, *pairs[0], "kld") - MARGIN)
    equal = got.printed & (stdtr(got.df, -room / got.se) < 0.05)
    return FalseVerdicts({design: float(told_apart(design).mean()) for design in QUANTILE_DESIGNS if design in drawn},
                         float(np.any([told_apart(look, len(looks)) for look in looks], axis=0).mean()), float(equal.mean()))


def stopped_coverage(source: Source, drawn: Mapping[str, Drawn], target: float) -> dict[float, Cell]:
    """Coverage of kld where each tier stops at the first look with se / value below a target, by level."""
    cells: dict[float, Cell] = {0.95: Cell(), 0.97: Cell()}
    looks = [design for design in drawn if design.startswith("look ")]
    for tier, truth in source.truths.items():
        found = [contrast(drawn[look], *means_of(drawn[look], tier, "kld", log=True)) for look in looks]
        stops = np.array([(got.printed & (got.se < target)) | (look == _LAST_LOOK) for got, look in zip(found, looks, strict=True)])
        for level, cell in cells.items():
            covered = np.array([got.covers(float(np.log(truth.numbers["kld"])), level) for got in found])
            cell.add(tier, covered[np.argmax(stops, axis=0), np.arange(stops.shape[1])])
    return cells
