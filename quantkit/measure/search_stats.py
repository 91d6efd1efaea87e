"""The statistics of a plan search: which articles serve which purpose, what a type would cost, and what proves progress.

Choosing among plans on some text makes the best look better than it is on that text, so the articles are dealt once into three
sets, by a seed: to search on, to select on, to report on. Chunks that a report uses were seen by nothing before.

Costs are predicted from the error of the weights. With D the importance-weighted squared error of a tensor at a type,

    ln KLD is interpolated linearly in ln D between the measured types of that tensor; beyond them KLD is proportional to D

since KLD is quadratic in small changes of the logits, and those are linear in small changes of the weights.

The k-th proposal that is held against one report set is called better at the one-sided level alpha·6/(pi²·k²): these sum up to
alpha over any number of proposals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.stats import Floats, Groups, group_by, holm, jackknife_se, student_quantile, student_upper_tail
from quantkit.measure.gate import Decision, Verdict, decide, next_rank
from quantkit.measure.numbers import Rows, flips, kld, nll_difference
from quantkit.measure.summary import too_few_to_test
from quantkit.measure.verdict import check_paired

NOT_WORSE_ALPHA = 0.05  # of each non-inferiority test
_P999 = 0.999
_MIN_TAIL = 16
_N_OBLIGATION = 4  # of the evaluation text; those that follow are of the second one


class Sets(NamedTuple):
    """Chunk numbers of the three purposes, ascending; no article is in two of them."""

    search: npt.NDArray[np.int64]
    select: npt.NDArray[np.int64]
    report: npt.NDArray[np.int64]


def deal_articles(articles: npt.NDArray[np.int32], shares: Sequence[float], seed: int) -> Sets:
    """Deal all chunks of a text into three sets by article.

    Articles come in a seeded random order; each goes to the set that lacks most of its share of the chunks.

    Args:
        articles: (n_chunk,) the article of every chunk of the text.
        shares: of search, select and report; they add up to 1.
    """
    labels, sizes = np.unique(articles, return_counts=True)
    held = np.zeros(3)
    owner = {}
    for i in np.random.default_rng(seed).permutation(len(labels)):
        lacking = np.asarray(shares) * len(articles) - held
        place = int(np.argmax(lacking))
        owner[int(labels[i])] = place
        held[place] += sizes[i]
    places = np.array([owner[int(a)] for a in articles])
    return Sets(*(np.flatnonzero(places == place).astype(np.int64) for place in range(3)))


def spread(chunks: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """n of some chunks, spread over them as `chunk_indices` does; all where there are no more."""
    if n >= len(chunks):
        return chunks
    return chunks[(2 * np.arange(n, dtype=np.int64) + 1) * len(chunks) // (2 * n)]


def predict_cost(error: float, measured: Sequence[tuple[float, float]]) -> float:
    """The KLD of a type from the weight error it makes, in nats; see the module.

    Args:
        error: D of the type, above 0.
        measured: (D, KLD) of the same tensor's measured types, at least one, D above 0.
    """
    points = sorted((math.log(d), math.log(max(cost, 1e-12))) for d, cost in measured)
    x = math.log(error)
    if x <= points[0][0]:
        return math.exp(points[0][1] + x - points[0][0])
    if x >= points[-1][0]:
        return math.exp(points[-1][1] + x - points[-1][0])
    xs, ys = zip(*points, strict=True)
    return math.exp(float(np.interp(x, xs, ys)))


def smooth_costs(errors: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Costs of all types of a tensor from one line through the measured ones: ln KLD = a + b·ln D, least squares, b in 0.5 .. 1.5.

    Measured on few chunks, a single cost is noisy; the line borrows strength from the others.
    """
    x = np.log([errors[t] for t in measured])
    y = np.log([max(cost, 1e-12) for cost in measured.values()])
    spread_x = float(np.sum((x - x.mean()) ** 2))
    slope = float(np.clip(np.sum((x - x.mean()) * (y - y.mean())) / spread_x, 0.5, 1.5)) if spread_x > 0 else 1.0
    return {t: math.exp(float(y.mean()) + slope * (math.log(error) - float(x.mean()))) for t, error in errors.items()}


def mean_se(x: Floats, articles: npt.NDArray[np.integer]) -> float | None:
    """Jackknife error of a mean by article; None with fewer than two. `x` has one value for each of equally long chunks."""
    groups = group_by(articles)
    return jackknife_se(groups.means_without(x)) if groups.n_group > 1 else None


def proposal_alpha(alpha: float, k: int) -> float:
    """The level at which the k-th proposal on one report set (from 1 on) must prove itself: alpha·6/(pi²·k²)."""
    return alpha * 6 / (math.pi**2 * k * k)


class Obligation(NamedTuple):
    """One number that no plan may worsen: of the incumbent and of the proposal, and what paired rows say.

    `theta` is on the margin's scale, above 0 where the proposal is worse: ln of the ratio for kld and its quantile, a difference
    otherwise. `p_better` is one-sided, Holm's over the obligations. `n_article_needed`: so many articles like these would settle
    what is not shown, at this difference: G·(t·se/(margin − theta))²; None where no number would. More chunks of the same articles
    are not enough: what articles differ by stays.
    """

    name: str
    incumbent: float
    proposal: float
    theta: float | None
    se: float | None
    upper: float | None
    margin: float
    p_better: float | None
    verdict: Verdict
    n_article_needed: int | None = None


