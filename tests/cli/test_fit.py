"""`quantkit fit`: the three forms, a card that is too small, and a library that cannot help."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli.fit import fit
from quantkit.core.errors import EngineError, InputError
from quantkit.core.units import MIB
from quantkit.job.fit import keep_base, read_base, record_base
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import RESERVE_BYTES
from quantkit.spec.model import describe_model
from tests.gguf_factory import tiny_model as write_tiny


class DeadPool:
    """Workers whose library fails at once."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> DeadPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, *_: Any, **__: Any) -> None:
        raise EngineError("no library here")


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.job.fit.WorkerPool", DeadPool)


def ask(words: Sequence[str]) -> tuple[str, str]:
    result = CliRunner().invoke(fit, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


@pytest.mark.usefixtures("without_library")
def test_formulas_stand_in_and_say_so(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a model.gguf")[0]
    text, notes = ask([str(path), "--ctx", "1024", "--vram", "600MiB"])
    assert "no library here; estimating from the header instead" in notes
    assert text.startswith("a model.gguf\n\n|")
    assert "| KV cache, F16         | 512.00 KiB" in text
    assert "| smallest card         | 8 GiB" in text
    assert "| fits 600.00 MiB       | yes, " in text
    assert "by formula from the header" in text


@pytest.mark.usefixtures("without_library")
def test_json_and_csv_agree_and_say_whether_it_fits(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")[0]
    words = [str(path), "--kv", "q8_0", "--vram", "512MiB", "--format"]
    data = json.loads(ask([*words, "json"])[0])
    rows = list(csv.DictReader(io.StringIO(ask([*words, "csv"])[0])))
    assert [row["n_ctx"] for row in data] == [8192, 32768]
    assert [row["kv_type"] for row in rows] == ["Q8_0", "Q8_0"]
    assert [int(row["needed_bytes"]) for row in rows] == [row["needed_bytes"] for row in data]
    assert data[0]["reserve_bytes"] == RESERVE_BYTES
    assert (data[0]["vram_bytes"], data[0]["fits"]) == (512 * MIB, False)


@pytest.mark.usefixtures("without_library")
def test_neither_way_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", metadata={"llama.wkv.head_size": 64})[0]
    with pytest.raises(InputError, match=r"cannot be told from its header \(llama\.wkv\.head_size\)"):
        CliRunner().invoke(fit, [str(path)], catch_exceptions=False)


@pytest.mark.engine
def test_the_library_is_asked_first(tiny_model: Path) -> None:
    text, _ = ask([str(tiny_model)])
    assert "as llama.cpp's CPU build would allocate them" in text
    assert "The MTP block, 1.88 MiB, is in the sum" in text


def test_a_run_keeps_what_its_reports_say_of_the_base(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "m.gguf")[0]
    run = RunFolder(path=tmp_path / "run")
    assert read_base(run) is None
    record_base(run, describe_model(read_header(base)), DeadPool(), Silent())  # type: ignore[arg-type]
    held = read_base(run)
    assert held is not None
    assert [m.n_ctx for m in held.memory] == [512]  # what it was trained for
    before = (run.path / "base.json").stat().st_mtime_ns
    record_base(run, describe_model(read_header(base)), DeadPool(), Silent())  # type: ignore[arg-type]
    assert (run.path / "base.json").stat().st_mtime_ns == before


def test_a_run_without_the_record_reads_a_tiers_header(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path / "run")
    run.quants.mkdir(parents=True)
    write_tiny(run.quants / "m-Q8_0.gguf")
    held = read_base(run)
    assert held is not None
    assert held.memory[0].source == "header"
    assert not (run.path / "base.json").exists()  # reading writes nothing
    keep_base(run)
    (run.quants / "m-Q8_0.gguf").unlink()
    assert read_base(run) == held
