"""`quantkit mtp split|strip|graft` on the command line; check and matrix run llama.cpp and are tested with the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli.mtp import mtp
from quantkit.core.errors import InputError
from tests.mtp_factory import headed_model


def call(*arguments: object) -> Result:
    return CliRunner().invoke(mtp, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return headed_model(tmp_path / "model.gguf")[0]


def test_split_and_graft_tell_what_they_wrote(model: Path, tmp_path: Path) -> None:
    trunk, head, again = tmp_path / "t.gguf", tmp_path / "h.gguf", tmp_path / "again.gguf"
    done = call("split", model, "--trunk", trunk, "--head", head)
    assert done.exit_code == 0
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [str(trunk), str(head)]
    done = call("graft", trunk, head, "-o", again)
    assert (done.exit_code, done.stderr) == (0, "")
    assert again.read_bytes() == model.read_bytes()
    assert done.stdout.startswith(f"{again}: 34 tensors, ")


def test_strip_needs_force_to_replace(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.gguf"
    assert call("strip", model, "-o", target).exit_code == 0
    again = call("strip", model, "-o", target)
    assert isinstance(again.exception, InputError)
    assert "--force" in str(again.exception)
    assert call("strip", model, "-o", target, "--force").exit_code == 0


def test_graft_says_which_copies_of_the_head_file_it_leaves_behind(tmp_path: Path) -> None:
    trunk = headed_model(tmp_path / "trunk.gguf", n_nextn=0, type_name="Q8_0")[0]
    head = headed_model(tmp_path / "head.gguf")[0]
    done = call("graft", trunk, head, "-o", tmp_path / "out.gguf")
    assert "token_embd.weight: the head file's own copy (BF16) is left behind, the trunk's (Q8_0) takes its place" in done.stderr


@pytest.mark.parametrize("arguments", [("split", "m.gguf"), ("check", "m.gguf"), ("matrix",), ("graft", "a.gguf", "-o", "b.gguf")])
def test_what_is_missing_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert "Missing" in done.stderr


def test_shares_that_are_no_numbers_are_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    done = call("check", model, "-p", "demo-v1", "-o", tmp_path / "run", "--tensor-split", "a,b")
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "run").exists()