class Margins(NamedTuple):
    """How much worse than the incumbent still counts as not worse: fractions for the klds, differences for the others."""

    kld_mean: float
    kld_p999: float
    same_top_p: float
    ln_ppl_ratio: float


def compare_plans(incumbent: Rows, proposal: Rows, margins: Margins, alpha: float,
                  second: tuple[Rows, Rows] | None = None) -> tuple[Obligation, ...]:
    """The obligations of a proposal against the incumbent.

    Args:
        incumbent, proposal: rows over the report set, the same tokens.
        alpha: one-sided, of this proposal; shared over the obligations (Holm). "Not worse" is a non-inferiority test at 5 %.
        second: rows of both over another text, whose mean KLD is an obligation too.
    """
    check_paired("the incumbent", incumbent, "the proposal", proposal)
    articles = group_by(incumbent["article"])
    raw = [
        _log_ratio("kld_mean", kld(incumbent), kld(proposal), articles, math.log1p(margins.kld_mean)),
        _tail("kld_p999", kld(incumbent), kld(proposal), articles, math.log1p(margins.kld_p999)),
        _difference("same_top_p", 1 - flips(incumbent), 1 - flips(proposal), articles, margins.same_top_p, -1.0),
        _difference("ln_ppl_ratio", nll_difference(incumbent), nll_difference(proposal), articles, margins.ln_ppl_ratio, 1.0),
    ]
    if second is not None:
        check_paired("the incumbent", second[0], "the proposal", second[1])
        raw.append(_log_ratio("kld_mean, second text", kld(second[0]), kld(second[1]), group_by(second[0]["article"]),
                              math.log1p(margins.kld_mean)))
    adjusted = holm([1.0 if o.p_better is None else o.p_better for o in raw])
    n_article = articles.n_group, group_by(second[0]["article"]).n_group if second is not None else 0
    out = []
    for i, (o, p) in enumerate(zip(raw, adjusted, strict=True)):
        verdict = _verdict(o, p, alpha)
        needed = _n_article_needed(o, n_article[i >= _N_OBLIGATION]) if verdict == "not shown" else None
        out.append(o._replace(p_better=p, verdict=verdict, n_article_needed=needed))
    return tuple(out)


def label_proposal(obligations: Sequence[Obligation]) -> Decision:
    """The commit rule (`measure.gate`) over ranks that start at 1 for every number of the incumbent: 0 is better, 2 is not shown to
    be as good. So "complete" is better in everything that could be compared; where nothing could, there is no progress.
    """
    compared = [o for o in obligations if o.verdict != "not compared"]
    if not compared:
        return Decision("no progress", False)
    return decide([1] * len(compared), [next_rank(1, o.verdict, 0.0, 1.0) for o in compared])


def _verdict(o: Obligation, p_better: float, alpha: float) -> Verdict:
    if o.theta is None or o.se is None or o.upper is None:
        return "not compared"
    if p_better < alpha:
        return "better"
    if o.upper <= o.margin:
        return "not worse"
    return "worse" if o.theta - (o.upper - o.theta) > o.margin else "not shown"


def _n_article_needed(o: Obligation, n_article: int) -> int | None:
    if o.theta is None or o.upper is None or o.theta >= o.margin:
        return None
    return math.ceil(n_article * ((o.upper - o.theta) / (o.margin - o.theta)) ** 2)


def _log_ratio(name: str, a: Floats, b: Floats, articles: Groups, margin: float) -> Obligation:
    x, y = float(np.mean(a)), float(np.mean(b))
    without_x, without_y = articles.means_without(a), articles.means_without(b)
    if too_few_to_test(articles) is not None or min(float(without_x.min()), float(without_y.min())) <= 0:
        return _unknown(name, x, y, margin)
    return _judged(name, x, y, math.log(y / x), np.log(without_y / without_x), articles, margin)


def _tail(name: str, a: Floats, b: Floats, articles: Groups, margin: float) -> Obligation:
    x, y = (float(np.quantile(values, _P999)) for values in (a, b))
    if too_few_to_test(articles) is not None or len(a) * (1 - _P999) < _MIN_TAIL - 1e-6 or min(x, y) <= 0:
        return _unknown(name, x, y, margin)
    without = [math.log(float(np.quantile(b[kept], _P999)) / float(np.quantile(a[kept], _P999)))
               for g in range(articles.n_group) for kept in [articles.index != g]]
    return _judged(name, x, y, math.log(y / x), np.array(without), articles, margin)


def _difference(name: str, a: Floats, b: Floats, articles: Groups, margin: float, sign: float) -> Obligation:
    x, y = float(np.mean(a)), float(np.mean(b))
    if too_few_to_test(articles) is not None:
        return _unknown(name, x, y, margin)
    return _judged(name, x, y, sign * (y - x), sign * (articles.means_without(b) - articles.means_without(a)), articles, margin)


def _judged(name: str, x: float, y: float, theta: float, without: Floats, articles: Groups, margin: float) -> Obligation:
    se, df = jackknife_se(without), articles.n_effective - 1
    upper = theta + student_quantile(1 - NOT_WORSE_ALPHA, df) * se
    p = student_upper_tail(-theta / se, df) if se > 0 else (0.0 if theta < 0 else 1.0)
    return Obligation(name, x, y, theta, se, upper, margin, p, "not shown")


def _unknown(name: str, x: float, y: float, margin: float) -> Obligation:
    return Obligation(name, x, y, None, None, None, margin, None, "not compared")
