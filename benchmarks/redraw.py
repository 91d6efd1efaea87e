"""Texts to draw for `coverage.py`: made of real articles drawn with replacement, or of articles that never were.

A text is a sequence of chunks. Chunks are equally long, so the mean of a statistic over tokens is its mean over chunk means, and
its published error is the same from either; only quantiles and the iid error need the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.stats import Floats, Groups, degrees_of_freedom, jackknife_se, student_quantile
from quantkit.measure.articles import chunk_indices
from quantkit.measure.numbers import STATISTICS, Rows, kld, p_diff

Ints = npt.NDArray[np.int64]

MEANS = ("kld", "ln_ppl_ratio", "p_diff", "p_diff_rms", "same_top_p", "ppl_q")
KLD_LEVELS = (0.5, 0.9, 0.95, 0.99, 0.999)
P_DIFF_LEVELS = (0.05, 0.5, 0.95)


class Ranked:
    """The tokens of C chunks, sorted once, so that a quantile of any multiset of the chunks takes one pass and no sorting."""

    def __init__(self, tokens: Floats) -> None:
        self.tokens = tokens
        order = np.argsort(tokens, axis=None)
        self._sorted = tokens.reshape(-1)[order]
        self._chunk = (order // tokens.shape[1]).astype(np.int32)

    def limits(self, chunks: Ints, articles: Groups, levels: Sequence[float]) -> list[tuple[float | None, float | None]]:
        """What `quantile_limits` gives at 95 % for the tokens of some chunks, which may stand more than once.

        Args:
            chunks: which chunks. articles: of those chunks.
        """
        n = len(chunks) * self.tokens.shape[1]
        rank = np.cumsum(np.bincount(chunks, minlength=len(self.tokens))[self._chunk])

        def quantile(q: float) -> float:
            place = (n - 1) * q
            low, high = self._sorted[np.searchsorted(rank, [int(place), min(int(place) + 1, n - 1)], side="right")]
            return float(low + (place - int(place)) * (high - low))

        found: list[tuple[float | None, float | None]] = []
        for q in levels:
            place = int(np.searchsorted(self._sorted, quantile(q), side="right"))
            above = np.bincount(self._chunk[place:], minlength=len(self.tokens))[chunks] / self.tokens.shape[1]
            without = articles.means_without(above)
            reach = student_quantile(0.975, degrees_of_freedom(articles, without)) * jackknife_se(without)
            if n * min(q, 1 - q) < 16 - 1e-6 or min(q - reach, 1 - q - reach) < 1 / n:
                found.append((None, None))
            else:
                found.append((quantile(q - reach), quantile(q + reach)))
        return found


class Tier(NamedTuple):
    """One tier over C chunks: for each statistic the means of chunks and of squares, (C,), or what those are expected to be; tokens
    for quantiles."""

    means: Mapping[str, Floats]
    squares: Mapping[str, Floats]
    tokens: Mapping[str, Ranked]


class Text(NamedTuple):
    """A drawn text: its tiers by name, which of their chunks it is made of, and the article of each."""

    tiers: Mapping[str, Tier]
    chunks: Ints
    articles: Ints
    n_scored: int

    def take(self, places: Ints) -> Text:
        """The part of the text that a design evaluates."""
        return self._replace(chunks=self.chunks[places], articles=self.articles[places])


class Truth(NamedTuple):
    """What the numbers of a tier come to in the long run: means by statistic, quantiles by (kind, level)."""

    numbers: Mapping[str, float]
    quantiles: Mapping[tuple[str, float], float]


class Source(NamedTuple):
    """Where texts come from: how one is drawn, with or without its tokens, and the truth of each tier."""

    name: str
    draw: Callable[[np.random.Generator, bool], Text]
    truths: Mapping[str, Truth]


def design_chunks(rule: str, n: int, n_total: int) -> Ints | None:
    """The chunks of a design; None where the text is shorter."""
    if rule == "all":
        return np.arange(n_total, dtype=np.int64)
    return chunk_indices("spread" if rule == "spread" else "first", n, n_total) if n <= n_total else None


# Real rows.


def real_source(name: str, rows: Mapping[str, Rows]) -> Source:
    """Texts of as many articles as the real one, drawn from it with replacement; a copy counts as an article of its own."""
    first = next(iter(rows.values()))
    n_scored = int((first["chunk"] == first["chunk"][0]).sum())
    articles = first["article"].reshape(-1, n_scored)[:, 0]
    chunks_of = [np.flatnonzero(articles == article) for article in np.unique(articles)]
    tiers = {tier: tier_of(own, n_scored) for tier, own in rows.items()}

    def draw(rng: np.random.Generator, with_tokens: bool) -> Text:
        drawn = [chunks_of[i] for i in rng.integers(0, len(chunks_of), len(chunks_of))]
        labels = np.repeat(np.arange(len(drawn)), [len(chunks) for chunks in drawn])
        return Text(tiers, np.concatenate(drawn), labels, n_scored)

    return Source(name, draw, {tier: truth_of(own) for tier, own in rows.items()})


def tier_of(rows: Rows, n_scored: int) -> Tier:
    """A tier's chunk means and tokens, from rows in order."""
    columns = {name: STATISTICS[name].observe(rows).reshape(-1, n_scored) for name in MEANS}
    return Tier({name: x.mean(axis=1) for name, x in columns.items()}, {name: (x**2).mean(axis=1) for name, x in columns.items()},
                {kind: Ranked(columns[kind]) for kind in ("kld", "p_diff")})


