"""The repository speaks with one voice: one version, pinned demo files, no traces of the machine it was written on."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quantkit

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "quantkit" / "data" / "demo"

# Written so that this file does not match itself.
UNWANTED = re.compile(
    r"/wor[k]/|/roo[t]/|/hom[e]/(?!USER\b|user\b)\w|/User[s]/\w|/tm[p]/(?:w|bas[h])"  # where it was written
    r"|\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b")                                             # what was left undone


def tracked_texts() -> list[tuple[str, str]]:
    """(name, text) of every text file under version control."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    found = [(path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in paths if path.is_file()]
    return [(name, data.decode()) for name, data in found if b"\0" not in data]


def test_no_file_names_this_machine_or_leaves_work_undone() -> None:
    seen = [f"{name}:{text.count(chr(10), 0, match.start()) + 1} {match.group()!r}"
            for name, text in tracked_texts() for match in UNWANTED.finditer(text)]
    assert seen == []


@pytest.mark.parametrize("text", ["in /wor" "k/main/x", "see /hom" "e/jane/run", "# TO" "DO: later"])
def test_unwanted_words_are_seen(text: str) -> None:
    assert UNWANTED.search(text) is not None


@pytest.mark.parametrize("text", ["a homework/ folder", "/home/USER/models", "network/root of the tree"])
def test_ordinary_words_are_let_through(text: str) -> None:
    assert UNWANTED.search(text) is None


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert (project["version"], newest[1]) == (quantkit.__version__, quantkit.__version__)


def test_llama_cpp_is_pinned_exactly() -> None:
    """Its ctypes structs follow one llama.cpp commit; a range would load structs of another shape."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert [re.sub(r"==[0-9.]+", "==N", name) for name in wanted if name.startswith("llama")] == ["llama-cpp-python==N"]


def test_demo_files_have_their_pinned_bytes() -> None:
    lines = (DEMO / "SHA256SUMS").read_text("utf-8").splitlines()
    pinned = {line.split("  ")[1]: line.split("  ")[0] for line in lines if not line.startswith("#")}
    sizes = {line.split()[1]: int(line.split()[2]) for line in lines if line.startswith("#")}
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.name not in {"SHA256SUMS", "README.md"}}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == pinned
    assert {name: len(data) for name, data in files.items()} == sizes


def test_demo_texts_are_laid_out_like_wikitext() -> None:
    n_articles = {name: len(re.findall(r"(?:\A|\n) \n = [^=\n]+ = \n \n", (DEMO / name).read_text("utf-8")))
                  for name in ("demo-eval.txt", "demo-calibration.txt")}
    assert n_articles == {"demo-eval.txt": 16, "demo-calibration.txt": 7}


def test_demo_texts_share_no_run_of_seven_words() -> None:
    """An importance matrix from text that is measured on would flatter every tier."""
    def runs(name: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", (DEMO / name).read_text("utf-8").lower())
        return set(zip(*(words[i:] for i in range(7)), strict=False))

    assert runs("demo-eval.txt") & runs("demo-calibration.txt") == set()


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """A folder with a space in its path that holds the Makefile, and a PATH with no compiler on it."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    folder, tools = tmp_path / "a folder", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("sh", "make", "cat", "rm"):
        (tools / name).symlink_to(str(shutil.which(name)))
    (tools / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    return folder


def run_make(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code and everything printed, with nothing but the fixture's tools to be found."""
    env = {"PATH": str(folder.parent / "bin"), "CI": "true"}
    done = subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_missing_compiler_is_one_clear_line(bare_checkout: Path, target: str) -> None:
    code, lines = run_make(bare_checkout, target)
    assert (code, len(lines)) == (2, 1)
    assert "expected a C++ compiler to build llama.cpp with, found none that works (tried c++ g++ clang++)" in lines[0]
    assert not (bare_checkout / ".venv").exists()


def test_named_compiler_that_does_not_work_is_told(bare_checkout: Path) -> None:
    code, lines = run_make(bare_checkout, "test", "CXX=no-such-compiler")
    assert (code, len(lines)) == (2, 1)
    assert 'tried "no-such-compiler"' in lines[0]


def test_missing_python_is_one_clear_line(bare_checkout: Path) -> None:
    (bare_checkout.parent / "bin" / "python3").unlink()
    code, lines = run_make(bare_checkout, "test")
    assert (code, len(lines)) == (2, 1)
    assert "expected Python >= 3.11 with its venv module, found none" in lines[0]
