"""`quantkit refpack` and `audit --ref` as a user meets them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from quantkit.cli.audit import audit
from quantkit.cli.main import run
from quantkit.cli.refpack import refpack
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.engine

PROTOCOL = ["-p", "demo-v1", "--set", "eval.chunks=spread", "--set", "eval.n_chunk=8"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "m-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.fixture(scope="module")
def pack(base: Path) -> Path:
    path = base.parent / "ref.safetensors"
    refpack.main(["make", "-b", str(base), *PROTOCOL, "--set", "refpack.mass=0.9", "-o", str(path)], standalone_mode=False)
    return path


def test_show_says_what_the_pack_belongs_to(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refpack.main(["show", str(pack), "--format", "json"], standalone_mode=False)
    shown = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (shown["protocol"], shown["base"], shown["chunks"], shown["mass asked for"]) == ("demo-v1", "m-BF16.gguf", 8, 0.9)
    assert 220 < float(shown["mean ids a row"]) < 260
    assert "of llama-perplexity's base file" in shown["size"]


def test_an_audit_against_a_pack_says_so_beside_the_number(base: Path, pack: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    audit.main([str(base), "--ref", str(pack), *PROTOCOL, "-o", str(tmp_path / "run")], standalone_mode=False)
    out = capsys.readouterr().out
    assert "| m-BF16 ‡ |" in out
    assert "ref: pack, mass 0.9: KLD is a lower bound, short by an estimated 0 ± 0 nats" in out
    with (tmp_path / "run" / "report" / "retention.csv").open() as file:
        rows = {row["tier"]: row for row in csv.DictReader(file)}
    assert rows["m-BF16"]["notes"].startswith("ref: pack, mass 0.9")
    assert rows["BF16"]["notes"] == ""
    assert [rows["m-BF16"][name] for name in ("ref", "ref_mass", "kld_shortfall")] == ["pack", "0.9", "0.0"]
    assert run(["verify", str(tmp_path / "run"), "--remeasure", "1", "--seed", "1", "--ref", str(pack)]) == 0
    assert "m-BF16 is not in the bundle" in capsys.readouterr().out


def test_an_audit_needs_a_base_or_a_pack(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["audit", str(base), *PROTOCOL, "-o", str(tmp_path / "run")])
    assert code == 2
    assert "'--base', or '--ref'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["--ref", "{pack}"], ["--remeasure", "1", "--ref", "{pack}", "-b", "{base}"],
                                   ["--regenerate", "--ref", "{pack}"]])
def test_a_pack_is_for_remeasuring_and_for_nothing_else(base: Path, pack: Path, tmp_path: Path, words: list[str],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path), *(word.format(pack=pack, base=base) for word in words)]) == 2
    assert "--ref PACK" in capsys.readouterr().err