def truth_of(rows: Rows) -> Truth:
    """The numbers of the real text itself, which redrawn ones come to in the long run."""
    numbers = {name: float(STATISTICS[name].value(float(np.mean(STATISTICS[name].observe(rows))))) for name in MEANS}
    quantiles = {("kld", q): float(np.quantile(kld(rows), q)) for q in KLD_LEVELS}
    quantiles |= {("p_diff", q): float(np.quantile(p_diff(rows), q)) for q in P_DIFF_LEVELS}
    return Truth(numbers, quantiles)


def rows_of_run(folder: Path) -> dict[str, Rows]:
    """The rows of every tier of a run directory."""
    from quantkit.job.parts import read_parquet

    found: dict[str, Any] = {path.parent.name: read_parquet(path)[0] for path in sorted(folder.glob("audit/*/rows.parquet"))}
    return {name: rows for name, rows in found.items() if rows["kld"].any()}  # base against itself has no spread


# Synthetic rows.


class Spread(NamedTuple):
    """How much articles and chunks differ, as the standard deviation of ln kld; how alike neighbouring chunks of an article are.

    Article effects are normal; or Laplace, tails on both sides (kurtosis 6); or exponential, a tail of hard ones (skewness 2).
    """

    article: float
    chunk: float
    alike: float
    shape: Literal["normal", "laplace", "exponential"] = "normal"

    def draw(self, rng: np.random.Generator) -> float:
        """The effect of an article, mean 0."""
        if self.shape == "normal":
            return float(rng.normal(0, self.article))
        if self.shape == "laplace":
            return float(rng.laplace(0, self.article / np.sqrt(2)))
        return float(rng.exponential(self.article) - self.article)

    def growth(self) -> float:
        """ln of the mean of exp(effect) for the effect of a chunk, article and all, that two tiers share to nine tenths."""
        shares = np.array([_SHARED, np.sqrt(1 - _SHARED**2)]) * self.article
        if self.shape == "normal":
            return (self.article**2 + self.chunk**2) / 2
        parts = -shares - np.log1p(-shares) if self.shape == "exponential" else -np.log1p(-(shares**2) / 2)
        return float(parts.sum()) + self.chunk**2 / 2


_SHARED = 0.9  # of an effect, between the two tiers
_SHAPE = 0.3  # of a token's gamma: kurtosis 23, the top 1 % of tokens carry 12 % of the mean
_LEVEL, _RATIO, _FLIPS, _SHIFT, _RMS, _NLL = 0.01, 1.1, 0.08, 0.002, 0.02, 3.0


