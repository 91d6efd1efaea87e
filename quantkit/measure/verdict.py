"""Verdicts: which of two tiers is better, from paired rows, with the family of all pairs in mind.

For tiers A and B over the same tokens, θ is ln(KLD_A / KLD_B), or the difference A − B of ln_ppl_ratio or same_top_p. Its error
is the jackknife over articles, its p from Student's t with as many degrees of freedom as that error deserves.

    better, worse   Holm's p over all pairs of the table is below α
    equivalent      both one-sided tests against ±margin reject (TOST); Holm over a family of its own
    both            "better, by less than the margin"; the difference is there and does not matter
    neither         "not resolved": the detectable difference says what this text could have shown

KLD is never tested against 0: it always says worse. A tier's own noise floor is what it is compared with, as another tier is.
Tiers share a letter where no test separates them; sharing a letter is not equality.
The detectable difference is (t(1 − α/2m) + t(0.8))·se over m pairs: what this text would show in four of five cases. How many
articles a margin needs follows from it alone, never from the difference that was observed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from quantkit.core.errors import InputError
from quantkit.core.stats import (
    Floats,
    Groups,
    degrees_of_freedom,
    group_by,
    holm,
    jackknife_se,
    student_quantile,
    student_upper_tail,
)
from quantkit.measure.numbers import Rows, flips, kld, nll_difference
from quantkit.measure.summary import LEVEL, sorted_rows, too_few
from quantkit.spec.verdict_records import PairVerdict

PairStatistic = Literal["kld", "ln_ppl_ratio", "same_top_p"]

_POWER = 0.8  # of the detectable difference


class _Jackknifed(NamedTuple):
    """A tier's own part of θ: its value over everything and without each article; None where it has no logarithm."""

    whole: float
    without: Floats


class _Contrast(NamedTuple):
    """θ of a pair before the family is known: its value, its error with its degrees of freedom, or why there is none."""

    theta: float | None
    se: float | None
    df: float
    reason: str | None


def compare_pairs(tiers: Mapping[str, Rows], statistic: PairStatistic, *, margin: float, alpha: float = 0.05,
                  n_looks: int = 1) -> tuple[PairVerdict, ...]:
    """The verdict of every pair of tiers, each pair once, in the order of the tiers.

    Args:
        tiers: rows of `ROW_DTYPE` by name, all over the same tokens. All tiers of the table: they are the family.
        statistic: what is compared.
        margin: below which a difference does not matter, on the scale of θ and positive: ln(1 + m) for kld.
        alpha: error of the family of differences, and of that of equivalences.
        n_looks: how often a screening may look at such tables and stop; the errors are shared over them (Bonferroni).

    Raises:
        InputError: tiers whose rows are of different tokens, or of another base.
    """
    checked = {name: sorted_rows(rows) for name, rows in tiers.items()}
    names = list(checked)
    for name in names[1:]:
        check_paired(names[0], checked[names[0]], name, checked[name])
    if not names:
        return ()
    observed = {name: observe_pair(rows, statistic) for name, rows in checked.items()}
    articles = group_by(checked[names[0]]["article"])
    return compare_means(observed, statistic, articles, margin=margin, alpha=alpha, n_looks=n_looks)


def compare_means(observed: Mapping[str, Floats], statistic: PairStatistic, articles: Groups, *, margin: float, alpha: float = 0.05,
                  n_looks: int = 1) -> tuple[PairVerdict, ...]:
    """As `compare_pairs`, from what `observe_pair` gives for each tier, or from the means of equally long chunks of it."""
    pairs = list(combinations(observed, 2))
    if not pairs:
        return ()
    few = too_few(articles)
    parts = {} if few is not None else {name: _jackknife(x, statistic, articles) for name, x in observed.items()}
    contrasts = [_Contrast(None, None, 1.0, few) if few is not None
                 else _contrast(observed[a], observed[b], parts[a], parts[b], articles) for a, b in pairs]
    p_values = [_times(_p_difference(c), n_looks) for c in contrasts]
    p_equal = [_times(_p_equivalent(c, margin), n_looks) for c in contrasts]
    # an undefined test stays in the family with p = 1: the family is fixed before measuring
    p_holm = holm([1.0 if p is None else p for p in p_values])
    p_equal_holm = holm([1.0 if p is None else p for p in p_equal])
    verdicts = []
    for i, (a, b) in enumerate(pairs):
        theta, se, df, reason = contrasts[i]
        if theta is None or se is None:
            verdicts.append(PairVerdict(a=a, b=b, statistic=statistic, verdict="not resolved", reason=reason))
            continue
        n_test = n_looks * len(pairs)
        single, family = (student_quantile(1 - (1 - LEVEL) / 2 / n, df) * se for n in (n_looks, n_test))
        detectable = (student_quantile(1 - alpha / 2 / n_test, df) + student_quantile(_POWER, df)) * se
        verdicts.append(PairVerdict(
            a=a, b=b, statistic=statistic, difference=theta, se=se, lo=theta - single, hi=theta + single,
            lo_simultaneous=theta - family, hi_simultaneous=theta + family, p=p_values[i], p_holm=p_holm[i],
            p_equivalent=p_equal[i], p_equivalent_holm=p_equal_holm[i], detectable=detectable,
            n_article_needed=math.ceil(articles.n_group * (detectable / margin) ** 2),
            verdict=_word(theta, statistic, p_holm[i] < alpha, p_equal_holm[i] < alpha),
        ))  # fmt: skip
    return tuple(verdicts)


