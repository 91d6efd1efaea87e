"""Slices: every token once in each cut, the ratio's own jackknife, classes of tokens by their text."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.core.stats import student_quantile
from quantkit.measure.numbers import Rows
from quantkit.measure.slices import TOKEN_CLASSES, Piece, slice_rows, token_class
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.verdict_records import Slice
from tests.measure.synthetic import df_by_hand, make_rows

CLASSES = {i: TOKEN_CLASSES[i % 6] for i in range(1000)}


def slices_of(rows: Rows, kind: str) -> list[Slice]:
    return [s for s in slice_rows(rows, CLASSES) if s.kind == kind]


@pytest.mark.parametrize(("text", "special", "want"), [
    (b" the", False, "word start"), (b"ing", False, "word inside"), (b"n't", False, "word inside"), (b" 2nd", False, "word start"),
    (b"2024", False, "digits"), (b" 7", False, "digits"), (b",", False, "punctuation"), (b" (", False, "punctuation"),
    (b" \n", False, "whitespace"), (b"\n\n", False, "whitespace"), (b" ", False, "whitespace"),
    (b"<|im_end|>", True, "special"), (b"", False, "special"),
    ("模型".encode(), False, "word inside"), (" Größe".encode(), False, "word start"), (b"\xe6", False, "word inside"),
    ("٣".encode(), False, "digits"), ("’".encode(), False, "punctuation"),
])  # fmt: skip
def test_a_token_has_one_class(text: bytes, special: bool, want: str) -> None:
    assert token_class(Piece(text, special)) == want


@given(st.binary(max_size=12), st.booleans())
def test_every_text_has_a_class(text: bytes, special: bool) -> None:
    assert token_class(Piece(text, special)) in TOKEN_CLASSES


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_each_cut_holds_every_token_once(seed: int) -> None:
    rows = make_rows(n_article=7, n_chunk=2, n_pos=13, seed=seed)
    rows["entropy_base"][:3] = [-1e-16, 0.0, 1e9]
    found = defaultdict(list)
    for s in slice_rows(rows, CLASSES):
        found[s.kind].append(s)
    assert list(found) == ["entropy", "margin", "position", "token"]
    for cut in found.values():
        assert sum(s.n_scored for s in cut) == len(rows)
        assert sum(s.share for s in cut) == pytest.approx(1)
        assert sum(s.kld_share for s in cut if s.kld_share is not None) == pytest.approx(1)
        whole = sum(s.kld.value * s.n_scored for s in cut if s.kld is not None and s.kld.value is not None) / len(rows)
        assert whole == pytest.approx(np.mean(rows["kld"]))


def test_a_slice_is_a_ratio_with_the_jackknife_of_a_ratio() -> None:
    rows = make_rows(n_article=16)
    got = slices_of(rows, "margin")[3]
    mask = (rows["margin_base"] >= 0.5) & (rows["margin_base"] < 1.0)
    own = rows[mask]
    assert [got.lo, got.hi, got.name, got.n_scored] == [0.5, 1.0, "0.5 to 1 nats", mask.sum()]
    theta = np.array([math.log(own["kld"][own["article"] != g].sum() / (own["article"] != g).sum()) for g in range(16)])
    se = math.sqrt(15 / 16 * ((theta - theta.mean()) ** 2).sum())
    sizes = np.bincount(own["article"])
    df = df_by_hand(sizes, theta)
    assert got.kld is not None
    assert got.kld.value == pytest.approx(own["kld"].mean())
    assert got.kld.hi == pytest.approx(own["kld"].mean() * math.exp(student_quantile(0.975, df) * se), rel=1e-9)
    assert got.kld_share == pytest.approx(own["kld"].sum() / rows["kld"].sum())


def test_flips_are_split_by_the_bases_margin() -> None:
    rows = make_rows(flip_share=0.0)
    rows["top1_q"] += rows["margin_base"] < 0.1  # every close call flips, and nothing else
    close, *others = slices_of(rows, "margin")
    assert close.name == "below 0.1 nats"
    assert close.flip_share == 1.0
    assert close.same_top_p is not None
    assert close.same_top_p.value == 0.0
    for other in others:
        assert other.flip_share == 0.0
        assert other.same_top_p is not None
        assert other.same_top_p.value == 1.0


def test_the_ends_of_edges_belong_to_the_part_above() -> None:
    rows = make_rows()
    rows["entropy_base"] = 1.0
    assert [s.n_scored for s in slices_of(rows, "entropy")] == [0, 0, 800, 0, 0, 0, 0]
    rows["margin_base"] = 0.0
    assert [s.n_scored for s in slices_of(rows, "margin")] == [800, 0, 0, 0, 0, 0, 0]


def test_positions_are_four_equal_parts() -> None:
    assert [(s.name, s.n_scored) for s in slices_of(make_rows(), "position")] == [
        ("256 to 260", 200), ("261 to 265", 200), ("266 to 270", 200), ("271 to 275", 200)]


def test_nothing_has_no_numbers_and_few_articles_no_interval() -> None:
    rows = make_rows(n_article=3)
    rows["entropy_base"] = 1.5
    empty = slices_of(rows, "entropy")[0]
    assert [empty.n_scored, empty.kld, empty.same_top_p, empty.share, empty.kld_share] == [0, None, None, 0.0, 0.0]
    full = slices_of(rows, "entropy")[2]
    assert full.kld is not None
    assert [full.kld.se, full.kld.reason] == [None, "3 articles"]
    assert full.kld == summarize(rows).kld
    none = slices_of(base_rows(rows), "entropy")[2]
    assert [none.kld_share, none.flip_share] == [None, None]


def test_a_token_without_a_class_is_refused() -> None:
    with pytest.raises(InputError, match="expected a class for every token of the rows, found none for token"):
        slice_rows(make_rows(), dict.fromkeys(range(10), "digits"))


def test_without_classes_there_are_no_slices_by_token() -> None:
    rows = make_rows()
    assert slice_rows(rows, None) == tuple(s for s in slice_rows(rows, CLASSES) if s.kind != "token")
