"""Damaged GGUFs: read, described, planned and shown, or refused in a sentence."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest

from quantkit.cli.main import run
from quantkit.core.errors import GgufError, QuantkitError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.plan import resolve_plan
from quantkit.spec.protocol import load_protocol
from tests.fuzz.damage import damage_gguf
from tests.fuzz.laws import fuzz, generator, one_sentence
from tests.gguf_factory import tiny_model

_SLOW_S = 5.0


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    folder = tmp_path_factory.mktemp("sound")
    return [tiny_model(folder / "llama.gguf", n_embd=32, n_ff=32), tiny_model(folder / "mtp.gguf", n_embd=32, n_ff=32, n_nextn=1),
            tiny_model(folder / "moe.gguf", n_embd=32, n_ff=32, n_expert=4),
            tiny_model(folder / "split.gguf", n_embd=32, n_ff=32, n_part=2)]


def write_damaged(sources: list[list[Path]], number: int, folder: Path, kind: str = "") -> tuple[Path, str]:
    """A source with one of its files damaged; any file of it."""
    rng = generator(number)
    source = rng.choice(sources)
    which = rng.randrange(len(source))
    damage = damage_gguf(source[which].read_bytes(), rng, kind)
    for i, path in enumerate(source):
        (folder / path.name).write_bytes(damage.data if i == which else path.read_bytes())
    return folder / rng.choice(source).name, damage.kind


@fuzz(40)
def test_a_damaged_header_is_described_and_planned_or_refused(sources: list[list[Path]], tmp_path_factory: pytest.TempPathFactory,
                                                              number: int) -> None:
    path, kind = write_damaged(sources, number, tmp_path_factory.getbasetemp())
    start = time.process_time()
    with one_sentence():
        header = read_header(path)
        assert kind != "cut", "a file whose tensors are not all there was read"
        model = describe_model(header)
        protocol = load_protocol("demo-v1")
        for tier in protocol.plan.tiers[:2]:
            with contextlib.suppress(QuantkitError):
                resolve_plan(model, tier, protocol.plan, None)
    assert time.process_time() - start < _SLOW_S


@fuzz(15)
def test_show_and_plan_end_with_a_sentence_and_no_traceback(sources: list[list[Path]], tmp_path_factory: pytest.TempPathFactory,
                                                            number: int) -> None:
    path, kind = write_damaged(sources, number, tmp_path_factory.getbasetemp(), "value" if number % 2 else "")
    for arguments in (["show", str(path)], ["show", str(path), "--format", "json"], ["plan", "-b", str(path), "-p", "demo-v1"]):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = run(arguments)
        assert code in (0, 2), error.getvalue()
        assert (kind != "cut") or code == 2
        assert (code == 0) == bool(out.getvalue())
        assert bool(code) == error.getvalue().startswith("quantkit: ") or arguments[0] == "plan", error.getvalue()
        assert "\x1b" not in out.getvalue() + error.getvalue()


def test_only_damage_is_refused(sources: list[list[Path]]) -> None:
    for source in sources:
        for path in source:
            describe_model(read_header(path))
        with pytest.raises(GgufError):
            read_header(source[0].parent / "none.gguf")