def letters(names: Sequence[str], verdicts: Collection[PairVerdict]) -> dict[str, str]:
    """Letters of each tier: two tiers share one where no verdict says better or worse (maximal cliques).

    Args:
        names: of the tiers in the order of the table; letters are given in that order.
        verdicts: of all pairs of them.
    """
    apart = {frozenset((v.a, v.b)) for v in verdicts if v.verdict.startswith(("better", "worse"))}
    near = {a: {b for b in names if b != a and frozenset((a, b)) not in apart} for a in names}
    cliques = sorted(sorted(names.index(name) for name in clique) for clique in _maximal_cliques(near))
    found = dict.fromkeys(names, "")
    for i, clique in enumerate(cliques):
        for member in clique:
            found[names[member]] += chr(ord("a") + i) if i < 26 else f"({i + 1})"
    return found


def _maximal_cliques(near: Mapping[str, set[str]]) -> list[set[str]]:
    """All maximal sets whose members are pairwise near (Bron and Kerbosch 1973, with a pivot)."""
    found: list[set[str]] = []

    def grow(clique: set[str], candidates: set[str], seen: set[str]) -> None:
        if not candidates and not seen:
            found.append(clique)
            return
        pivot = max(sorted(candidates | seen), key=lambda name: len(near[name] & candidates))
        for name in sorted(candidates - near[pivot]):
            grow(clique | {name}, candidates & near[name], seen & near[name])
            candidates = candidates - {name}
            seen = seen | {name}

    grow(set(), set(near), set())
    return found


def observe_pair(rows: Rows, statistic: PairStatistic) -> Floats:
    """One observation a token, whose mean is compared: kld, nll_q − nll_base, or 1 where the top tokens agree."""
    if statistic == "kld":
        return kld(rows)
    return nll_difference(rows) if statistic == "ln_ppl_ratio" else 1.0 - flips(rows)


def check_paired(first: str, a: Rows, name: str, b: Rows) -> None:
    """Refuse rows that are not of the same tokens and the same base.

    Raises:
        InputError: names the column that differs.
    """
    for column in ("chunk", "pos", "token", "article", "nll_base"):
        if len(a) != len(b) or not np.array_equal(a[column], b[column]):
            raise InputError(f"expected rows of the same tokens and the same base, got another {column} in {name} than in {first}: "
                             "only tiers of one base, one text and one set of chunks can be compared; audit them together")


def _jackknife(x: Floats, statistic: PairStatistic, articles: Groups) -> _Jackknifed | None:
    whole, without = float(np.mean(x)), articles.means_without(x)
    if statistic != "kld":
        return _Jackknifed(whole, without)
    return _Jackknifed(math.log(whole), np.log(without)) if without.min() > 0 else None


def _contrast(x: Floats, y: Floats, a: _Jackknifed | None, b: _Jackknifed | None, articles: Groups) -> _Contrast:
    if np.array_equal(x, y):
        return _Contrast(0.0, 0.0, 1.0, None)
    if a is None or b is None:
        return _Contrast(None, None, 1.0, "the KLD of one of them is exactly zero, or one article carries it all")
    without = a.without - b.without
    return _Contrast(a.whole - b.whole, jackknife_se(without), degrees_of_freedom(articles, without), None)


def _times(p: float | None, n: int) -> float | None:
    return None if p is None else min(1.0, n * p)


def _p_difference(contrast: _Contrast) -> float | None:
    if contrast.theta is None or contrast.se is None:
        return None
    if contrast.theta == 0:
        return 1.0
    return 2 * student_upper_tail(abs(contrast.theta) / contrast.se if contrast.se else math.inf, contrast.df)


def _p_equivalent(contrast: _Contrast, margin: float) -> float | None:
    """The larger p of the two one-sided tests of θ <= −margin and θ >= margin. Source: Schuirmann 1987."""
    if contrast.theta is None or contrast.se is None:
        return None
    room = margin - abs(contrast.theta)
    if contrast.se == 0:
        return 0.0 if room > 0 else 1.0
    return student_upper_tail(room / contrast.se, contrast.df)


def _word(theta: float, statistic: PairStatistic, differs: bool, equal: bool) -> str:
    if not differs:
        return "equivalent" if equal else "not resolved"
    word = "better" if (theta > 0) == (statistic == "same_top_p") else "worse"
    return f"{word}, by less than the margin" if equal else word
