"""docs/FAULTS.md: every fault has a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = [1, 2, 3, 4, 5, 7, 8, 10, 11, 13, 14, 15, 16, 17, 18, 19, 21, 23, 24, 25, 26, 27, 28, 29, 30, 33, 36, 39, 40, 41, 42, 43,
           44, 46, 47, 49, 50, 51, 52, 53, 54, 55, 56, 58, 59, 60, 61, 62, 63, 65, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78,
           79, 80, 81, 82, 84, 85, 86, 87, 88, 89, 91, 92, 93, 94, 95]


def named_tests(text: str) -> list[str]:
    """The tests that a document names, as pytest does: `tests/x/test_y.py::Class::test_z`."""
    return re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", text)


def missing_tests(names: list[str]) -> list[str]:
    """Those of them that no file holds."""
    held: dict[str, set[str]] = {}
    missing = []
    for name in names:
        file, _, test = name.partition("::")
        if file not in held:
            held[file] = _tests_of(ROOT / file) if (ROOT / file).is_file() else set()
        if test not in held[file]:
            missing.append(name)
    return missing


def _tests_of(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def faults(text: str) -> dict[int, str]:
    """What stands under each number."""
    parts = re.split(r"^- \*\*(\d+)\*\* ", text, flags=re.MULTILINE)
    return {int(number): words for number, words in zip(parts[1::2], parts[2::2], strict=True)}


FAULTS = (ROOT / "docs" / "FAULTS.md").read_text("utf-8")


def test_no_fault_is_missing_or_there_twice() -> None:
    assert re.findall(r"^- \*\*(\d+)\*\*", FAULTS, re.MULTILINE) == [str(number) for number in NUMBERS]


def test_every_fault_has_a_test_or_cannot_occur() -> None:
    assert [number for number, words in faults(FAULTS).items() if not named_tests(words) and "cannot occur" not in words] == []


@pytest.mark.parametrize("document", ["FAULTS.md", "SECURITY.md"])
def test_every_test_that_is_named_is_there(document: str) -> None:
    text = (ROOT / "docs" / document).read_text("utf-8")
    names = named_tests(text)
    assert names
    assert text.count("::test_") + text.count("::Test") == sum(name.count("::") for name in names)  # none outside backticks
    assert missing_tests(names) == []


def test_a_test_that_is_gone_is_seen() -> None:
    assert missing_tests(["tests/test_faults_table.py::test_of_nothing", "tests/no.py::test_x"]) == [
        "tests/test_faults_table.py::test_of_nothing", "tests/no.py::test_x"]
