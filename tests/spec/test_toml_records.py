"""Tables into records and back: every kind of wrong value is named by its path."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import ProtocolError
from quantkit.spec.toml_records import above, between, one_of, read_record, record_to_table, write_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    word: str
    share: Annotated[float, between(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    on: bool
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    schema: Literal[1]
    kind: Literal["oak", "elm"]
    n: Annotated[int, above(0, 10)]
    color: Annotated[str, one_of({"red", "green"}, "a colour")]
    numbers: tuple[int, ...]
    trunk: Leaf
    branches: tuple[Branch, ...]


def table() -> dict[str, Any]:
    return {"schema": 1, "kind": "oak", "n": 3, "color": "red", "numbers": [1, 2], "trunk": {"word": "a", "share": 0.5},
            "branches": [{"on": True, "leaves": [{"word": "b", "share": 1}]}, {"on": False, "leaves": []}]}


def with_value(path: list[Any], value: object) -> dict[str, Any]:
    whole = table()
    holder: Any = whole
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return whole


def message(value: object) -> str:
    with pytest.raises(ProtocolError) as caught:
        read_record(Tree, value)
    return str(caught.value)


def test_reads_every_kind() -> None:
    assert read_record(Tree, table()) == Tree(
        schema=1, kind="oak", n=3, color="red", numbers=(1, 2), trunk=Leaf(word="a", share=0.5),
        branches=(Branch(on=True, leaves=(Leaf(word="b", share=1.0),)), Branch(on=False, leaves=())))


@pytest.mark.parametrize(("path", "value", "expected"), [
    (["schema"], 2, "schema: expected 1, got 2"),
    (["schema"], True, "schema: expected 1, got True"),
    (["kind"], "ash", "kind: expected 'oak' or 'elm', got 'ash'"),
    (["kind"], ["oak"], "kind: expected 'oak' or 'elm', got ['oak']"),
    (["n"], 0, "n: expected a number above 0, at most 10, got 0"),
    (["n"], 3.0, "n: expected an integer, got 3.0"),
    (["n"], True, "n: expected an integer, got True"),
    (["color"], "blue", "color: expected a colour, got 'blue'"),
    (["color"], 7, "color: expected a string, got 7"),
    (["trunk", "word"], "\udcff", "trunk.word: expected a string, got '\\udcff'"),
    (["numbers"], 7, "numbers: expected an array, got 7"),
    (["numbers"], [1, "x"], "numbers[1]: expected an integer, got 'x'"),
    (["trunk"], [], "trunk: expected a table, got []"),
    (["trunk", "share"], "1", "trunk.share: expected a number, got '1'"),
    (["trunk", "share"], True, "trunk.share: expected a number, got True"),
    (["trunk", "share"], 1.5, "trunk.share: expected a number from 0 to 1, got 1.5"),
    (["trunk", "share"], float("nan"), "trunk.share: expected a finite number below 2^53, got nan"),
    (["trunk", "share"], 10**400, "trunk.share: expected a finite number below 2^53, got 1000000000"),
    (["branches", 0, "on"], 1, "branches[0].on: expected true or false, got 1"),
    (["branches", 0, "leaves", 0, "word"], None, "branches[0].leaves[0].word: expected a string, got None"),
    (["branches", 1, "leav"], 1, "branches[1].leav: expected one of the keys on, leaves, got 'leav': did you mean leaves?"),
    (["zzz"], 1, "zzz: expected one of the keys schema, kind, n, color, numbers, trunk, branches, got 'zzz'"),
])
def test_wrong_values_are_named_by_path(path: list[Any], value: object, expected: str) -> None:
    assert message(with_value(path, value)).startswith(expected)


def test_long_values_are_cut() -> None:
    assert len(message(with_value(["color"], "x" * 10_000))) < 200


def test_missing_key() -> None:
    whole = table()
    del whole["branches"][1]["on"]
    assert message(whole) == "branches[1].on: expected this key (a protocol states every key), got none; add it"


def test_a_document_is_a_table() -> None:
    assert message([1]) == ": expected a table, got [1]; correct it"


leaves = st.builds(Leaf, word=st.text(st.characters(exclude_categories=["Cs"])), share=st.floats(0, 1).map(lambda x: x + 0.0))
trees = st.builds(Tree, schema=st.just(1), kind=st.sampled_from(["oak", "elm"]), n=st.integers(1, 10),
                  color=st.sampled_from(["red", "green"]), numbers=st.lists(st.integers(-2**60, 2**60)).map(tuple), trunk=leaves,
                  branches=st.lists(st.builds(Branch, on=st.booleans(), leaves=st.lists(leaves).map(tuple))).map(tuple))


@given(trees)
@settings(max_examples=40)
@pytest.mark.slow
def test_written_toml_reads_back(tree: Tree) -> None:
    text = write_toml(record_to_table(tree))
    assert read_record(Tree, tomllib.loads(text)) == tree


def test_form_of_written_toml() -> None:
    assert write_toml(record_to_table(read_record(Tree, table()))) == (
        'schema = 1\nkind = "oak"\nn = 3\ncolor = "red"\nnumbers = [1, 2]\n'
        '\n[trunk]\nword = "a"\nshare = 0.5\n'
        '\n[[branches]]\non = true\nleaves = [\n  { word = "b", share = 1.0 },\n]\n'
        '\n[[branches]]\non = false\nleaves = []\n')