def synthetic_source(name: str, spread: Spread, n_article: int = 60, n_scored: int = 255) -> Source:
    """Two tiers over articles that are new in every text, with known truth; B's kld is 1.1 times A's.

    ln kld of a chunk = level + article + chunk (an AR(1) inside the article) − what makes the mean 1; a token's kld is that times a
    gamma. The share of flips and mean Δp² go with it; differences of nll and p have normal articles, chunks and tokens.
    """
    growth = spread.growth()

    def draw(rng: np.random.Generator, with_tokens: bool) -> Text:
        sizes = np.maximum(1, np.round(rng.lognormal(2.3, 0.6, n_article))).astype(np.int64)
        labels = np.repeat(np.arange(n_article), sizes)
        shared = _effects(rng, sizes, spread)
        tiers = {}
        for tier, factor in (("A", 1.0), ("B", _RATIO)):
            effect = _SHARED * shared + np.sqrt(1 - _SHARED**2) * _effects(rng, sizes, spread)
            tiers[tier] = _draw_tier(rng, np.exp(effect - growth), effect, factor, n_scored, with_tokens)
        return Text(tiers, np.arange(len(labels)), labels, n_scored)

    return Source(name, draw, {tier: _synthetic_truth(factor, spread) for tier, factor in (("A", 1.0), ("B", _RATIO))})


def _effects(rng: np.random.Generator, sizes: Ints, spread: Spread) -> Floats:
    """Article and chunk effects of a text, (C,), with the spread's variances."""
    from scipy.signal import lfilter

    parts = []
    for size in sizes:
        steps = rng.normal(0, spread.chunk * np.sqrt(1 - spread.alike**2), size)
        steps[0] /= np.sqrt(1 - spread.alike**2)
        parts.append(spread.draw(rng) + lfilter([1.0], [1.0, -spread.alike], steps))
    return np.concatenate(parts)


def _draw_tier(rng: np.random.Generator, scale: Floats, effect: Floats, factor: float, n: int, with_tokens: bool) -> Tier:
    level = factor * _LEVEL * scale
    tokens = level[:, None] * rng.gamma(_SHAPE, 1 / _SHAPE, (len(scale), n)) if with_tokens else None
    noise = rng.normal(0, 1 / np.sqrt(n), len(scale))  # mean of n standard normals; with the next line, of their squares
    squares = rng.chisquare(n - 1, len(scale)) / n + noise**2
    rms = _RMS * np.sqrt(factor * scale)
    means = {
        "kld": level * rng.gamma(n * _SHAPE, 1 / (n * _SHAPE), len(scale)) if tokens is None else tokens.mean(axis=1),
        "same_top_p": rng.binomial(n, np.minimum(factor * _FLIPS * scale, 0.9)) / n,
        "p_diff": -_SHIFT + _SHIFT * effect + rms * noise, "p_diff_rms": rms**2 * squares,
        "ln_ppl_ratio": 0.01 * factor + 0.01 * effect + rng.normal(0, 0.15 / np.sqrt(n), len(scale)),
        "ppl_q": _NLL + 0.5 * effect + rng.normal(0, 2.5 / np.sqrt(n), len(scale)),
    }
    return Tier(means, {"kld": level**2 * (1 + 1 / _SHAPE)}, {} if tokens is None else {"kld": Ranked(tokens)})


def _synthetic_truth(factor: float, spread: Spread) -> Truth:
    numbers = {"kld": factor * _LEVEL, "same_top_p": 1 - factor * _FLIPS, "p_diff": -_SHIFT, "p_diff_rms": _RMS * np.sqrt(factor),
               "ln_ppl_ratio": 0.01 * factor, "ppl_q": float(np.exp(_NLL))}
    levels = KLD_LEVELS if spread.shape == "normal" else ()  # the others have no quantile in closed form
    return Truth(numbers, {("kld", q): factor * _LEVEL * _mixture_quantile(q, 2 * spread.growth()) for q in levels})


def _mixture_quantile(q: float, variance: float) -> float:
    """The quantile of exp(N(−v/2, v)) times a gamma of mean 1."""
    from scipy.optimize import brentq
    from scipy.special import gammainc

    nodes, weights = np.polynomial.hermite_e.hermegauss(81)
    scales = np.exp(np.sqrt(variance) * nodes - variance / 2)

    def excess(x: float) -> float:
        return float((weights * gammainc(_SHAPE, _SHAPE * np.exp(x) / scales)).sum() / weights.sum()) - q

    return float(np.exp(brentq(excess, -60, 20)))
