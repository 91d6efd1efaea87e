"""What the command asks for, and the errors of asking for nothing."""

from __future__ import annotations

import dataclasses
import json

import click
import pytest
from click.testing import CliRunner

from quantkit.cli.search import _row, _text, _wants, search
from quantkit.core.errors import ProtocolError
from quantkit.spec.protocol import load_protocol
from quantkit.spec.search_records import SearchReference
from tests.spec.test_search_records import PROPOSAL, RESULT


def test_budgets_come_in_three_ways_and_the_ladder_leaves_out_8_bits() -> None:
    protocol = load_protocol("wikitext2-quick-v1")
    wants = _wants(protocol, ["16.79GiB"], [4.5], ["Q4_K_M"], True)
    assert [want.name for want in wants] == [
        "search-Q4_K_M", "search-Q6_K", "search-Q5_K_M", "search-Q3_K_M", "search-IQ2_S", "search-IQ1_M",
        f"search-{int(16.79 * 2**30)}-bytes", "search-4.5-bpw"]


def test_a_search_without_a_budget_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="needs a budget"):
        _wants(load_protocol("demo-v1"), [], [], [], False)


def test_a_tier_that_the_protocol_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="Q9_K"):
        load_protocol("demo-v1").plan.tier("Q9_K")


def test_a_judged_proposal_shows_both_klds_and_their_ratio() -> None:
    row = _row(PROPOSAL)
    assert row[:2] == ("search-Q4_K_M", "Q4_K_M")
    assert row[6:9] == ("0.100000", "0.200000", "-50.0%")
    assert row[-1] == "strict progress"


def test_what_stands_in_the_way_is_named() -> None:
    blocked = dataclasses.replace(PROPOSAL.obligations[0], name="ln_ppl_ratio", verdict="not shown")
    proposal = dataclasses.replace(PROPOSAL, label="incomparable", obligations=(*PROPOSAL.obligations, blocked))
    assert _row(proposal)[-1] == "incomparable: ln_ppl_ratio not shown"
    needed = dataclasses.replace(proposal, obligations=(dataclasses.replace(blocked, n_article_needed=310),))
    assert _row(needed)[-1] == "incomparable: ln_ppl_ratio not shown (about 310 articles would settle it)"


def test_packs_are_named_below_the_table() -> None:
    reference = SearchReference(corpus="t", file="ref.safetensors", sha256="f", mass=0.9999, max_ids=9)
    text = _text(dataclasses.replace(RESULT, references=(reference,)), "md")
    assert text.endswith("\nref: pack: every KLD is a lower bound, against ref.safetensors (mass 0.9999)\n")
    assert "ref: pack" not in _text(RESULT, "md")
    assert json.loads(_text(dataclasses.replace(RESULT, references=(reference,)), "json"))["references"][0]["mass"] == 0.9999


def test_help_names_every_way_of_giving_a_budget() -> None:
    text = CliRunner().invoke(search, ["--help"]).output
    assert all(option in text for option in ("--size", "--bpw", "--match", "--ladder", "--quick", "--ref"))
