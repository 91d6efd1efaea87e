"""`quantkit protocol`: what is printed can be read back, and exit codes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from quantkit.cli.main import run
from quantkit.spec.protocol import derive_protocol, known_protocols, load_protocol, parse_protocol, protocol_path
from quantkit.spec.protocol_lock import read_lock

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine-v1.toml"
    path.write_text(protocol_path("demo-v1").read_text("utf-8").replace('name = "demo-v1"', 'name = "mine-v1"'), "utf-8")
    return path


class TestShow:
    def test_prints_a_protocol_file_with_its_ids(self, capsys: Capture) -> None:
        assert run(["protocol", "show", "demo-v1"]) == 0
        out = capsys.readouterr().out
        protocol = load_protocol("demo-v1")
        assert parse_protocol(out.encode()) == protocol
        assert out.startswith(f"# protocol_id {protocol.protocol_id}\n# eval_id {protocol.eval_id}\n")

    def test_derived(self, capsys: Capture) -> None:
        settings = ["eval.chunks=spread", "eval.n_chunk=8"]
        assert run(["protocol", "show", "demo-v1", "--set", settings[0], "--set", settings[1]]) == 0
        assert parse_protocol(capsys.readouterr().out.encode()) == derive_protocol(load_protocol("demo-v1"), settings)

    def test_json(self, capsys: Capture) -> None:
        assert run(["protocol", "show", "demo-v1", "--format", "json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["ids"] == load_protocol("demo-v1").ids()
        assert value["locked"] == "demo-v1"
        assert value["protocol"]["eval"]["n_ctx"] == 128

    def test_json_of_a_derived_one_is_not_locked(self, capsys: Capture) -> None:
        assert run(["protocol", "show", "demo-v1", "--set", "gate.alpha=0.01", "--format", "json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert (value["locked"], value["protocol"]["derived"]) == (None, ["gate.alpha=0.01"])

    def test_unknown(self, capsys: Capture) -> None:
        assert run(["protocol", "show", "nothing"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("quantkit: expected a path to a .toml file or a packaged protocol (demo-v1, ")


class TestCheck:
    def test_all_packaged(self, capsys: Capture) -> None:
        assert run(["protocol", "check", "--format", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["name"], row["state"]) for row in rows] == [(name, "locked") for name in known_protocols()]
        assert [row["eval_id"] for row in rows] == [load_protocol(name).eval_id for name in known_protocols()]

    def test_a_file_that_is_not_locked(self, mine: Path, capsys: Capture) -> None:
        assert run(["protocol", "check", str(mine), "--format", "csv"]) == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [(row["name"], row["state"]) for row in rows] == [("mine-v1", "not locked")]

    def test_a_changed_one_fails(self, mine: Path, capsys: Capture) -> None:
        run(["protocol", "lock", str(mine)])
        mine.write_text(mine.read_text("utf-8").replace("dead_ratio = 0.5", "dead_ratio = 0.25"), "utf-8")
        capsys.readouterr()
        assert run(["protocol", "check", str(mine)]) == 1
        captured = capsys.readouterr()
        assert "| mine-v1 | changed |" in captured.out
        assert "has changed: expected the protocol_id, mtp_id that LOCK holds" in captured.err

    def test_an_invalid_one_is_an_input_error(self, mine: Path, capsys: Capture) -> None:
        mine.write_text(mine.read_text("utf-8").replace("n_ctx = 128", "n_ctx = 127"), "utf-8")
        assert run(["protocol", "check", str(mine)]) == 2
        assert f"{mine}: eval.n_ctx: expected an even number of at least 8, got 127" in capsys.readouterr().err


class TestLock:
    def test_adds_to_the_lock_beside_the_file(self, mine: Path, capsys: Capture) -> None:
        assert run(["protocol", "lock", str(mine)]) == 0
        assert capsys.readouterr().err == "mine-v1: locked\n"
        assert read_lock(mine.parent) == {"mine-v1": load_protocol(mine).ids()}
        assert run(["protocol", "lock", str(mine)]) == 0
        assert capsys.readouterr().err == "mine-v1: was locked already\n"

    def test_needs_a_protocol(self, capsys: Capture) -> None:
        assert run(["protocol", "lock"]) == 2
        assert "Missing argument" in capsys.readouterr().err
