"""Very many rules, and files of nothing or of almost nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quantkit.core.errors import PlanError
from quantkit.spec.layers import layer_range
from quantkit.spec.plan_rules import choose_types
from quantkit.spec.protocol import PlanSpec, Tier
from tests.cli.test_main import call
from tests.gguf_factory import tiny_model
from tests.spec.plan_models import resolve, rule, tiny, types


@pytest.mark.timeout(60)
def test_two_thousand_rules_on_a_model_of_many_tensors() -> None:
    """64 blocks, 500 of them named tensor by tensor and the rest by globs: each tensor gets exactly its type."""
    model = tiny(n_block=64)
    names = [t.name for t in model.header.tensors if t.name.startswith("blk.") and "norm" not in t.name]
    assert len(names) == 448
    wanted = {name: ("Q8_0", "Q6_K", "Q5_K")[i % 3] for i, name in enumerate(names)}
    rules = [rule(name, type_) for name, type_ in wanted.items()]
    rules += [rule(f"blk.{i % 64}.*", at_least="Q3_K", optional=True) for i in range(2000 - len(rules))]
    random.Random(0).shuffle(rules)
    assert len(rules) == 2000
    found = types(resolve(model, *rules))
    assert {name: found[name] for name in names} == wanted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("glob", ["*a" * 99 + "b", "*?" * 99 + "!", "*" * 199 + "!", "[!x]*" * 39 + "!", "*[a-z]" * 33 + "!"])
def test_a_glob_of_many_stars_is_matched_soon(glob: str) -> None:
    """Each names 63 bytes that almost match: a matcher that tries every way would not come back."""
    assert len(glob) <= 200
    name = "blk.0." + "a" * 50 + ".weight"
    model = tiny(n_block=1, more={name: ((256, 256), "BF16")})
    with pytest.raises(PlanError, match="matches none of the"):
        resolve(model, rule(glob, "Q8_0"))


def test_shares_of_layers_are_counted_without_walking_them() -> None:
    assert len(layer_range("first 1/8", 1_000_000)) == 125_000


def test_no_rule_reaches_the_native_library_as_a_pattern() -> None:
    """What it gets are whole names, anchored, every sign of its syntax escaped."""
    evil = "(a+)+$.weight"
    model = tiny(n_block=1, more={evil: ((256, 256), "BF16")})
    tier = Tier(name="T", ftype="Q4_K_M", default="Q4_K", rules=(rule("(a+)+$*", "Q8_0"),))
    spec = PlanSpec(ladder="guarded", on_substitute="mark", mtp_mode="inside", mtp_type="", rules=(), tiers=(tier,))
    assert choose_types(model, tier, spec)[evil].type == "Q8_0"
    patterns = [override.pattern for override in resolve(model, rule("(a+)+$*", "Q8_0")).override_patterns()]
    assert r"^\(a\+\)\+\$\.weight$" in patterns
    assert all(pattern.startswith("^") and pattern.endswith("$") for pattern in patterns)


READERS = [line.split() for line in """
    show {}
    plan -b {} -p demo-v1
    plan -b {model} -p {}
    run -b {} -p demo-v1 -o out
    audit {} -b {model} -p demo-v1 -o out
    audit {model} -b {} -p demo-v1 -o out
    quantize -b {} -p demo-v1 -t Q8_0 -o out
    imatrix -b {} -p demo-v1 -o out
    imatrix show {}
    split {} -o out --max-size 1GB
    merge {} -o out
    mtp split {} --trunk a --head b
    fit {}
    verify {}
    report {}
    compare {} {}
    gate {} --against {} -p demo-v1
    publish {} --repo a/b
    refpack show {}
""".strip().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_embd=256, n_ff=256)[0]


@pytest.mark.parametrize("content", [b"", b"\0", b"GGUF", b"\xff" * 4096], ids=["empty", "a zero", "four letters", "ones"])
@pytest.mark.parametrize("words", READERS, ids=" ".join)
@pytest.mark.system
def test_a_file_of_nothing_is_one_clear_error(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              model: Path, words: list[str], content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nothing.gguf"
    path.write_bytes(content)
    code, out, err = call(capsys, *(word.format(path, model=model) for word in words))
    assert code == 2, err
    assert err.startswith("quantkit: "), err  # and no usage error
    assert out == ""
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["nothing.gguf"]


@pytest.mark.parametrize("verb", ["show", "plan"])
def test_a_sparse_file_of_a_terabyte_of_zeros_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                                 verb: str) -> None:
    path = tmp_path / "zeros.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    code, out, err = call(capsys, "show", path) if verb == "show" else call(capsys, "plan", "-b", path, "-p", "demo-v1")
    assert (code, out) == (2, "")
    assert "zeros.gguf: expected" in err
