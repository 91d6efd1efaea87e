"""Drawing for `coverage.py`: texts by the thousand, what each design sees of them, and the counts of what is inside.

Quantiles are counted here, one text at a time with its tokens; of everything else the sums by article are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from redraw import MEANS, Source, Text, design_chunks

from quantkit.core.stats import Floats, group_by
from quantkit.measure.articles import screening_order
from quantkit.measure.summary import too_few

DESIGNS = ("all", "spread 200", "spread 64", "spread 32", "spread 16", "first 200", "first 64", "first 16")
QUANTILE_DESIGNS = ("all", "spread 64", "spread 16")
LOOKS = (32, 64, 128, 256)
NOT_PUBLISHED = " (not published)"
LAST_LOOK = "look all"


class Drawn(NamedTuple):
    """One design over D texts: sizes of articles in chunks (D, G), 0 where a text has fewer; sums by tier and statistic (D, G)."""

    sizes: Floats
    sums: Mapping[tuple[str, str], Floats]
    plain: Mapping[tuple[str, str], Floats]  # errors of kld by (tier, "iid" or "chunk"), (D,)


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
    return parts | {LAST_LOOK: text}


def collect(source: Source, n_draw: int, seed: int) -> tuple[dict[str, Drawn], Cells]:
    """Draw texts; for each design the articles' sizes and sums, and counts of the quantiles' limits."""
    rng = np.random.default_rng(seed)
    with_tokens = any(truth.quantiles for truth in source.truths.values())
    cells: Cells = defaultdict(Cell)
    rows: dict[str, list[tuple[Floats, Floats, Floats]]] = defaultdict(list)
    n_typical = len(source.draw(np.random.default_rng(0), False).chunks)
    for i in range(n_draw):
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
