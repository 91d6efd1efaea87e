"""Sets that share no article, costs that follow weight errors, and a commit rule that chance does not pass."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.numbers import Rows
from quantkit.measure.search_stats import (
    Margins,
    compare_plans,
    deal_articles,
    label_proposal,
    mean_se,
    predict_cost,
    proposal_alpha,
    smooth_costs,
    spread,
)
from tests.measure.synthetic import make_rows

MARGINS = Margins(kld_mean=0.02, kld_p999=0.1, same_top_p=0.002, ln_ppl_ratio=0.001)


def scaled(rows: Rows, kld: float = 1.0, *, nll: float = 0.0) -> Rows:
    out = rows.copy()
    out["kld"] *= kld
    out["nll_q"] += nll
    return out


def with_flips(rows: Rows, share: float, seed: int = 1) -> Rows:
    out = rows.copy()
    out["top1_q"] = out["top1_base"] + (np.random.default_rng(seed).random(len(out)) < share)
    return out


def test_no_article_is_in_two_sets_and_every_chunk_is_in_one() -> None:
    articles = np.repeat(np.arange(60, dtype=np.int32), np.random.default_rng(0).integers(1, 30, 60))
    sets = deal_articles(articles, (0.25, 0.25, 0.5), seed=1)
    owned = [set(articles[chunks]) for chunks in sets]
    assert owned[0] & owned[1] == owned[0] & owned[2] == owned[1] & owned[2] == set()
    assert sorted(np.concatenate(sets)) == list(range(len(articles)))
    for chunks, share in zip(sets, (0.25, 0.25, 0.5), strict=True):
        assert abs(len(chunks) / len(articles) - share) < 0.05


def test_the_seed_alone_decides_the_sets() -> None:
    articles = np.repeat(np.arange(20, dtype=np.int32), 5)
    first, again, other = (deal_articles(articles, (0.25, 0.25, 0.5), seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_chunks_are_spread_over_a_set() -> None:
    assert spread(np.arange(10, 30), 4).tolist() == [12, 17, 22, 27]
    assert spread(np.arange(3), 4).tolist() == [0, 1, 2]


def test_costs_are_interpolated_on_logarithms_and_proportional_beyond() -> None:
    measured = [(0.01, 1e-4), (1.0, 1e-1)]
    assert predict_cost(0.1, measured) == pytest.approx(10**-2.5)
    assert predict_cost(0.001, measured) == pytest.approx(1e-5)
    assert predict_cost(2.0, measured) == pytest.approx(0.2)
    assert predict_cost(0.04, [(0.01, 1e-4)]) == pytest.approx(4e-4)


def test_a_line_through_costs_that_lie_on_one_gives_them_back() -> None:
    errors = {"a": 0.001, "b": 0.01, "c": 0.1}
    smooth = smooth_costs(errors, {"a": 2e-5, "c": 2e-3})
    assert smooth == {name: pytest.approx(0.02 * error) for name, error in errors.items()}


def test_a_noisy_cost_is_drawn_to_the_line() -> None:
    errors = {"a": 0.001, "b": 0.01, "c": 0.1}
    assert 2e-4 < smooth_costs(errors, {"a": 2e-5, "b": 4e-4, "c": 2e-3})["b"] < 4e-4


def test_an_error_by_article_needs_two_of_them() -> None:
    assert mean_se(np.array([1.0, 2.0]), np.array([0, 0])) is None
    assert mean_se(np.array([1.0, 3.0]), np.array([0, 1])) == pytest.approx(1.0)


def test_levels_of_all_proposals_together_stay_below_alpha() -> None:
    assert proposal_alpha(0.025, 1) == pytest.approx(0.0152, abs=1e-4)
    assert sum(proposal_alpha(0.025, k) for k in range(1, 10_000)) < 0.025


def test_a_better_plan_commits() -> None:
    rows = make_rows(n_article=20, n_pos=255, flip_share=0.1)
    better = with_flips(scaled(rows, 0.6, nll=-0.005), 0.06)
    obligations = {o.name: o for o in compare_plans(rows, better, MARGINS, 0.0152)}
    assert [o.verdict for o in obligations.values()] == ["better"] * 4
    assert obligations["kld_mean"].theta == pytest.approx(np.log(0.6))
    assert label_proposal(list(obligations.values())) == ("complete", True)


def test_the_same_rows_are_no_progress() -> None:
    rows = make_rows(n_article=20, n_pos=255)
    obligations = compare_plans(rows, rows, MARGINS, 0.0152)
    assert [o.verdict for o in obligations] == ["not worse"] * 4
    assert label_proposal(obligations) == ("no progress", False)


def test_less_kld_does_not_buy_lost_top_tokens() -> None:
    rows = make_rows(n_article=20, n_pos=255, flip_share=0.05)
    obligations = compare_plans(rows, with_flips(scaled(rows, 0.6), 0.15), MARGINS, 0.0152)
    assert {o.name: o.verdict for o in obligations}["same_top_p"] == "worse"
    assert label_proposal(obligations) == ("incomparable", False)


def test_a_second_text_that_gets_worse_stops_the_plan() -> None:
    rows = make_rows(n_article=20, n_pos=255)
    obligations = compare_plans(rows, scaled(rows, 0.6), MARGINS, 0.0152, second=(rows, scaled(rows, 1.2)))
    assert obligations[-1].verdict == "worse"
    assert label_proposal(obligations).commits is False


def test_few_articles_compare_nothing_and_thin_tails_are_left_out() -> None:
    few = make_rows(n_article=4, n_pos=255)
    obligations = compare_plans(few, scaled(few, 0.5), MARGINS, 0.0152)
    assert {o.verdict for o in obligations} == {"not compared"}
    assert label_proposal(obligations) == ("no progress", False)
    thin = make_rows(n_article=10, n_chunk=2, n_pos=255)
    assert {o.name: o.verdict for o in compare_plans(thin, scaled(thin, 0.5), MARGINS, 0.0152)}["kld_p999"] == "not compared"


@pytest.mark.slow
def test_a_useless_improvement_that_was_picked_on_the_search_chunks_is_rejected() -> None:
    """24 plans that differ by noise alone, the best on the search articles is proposed; fresh articles do not commit it."""
    committed = 0
    n = 40
    for seed in range(n):
        incumbent = make_rows(n_article=24, n_pos=40, seed=seed)
        search, report = incumbent["article"] < 8, incumbent["article"] >= 8
        rng = np.random.default_rng((seed, 1))
        by_article = np.exp(rng.normal(0, 0.15, (24, 24)))  # plan, article
        plans = []
        for own in by_article:
            plan = incumbent.copy()
            plan["kld"] *= own[incumbent["article"]]
            plans.append(plan)
        best = min(plans, key=lambda plan: float(plan["kld"][search].mean()))
        assert best["kld"][search].mean() < 0.98 * incumbent["kld"][search].mean()
        committed += label_proposal(compare_plans(incumbent[report], best[report], MARGINS, proposal_alpha(0.025, 1))).commits
    assert committed <= 2


def test_what_is_not_shown_says_how_many_articles_would_show_it() -> None:
    rows = make_rows(n_article=20, n_pos=255)
    noisy = rows.copy()
    noisy["nll_q"] += np.random.default_rng(3).normal(0, 0.004, 20)[rows["article"]]
    o = {o.name: o for o in compare_plans(rows, noisy, MARGINS, 0.0152, second=(rows, rows))}["ln_ppl_ratio"]
    assert o.verdict == "not shown"
    assert o.theta is not None
    assert o.upper is not None
    assert o.n_article_needed is not None
    n = len(np.unique(rows["article"]))
    assert o.n_article_needed > n
    reach = [o.theta + (o.upper - o.theta) * np.sqrt(n / n_needed) for n_needed in (o.n_article_needed, o.n_article_needed - 1)]
    assert reach[0] <= o.margin < reach[1]
    settled = compare_plans(rows, scaled(rows, 0.6), MARGINS, 0.0152, second=(rows, scaled(rows, 1.2)))
    assert {o.n_article_needed for o in settled} == {None}
