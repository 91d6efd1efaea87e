"""One sentence a tier: what the tests said and nothing more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quantkit.measure.summary import base_rows, summarize
from quantkit.report.sentences import tier_sentences
from quantkit.report.table import TableRow
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Comparison, FloorVerdict, PairVerdict, Verdicts
from tests.measure.synthetic import make_rows

SUMMARY = summarize(make_rows())


def make_row(tier: str, gib: float, *, kld: Estimate | None = None, ratio: Estimate | None = None, **other: Any) -> TableRow:
    summary = dataclasses.replace(
        SUMMARY, kld=kld or Estimate(value=0.0042, lo=0.0037, hi=0.0046),
        ln_ppl_ratio=ratio or Estimate(value=0.01, lo=0.008, hi=0.012), ppl_drift=Estimate(value=0.0101))
    row = TableRow(tier=tier, file=f"{tier}.gguf", sha256="0" * 64, size_bytes=int(gib * 2**30), size_vs_base=0.5, bpw=8.5,
                   bpw_core=None, summary=summary)
    return dataclasses.replace(row, **other)


BASE = make_row("BF16", 50, is_base=True)


def verdicts(*pairs: PairVerdict, floors: tuple[FloorVerdict, ...] = ()) -> Verdicts:
    names = tuple(dict.fromkeys(name for pair in pairs for name in (pair.a, pair.b)))
    return Verdicts(tiers=names, rows_sha256={}, n_article=60, g_eff=40.0, alpha=0.05, n_looks=1, floor_factor=2.0, floors=floors,
                    comparisons=(Comparison(statistic="kld", margin=0.04879, pairs=pairs, letters={}),))


def pair(a: str, b: str, verdict: str, **other: Any) -> PairVerdict:
    return PairVerdict(a=a, b=b, statistic="kld", difference=0.01, detectable=0.04, verdict=verdict, **other)


def sentence(*rows: TableRow, of: Verdicts | None = None, tier: str | None = None) -> str:
    found = tier_sentences([BASE, *rows], of)
    return found[tier or rows[-1].tier]


def test_the_sentence_of_the_issue() -> None:
    six, five = make_row("Q6_K", 20.9), make_row("Q5_K_M", 16.8)
    assert sentence(six, five, of=verdicts(pair("Q6_K", "Q5_K_M", "not resolved"))) == (
        "4.10 GiB less than Q6_K; KLD 0.0042 [0.0037, 0.0046]; perplexity +1 %; not resolved from Q6_K on 60 articles "
        "(a difference of 4.1 % would show).")


def test_without_tests_nothing_is_said_of_differences() -> None:
    assert sentence(make_row("Q6_K", 20)) == "30.00 GiB less than BF16; KLD 0.0042 [0.0037, 0.0046]; perplexity +1 %."


def test_narrow_intervals_get_another_digit() -> None:
    assert "KLD 0.117 [0.114, 0.120]" in sentence(make_row("Q6_K", 20, kld=Estimate(value=0.117, lo=0.1138, hi=0.1201)))


def test_perplexity_inside_its_error_is_no_difference() -> None:
    """A tier with a ratio of −0.001 ± 0.002 is neither better nor worse than the base."""
    text = sentence(make_row("Q6_K", 20, ratio=Estimate(value=-0.001, se=0.002, lo=-0.005, hi=0.003)))
    assert "no measurable difference of perplexity" in text
    assert "perplexity -" not in text


def test_few_articles_give_a_reason_instead_of_an_interval() -> None:
    row = make_row("Q6_K", 20, kld=Estimate(value=0.0042, reason="2 articles"), ratio=Estimate(value=0.1, reason="2 articles"))
    none = PairVerdict(a="Q6_K", b="X", statistic="kld", verdict="not resolved", reason="2 articles")
    assert sentence(row, make_row("X", 10), of=verdicts(none), tier="Q6_K") == (
        "30.00 GiB less than BF16; KLD 0.0042, no interval: 2 articles; not compared with the other tiers (2 articles).")


@pytest.mark.parametrize(("first", "words"), [
    (pair("Q6_K", "Q5_K_M", "worse"), "better than Q6_K, though smaller"),
    (pair("Q6_K", "Q5_K_M", "better"), "told apart from every other tier"),
    (pair("Q6_K", "Q5_K_M", "equivalent"), "within 5 % of Q6_K"),
    (pair("Q6_K", "Q5_K_M", "better, by less than the margin"), "within 5 % of Q6_K"),
    (pair("Q6_K", "Q5_K_M", "better", arithmetic=True), "its difference to Q6_K is within what arithmetic does"),
])  # fmt: skip
def test_verdicts_in_words(first: PairVerdict, words: str) -> None:
    text = sentence(make_row("Q6_K", 20), make_row("Q5_K_M", 16), of=verdicts(first))
    assert text.endswith(f"; {words}.")


def test_a_larger_tier_that_is_worse_says_so() -> None:
    text = sentence(make_row("Q6_K", 20), make_row("Q5_K_M", 16), of=verdicts(pair("Q6_K", "Q5_K_M", "worse")), tier="Q6_K")
    assert text.endswith("; worse than Q5_K_M, no larger than it.")


def test_a_tier_within_its_floor_and_one_that_is_the_base() -> None:
    row = make_row("Q8_0", 26, floor_verdict=FloorVerdict(tier="Q8_0", indistinguishable=True))
    assert "indistinguishable from BF16 here: its KLD is less than 2 times what other arithmetic does" in sentence(row)
    same = dataclasses.replace(make_row("copy", 50), summary=summarize(base_rows(make_rows())))
    assert sentence(same) == "of the size of BF16; equal to the base in every row."


def test_names_that_lie_are_told() -> None:
    assert sentence(make_row("Q4_K_M", 16, substituted=0.979)).endswith("; 98 % of it is not of the type that its name says.")
