"""`quantkit split` and `merge`."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quantkit.cli.merge import merge
from quantkit.cli.split import split
from quantkit.core.errors import InputError
from quantkit.core.units import format_bytes
from tests.gguf_factory import tiny_model as write_tiny


def call(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "a model.gguf")[0]


def test_split_and_merged_again(model: Path, tmp_path: Path) -> None:
    done = call(split, model, "--max-size", "100kB", "-o", tmp_path / "new folder" / "m.gguf")
    lines = [line.removeprefix(f"{tmp_path}/new folder/") for line in done.stdout.splitlines()]
    assert lines == ["m-00001-of-00003.gguf: 94.59 KiB, 8 tensors", "m-00002-of-00003.gguf: 89.19 KiB, 10 tensors",
                     "m-00003-of-00003.gguf: 48.28 KiB, 3 tensors"]
    done = call(merge, tmp_path / "new folder" / "m-00003-of-00003.gguf", "-o", tmp_path / "again.gguf")
    assert done.stdout == f"{tmp_path}/again.gguf: {format_bytes(model.stat().st_size)}, 21 tensors\n"
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()


def test_the_default_limit_is_the_hubs(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a model larger than 50000000000 bytes"):
        call(split, model, "-o", tmp_path / "m")


@pytest.mark.parametrize("size", ["0", "12", "big", "-5GB"])
def test_sizes_that_cannot_be(model: Path, tmp_path: Path, size: str) -> None:
    with pytest.raises(InputError):
        call(split, model, f"--max-size={size}", "-o", tmp_path / "m")
    assert list(tmp_path.iterdir()) == [model]
