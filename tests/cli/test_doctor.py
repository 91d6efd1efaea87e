"""`quantkit doctor`: the table in three forms, exit codes, and a real worker's answers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli.main import cli, main, run
from quantkit.job.ladder import run_ladder
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model as write_tiny


def ask(words: Sequence[str]) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["doctor", *words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.engine
def test_a_sound_case(tiny_model: Path, tmp_path: Path) -> None:
    code, out, err = ask(["-b", str(tiny_model), "-p", "demo-v1", "-o", str(tmp_path / "run"), "--format", "json"])
    lines = {line["check"]: line for line in json.loads(out)}
    assert code == 0
    assert {line["state"] for line in lines.values()} == {"ok", "not applicable"}
    assert "decoding one chunk with the base" in err
    assert "llama-cpp-python 0.3.36, llama.cpp 0c1e570" in lines["llama.cpp"]["found"]
    assert lines["loading"]["found"] == "llama.cpp reads its 4 trunk blocks, 3 of them recurrent"
    assert "1 NextN block(s): key, block count and tensors agree" in lines["MTP head"]["found"]
    assert "76 of 76 chunks" in lines["evaluation text demo-eval.txt"]["found"]
    assert "one chunk of base took" in lines["time"]["found"]
    assert not (tmp_path / "run").exists()


@pytest.mark.engine
def test_the_stock_mix_is_asked_of_the_library(tiny_model: Path) -> None:
    _, out, _ = ask(["-b", str(tiny_model), "-p", "wikitext2-stock-v1", "--tiers", "Q4_K_M", "--no-measure", "--format", "json"])
    lines = {line["check"]: line for line in json.loads(out)}
    assert lines["plan Q4_K_M"]["found"].startswith("5.06")


@pytest.mark.engine
def test_problems_are_told_whole_below_the_table(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / ("a long name " * 8 + ".gguf"), n_embd=256, n_ff=256, type_name="Q8_0")[0]
    words = ["-b", str(path), "-p", "demo-v1", "--no-measure"]
    code, out, _ = ask(words)
    assert code == 2
    row = next(line for line in out.splitlines() if line.startswith("| source"))
    assert row.split("|")[2].strip() == "problem"
    assert "…" in row
    assert f"- source: expected a base of F32, F16 or BF16 tensors in {path}" in out
    assert "  Fix: start from the unquantized file\n" in out
    assert out.endswith("1 problem(s), 0 warning(s)\n")
    code, out, _ = ask([*words, "--format", "csv"])
    rows = {row["check"]: row for row in csv.DictReader(io.StringIO(out))}
    assert (code, rows["source"]["fix"], rows["locale"]["fix"]) == (2, "start from the unquantized file", "")


def test_a_protocol_that_cannot_be_read_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.job.doctor_case.WorkerPool", DeadPool)
    path = write_tiny(tmp_path / "m.gguf")[0]
    code, out, _ = ask(["-b", str(path), "-p", "no-such", "--format", "json"])
    lines = {line["check"]: line for line in json.loads(out)}
    assert code == 2
    assert (lines["protocol"]["state"], lines["header"]["state"]) == ("problem", "ok")
    assert run(["doctor", "-b", str(path), "-p", "no-such"]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "-b", str(path), "-p", "demo-v1", "--no-measure"])
    assert stop.value.code == 3  # only the library is in the way


class DeadPool:
    """Workers whose library does not load."""

    def __init__(self, *_: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def call(self, *_: object, **__: object) -> None:
        from quantkit.core.errors import EnvironmentFault

        raise EnvironmentFault("llama-cpp-python 0.3.36 cannot be loaded (gone): install it again")


@pytest.mark.engine
def test_a_run_looks_first(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m-F16.gguf", n_embd=256, n_ff=256, type_name="F16", n_nextn=0)[0]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(64))
    words = ["-p", "demo-v1", "--tiers", "Q8_0", "--set", "eval.chunks=first", "--set", "eval.n_chunk=2"]
    result = CliRunner().invoke(cli, ["run", "-b", str(tmp_path / "model"), "-o", str(tmp_path / "run"), *words])
    assert "convert it first with `python convert_hf_to_gguf.py" in str(result.exception)
    assert not (tmp_path / "run").exists()
    notes = Notes()
    protocol = load_protocol("demo-v1", ["eval.chunks=first", "eval.n_chunk=2"])
    assert run_ladder(path, protocol, tmp_path / "run", ["Q8_0"], notes).failed == {}
    assert sum("Tables will name F16 as the base's type" in note for note in notes.notes) == 1


class Notes:
    """A listener that keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, step: str, total: int) -> None: ...

    def advance(self, n: int = 1) -> None: ...

    def finish(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)
