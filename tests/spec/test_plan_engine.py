"""Plans against llama.cpp itself, by its dry run: what we predict is what it would write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.core.units import MIB
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import as_mapping, stock_plan
from quantkit.spec.protocol import Tier
from quantkit.spec.tensor_types import FALLBACKS, FTYPES, TENSOR_TYPES
from tests.gguf_factory import model_metadata, model_tensors, tiny_gguf
from tests.gguf_factory import tiny_model as write_tiny
from tests.spec.plan_models import resolve, rule

pytestmark = pytest.mark.engine

# arguments: file, ftype id, then pattern and type id in turns
DRY_RUN = """
import ctypes, sys, llama_cpp
path, ftype, *pairs = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.dry_run = int(ftype), True
overrides = (llama_cpp.llama_model_tensor_override * (len(pairs) // 2 + 1))()
for slot, pattern, type_id in zip(overrides, pairs[::2], pairs[1::2]):
    slot.pattern, slot.type = pattern.encode(), int(type_id)
if pairs:
    params.tt_overrides = ctypes.cast(overrides, dict(type(params)._fields_)["tt_overrides"])
sys.exit(llama_cpp.llama_model_quantize(path.encode(), b"", ctypes.byref(params)))
"""
_TENSOR = re.compile(r"^\[ *\d+/ *\d+\] (\S+) +- \[.*\], type = +(\S+), size = .*?(?:\((\S+)\))?$", re.MULTILINE)


def dry_run(path: Path, ftype: str, overrides: dict[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Types by tensor, and the total in MiB as it is printed."""
    pairs = [text for pattern, type_ in (overrides or {}).items() for text in (pattern, str(TENSOR_TYPES[type_].id))]
    done = subprocess.run([sys.executable, "-c", DRY_RUN, str(path), str(FTYPES[ftype].id), *pairs], capture_output=True,
                          encoding="utf-8", check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    total = re.search(r"quant size += +(\S+) MiB", log)
    assert total is not None
    return {match[1]: (match[3] or match[2]).upper() for match in _TENSOR.finditer(log)}, total[1]


def model_at(path: Path) -> ModelInfo:
    return describe_model(read_header(path))


def test_overrides_give_exactly_the_plan(tiny_model: Path) -> None:
    rules = [rule("output.weight", "Q6_K"), rule("*.attn_*.weight", at_least="Q5_K"), rule("*.ssm_beta.weight", "F32"),
             rule("blk.*.ffn_down.weight", "Q8_0", layers="first 1/8")]
    plan = resolve(model_at(tiny_model), *rules, default="Q3_K", ftype="Q3_K_M", mtp_type="Q8_0")

    found, total = dry_run(tiny_model, "Q3_K_M", dict(plan.override_patterns()))

    assert found == as_mapping(plan.rows)
    assert total == f"{plan.size_bytes / MIB:.2f}"


def test_pinning_two_layers_moves_no_other(tiny_model: Path) -> None:
    """The library's own mix would: its layer counters skip what a pattern names."""
    model = model_at(tiny_model)
    tier = Tier(name="T", ftype="Q4_K_M", default="Q4_K", rules=())
    plan = stock_plan(model, tier, dry_run(tiny_model, "Q4_K_M")[0], None)
    pins = {"^blk\\.0\\.ffn_down\\.weight$": "Q8_0", "^blk\\.1\\.ffn_down\\.weight$": "Q8_0"}
    pinned = {"blk.0.ffn_down.weight": "Q8_0", "blk.1.ffn_down.weight": "Q8_0"}

    naive = dry_run(tiny_model, "Q4_K_M", pins)[0]
    complete = dry_run(tiny_model, "Q4_K_M", {**dict(plan.override_patterns()), **pins})[0]

    assert complete == as_mapping(plan.rows) | pinned
    assert naive != complete


def test_patterns_with_syntax_characters_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    odd = r"a+b(c)[d]{e}|f?g*h^i$j\k/l-m,n.weight"
    tiny_gguf(path, {**model_tensors(n_embd=256, n_block=1), odd: ((256, 2), "BF16")}, model_metadata(n_embd=256, n_block=1))
    plan = resolve(model_at(path), rule("a+b*", "Q8_0"))

    assert dry_run(path, "Q4_K_M", dict(plan.override_patterns()))[0] == as_mapping(plan.rows)


@pytest.mark.parametrize("n_embd", [288, 100])
def test_fallbacks_are_the_librarys(tmp_path: Path, n_embd: int) -> None:
    path = tmp_path / "odd.gguf"
    write_tiny(path, n_embd=n_embd, n_ff=n_embd, n_block=4)
    wanted = [*(t for t in FALLBACKS if t != "Q8_1"), "F16", "BF16", "F32"]
    matrices = [t.name for t in model_at(path).header.tensors if len(t.shape) > 1]
    assert len(matrices) >= len(wanted)
    rules = [rule(name, type_) for name, type_ in zip(matrices, wanted, strict=False)]
    plan = resolve(model_at(path), *rules)

    wanted_types = [row.wanted for row in plan.rows if row.quantizable]
    asked = {override.pattern: type_ for override, type_ in zip(plan.override_patterns(), wanted_types, strict=True)}

    assert dry_run(path, "Q4_K_M", asked)[0] == as_mapping(plan.rows)
    assert set(wanted) <= {row.wanted for row in plan.rows}


@pytest.mark.parametrize(("ftype", "expected"), [
    ("Q8_0", "27260.56"), ("Q6_K", "21049.06"), ("Q5_K_M", "18329.72"), ("Q4_K_M", "15770.35"), ("Q3_K_M", "12674.76"),
    ("IQ2_S", "8918.69"), ("IQ1_M", "7267.08")])
def test_stock_sizes_of_27b(shape_27b: Path, ftype: str, expected: str) -> None:
    types, total = dry_run(shape_27b, ftype)
    tier = Tier(name="T", ftype=ftype, default=FTYPES[ftype].default_type, rules=())
    plan = stock_plan(model_at(shape_27b), tier, types, None)
    assert (f"{plan.size_bytes / MIB:.2f}", total) == (expected, expected)


@pytest.fixture(scope="module")
def shape_27b(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "27b.gguf"
    subprocess.run([sys.executable, shared / "models" / "make_shape27b.py", path], check=True)
    return path
