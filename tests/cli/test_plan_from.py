"""`quantkit plan --from`: a file's plan as a protocol that `quantize` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli.plan import plan
from quantkit.core.errors import InputError, PlanError
from quantkit.job.progress import Silent
from quantkit.job.standalone import quantize_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.protocol import load_protocol, parse_protocol


def run(*words: object) -> Result:
    return CliRunner().invoke(plan, [str(word) for word in words], catch_exceptions=False)


def types(path: Path) -> dict[str, str]:
    return {t.name: t.type.name for t in read_header(path).tensors}


@pytest.mark.engine
def test_a_published_file_is_made_again(shared: Path, tiny_model: Path, tmp_path: Path) -> None:
    published = shared / "oracle" / "stock-Q8_0.gguf"
    done = run("--from", published, "-b", tiny_model, "-o", tmp_path / "plan.toml")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "tier stock-Q8_0: 0 rules above Q8_0 give 71 of 71 tensors the file's type\n"
    quantize_to_file(tiny_model, load_protocol(tmp_path / "plan.toml"), "stock-Q8_0", tmp_path / "again.gguf", Silent())
    assert types(tmp_path / "again.gguf") == types(published)


def test_without_output_it_is_printed_and_without_base_held_against_itself(shared: Path) -> None:
    done = run("--from", shared / "oracle" / "stock-Q4_K_M.gguf", "-p", "demo-v1", "--set", "eval.n_ubatch=64")
    protocol = parse_protocol(done.stdout.encode())
    assert (protocol.eval.n_ctx, protocol.derived) == (128, ("eval.n_ubatch=64",))
    assert done.stderr == "tier stock-Q4_K_M: 11 rules above Q4_K give 71 of 71 tensors the file's type\n"


def test_an_existing_file_stays_unless_forced(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("mine")
    words = ("--from", shared / "oracle" / "stock-Q8_0.gguf", "-o", tmp_path / "plan.toml")
    with pytest.raises(InputError, match="exists already"):
        run(*words)
    assert (tmp_path / "plan.toml").read_text() == "mine"
    assert run(*words, "--force").exit_code == 0


def test_another_base_is_refused(shared: Path, moe_model: Path) -> None:
    with pytest.raises(PlanError, match=r"is not of the base .*expected its 71 tensors there, missing output\.weight"):
        run("--from", shared / "oracle" / "stock-Q8_0.gguf", "-b", moe_model)


@pytest.mark.parametrize(("words", "expected"), [
    ([], "a plan needs -b and -p, or --from MODEL"),
    (["-b", "x.gguf"], "a plan needs -b and -p, or --from MODEL"),
    (["-b", "x.gguf", "-p", "demo-v1", "-o", "y"], "-o and --force go with --from only"),
    (["--from", "x.gguf", "-t", "Q8_0"], "--from goes with -b, -p, --set, -o and --force only"),
    (["--from", "x.gguf", "--format", "json"], "--from goes with -b, -p, --set, -o and --force only"),
])
def test_options_that_do_not_go_together(words: list[str], expected: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert expected in done.stderr
