"""The command line as a user meets it: exit codes, one clear sentence, help at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.cli.main import VERBS, run
from tests.gguf_factory import tiny_model


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "m-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0
    assert out.startswith(f"Usage: quantkit {verb}")


@pytest.mark.system
def test_help_lists_every_verb_and_imports_none() -> None:
    script = ("import sys\nfrom quantkit.cli.main import run\ncode = run(['--help'])\n"
              "heavy = {'numpy', 'llama_cpp', 'pandas', 'pyarrow', 'scipy', 'gguf'} & set(sys.modules)\n"
              "sys.exit(code or len(heavy))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert [verb for verb in VERBS if f"  {verb} " not in done.stdout] == []


@pytest.mark.parametrize("arguments", [
    ["show", "missing.gguf"], ["show"], ["nothing"], ["plan", "-b", "missing.gguf", "-p", "demo-v1"],
    ["audit", "missing.gguf", "-b", "missing.gguf", "-p", "demo-v1", "-o", "out"],
    ["run", "-b", "missing.gguf", "-p", "demo-v1", "-o", "out"], ["run", "-b", "missing.gguf", "-p", "no-such", "-o", "out"],
    ["report", "missing"], ["quantize", "-b", "missing.gguf", "-p", "demo-v1", "-t", "Q8_0", "-o", "out.gguf"],
    ["imatrix", "-b", "missing.gguf", "-p", "demo-v1", "-o", "out.gguf"],
], ids=lambda arguments: " ".join(arguments[:3]))
def test_wrong_input_is_told_in_one_sentence_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.strip() != ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_quantize_writes_a_file_and_never_over_an_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    before = model.read_bytes()
    target = tmp_path / "new folder" / "q8.gguf"
    arguments: list[str | Path] = ["quantize", "-b", model, "-p", "demo-v1", "-t", "Q8_0"]
    code, out, _ = call(capsys, *arguments, "-o", target)
    assert code == 0
    assert out.startswith(f"{target}: ")
    code, _, err = call(capsys, *arguments, "-o", target)
    assert code == 2
    assert "exists" in err
    assert call(capsys, *arguments, "-o", target, "--force")[0] == 0
    link, hard = tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(model)
    hard.hardlink_to(model)
    for name in (model, model.parent / "x" / ".." / model.name, link, hard):
        code, _, err = call(capsys, *arguments, "-o", name, "--force")
        assert code == 2
        assert "input" in err
    assert model.read_bytes() == before


@pytest.mark.engine
def test_quantize_writes_several_tiers_into_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    arguments: list[str | Path] = ["quantize", "-b", model, "-p", "demo-v1", "-t", "Q6_K", "-t", "Q8_0"]
    code, out, _ = call(capsys, *arguments, "-o", tmp_path / "a folder")
    assert code == 0
    written = [tmp_path / "a folder" / f"{model.stem.removesuffix('-BF16')}-{tier}.gguf" for tier in ("Q8_0", "Q6_K")]
    assert [line.split(":")[0] for line in out.splitlines()] == [str(path) for path in written]
    assert call(capsys, "quantize", "-b", model, "-p", "demo-v1", "-t", "Q6_K", "-o", tmp_path / "alone.gguf")[0] == 0
    assert written[1].read_bytes() == (tmp_path / "alone.gguf").read_bytes()
    code, _, err = call(capsys, *arguments, "-o", tmp_path / "a folder")
    assert (code, "exists" in err) == (2, True)


@pytest.mark.engine
def test_quantize_never_writes_over_a_shard_of_its_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parts = tiny_model(tmp_path / "m-BF16.gguf", n_embd=256, n_ff=256, n_part=3)
    before = [part.read_bytes() for part in parts]
    code, _, err = call(capsys, "quantize", "-b", parts[0], "-p", "demo-v1", "-t", "Q8_0", "-o", parts[1], "--force")
    assert code == 2
    assert "input" in err
    assert [part.read_bytes() for part in parts] == before
    assert call(capsys, "quantize", "-b", parts[0], "-p", "demo-v1", "-t", "Q8_0", "-o", tmp_path / "whole.gguf")[0] == 0
    parts[1].unlink()
    code, _, err = call(capsys, "quantize", "-b", parts[0], "-p", "demo-v1", "-t", "Q8_0", "-o", tmp_path / "other.gguf")
    assert code == 2
    assert parts[1].name in err


@pytest.mark.engine
def test_a_tier_that_needs_importances_is_refused_without_them(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                               model: Path) -> None:
    code, _, err = call(capsys, "quantize", "-b", model, "-p", "demo-v1", "-t", "IQ2_S", "-o", tmp_path / "q.gguf")
    assert code == 2
    assert "needs an importance matrix" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_no_space_is_told_before_the_work(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    code, _, err = call(capsys, "quantize", "-b", model, "-p", "demo-v1", "-t", "Q8_0", "-o", tmp_path / "q.gguf")
    assert code == 3
    assert "needs" in err
    assert "1000 B free" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_audit_and_report_print_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    settings = [part for s in ("eval.chunks=spread", "eval.n_chunk=8", "floors.n_chunk=4") for part in ("--set", s)]
    code, out, err = call(capsys, "audit", model, "-b", model, "-p", "demo-v1", "-o", tmp_path / "run", *settings)
    assert code == 0, err
    assert "| BF16 |" in out
    assert "memory at most" in err
    assert call(capsys, "report", tmp_path / "run")[1] == out.removesuffix("\n")
    csv = call(capsys, "report", tmp_path / "run", "--format", "csv")[1]
    assert csv.startswith("tier,file,size_bytes,size_vs_base,bpw,n_chunk,n_scored,ppl_base,ppl_q,ln_ppl_ratio,ln_ppl_ratio_se,"
                          "kld_mean,kld_mean_se,kld_p999,p_diff_mean,p_diff_rms,same_top_p,same_top_p_se")
    assert len(csv.splitlines()) == 3
