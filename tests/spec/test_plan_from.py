"""The plan of any file: applied to its base it gives the file's types, by as few rules as say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import PlanError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import as_mapping
from quantkit.spec.plan_from import Difference, apply_to_base, as_base, differences, extract_protocol, require_same_tensors
from quantkit.spec.plan_rules import kept_by_plan
from quantkit.spec.protocol import load_protocol, parse_protocol, write_protocol
from tests.gguf_factory import Tensors, model_metadata, model_tensors
from tests.spec.plan_models import model_of, tiny

TEMPLATE = load_protocol("wikitext2-v1")
TYPES = ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "IQ2_S", "Q2_K", "BF16", "F32"]


def quantized(base: ModelInfo, types: dict[str, str], default: str = "Q4_K") -> ModelInfo:
    """The file that a base becomes: matrices of some types, the rest as it is."""
    tensors: Tensors = {t.name: (t.shape, t.type.name if kept_by_plan(t, "llama") else types.get(t.name, default))
                        for t in base.header.tensors}
    return model_of(tensors, base.header.metadata)


def rules(model: ModelInfo) -> list[tuple[str, str, str]]:
    tier = extract_protocol(model, TEMPLATE).plan.tiers[0]
    return [("default", "", tier.default), *((r.match, r.layers, r.type) for r in tier.rules)]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), n_nextn=st.sampled_from([0, 1]), n_expert=st.sampled_from([0, 2]), tied=st.booleans())
@pytest.mark.slow
def test_law_of_giving_the_file_again(data: st.DataObject, n_nextn: int, n_expert: int, tied: bool) -> None:
    """Whatever types the matrices have."""
    base = tiny(n_embd=256, n_ff=256, n_block=3, n_nextn=n_nextn, n_expert=n_expert, tied=tied)
    few = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    model = quantized(base, {t.name: data.draw(st.sampled_from(few)) for t in base.header.tensors})
    plan = apply_to_base(extract_protocol(model, TEMPLATE), base)
    assert as_mapping(plan.rows) == {t.name: t.type.name for t in model.header.tensors}
    assert differences(model, plan) == []


def test_a_file_of_two_float_types_can_be_made_again() -> None:
    base = tiny(n_block=3)
    model = quantized(base, {"blk.2.ffn_down.weight": "F32"}, default="BF16")
    plan = apply_to_base(extract_protocol(model, TEMPLATE), base)
    assert as_mapping(plan.rows) == {t.name: t.type.name for t in model.header.tensors}
    assert plan.ftype == "Q8_0"


def test_what_all_blocks_share_is_one_glob_and_runs_are_ranges() -> None:
    base = tiny(n_block=6, n_nextn=1)
    types = {f"blk.{i}.attn_v.weight": "Q6_K" for i in range(7)}
    types |= {f"blk.{i}.ffn_down.weight": "Q6_K" if i in (0, 1, 5) else "Q5_K" if i == 3 else "Q4_K" for i in range(6)}
    types |= {"output.weight": "Q6_K", "blk.6.ffn_down.weight": "Q8_0"}
    assert rules(quantized(base, types)) == [
        ("default", "", "Q4_K"), ("output.weight", "", "Q6_K"), ("blk.*.attn_v.weight", "", "Q6_K"),
        ("blk.*.ffn_down.weight", "0-1", "Q6_K"), ("blk.*.ffn_down.weight", "3", "Q5_K"), ("blk.*.ffn_down.weight", "5", "Q6_K"),
        ("blk.6.ffn_down.weight", "", "Q8_0")]


def test_a_name_that_a_glob_cannot_tell_apart_is_named_in_full() -> None:
    more: Tensors = {"blk.1.x.attn_q.weight": ((256, 256), "BF16"), "blk.0.a[1]*.weight": ((256, 256), "BF16")}
    base = tiny(n_block=2, more=more)
    model = quantized(base, {"blk.0.attn_q.weight": "Q6_K", "blk.1.attn_q.weight": "Q6_K", "blk.0.a[1]*.weight": "Q8_0"})
    assert rules(model)[1:] == [("blk.0.attn_q.weight", "", "Q6_K"), ("blk.1.attn_q.weight", "", "Q6_K"),
                                ("blk.*.a[[]1][*].weight", "", "Q8_0")]
    assert differences(model, apply_to_base(extract_protocol(model, TEMPLATE), base)) == []


def test_everything_but_the_plan_is_the_templates() -> None:
    made = extract_protocol(quantized(tiny(), {}), TEMPLATE)
    assert made.plan_id != TEMPLATE.plan_id
    assert (made.eval_id, made.imatrix_id, made.mtp_id) == (TEMPLATE.eval_id, TEMPLATE.imatrix_id, TEMPLATE.mtp_id)
    assert parse_protocol(write_protocol(made)) == made
    assert (made.name, made.title, made.plan.tiers[0].name) == ("from-base", "Tensor types of base.gguf", "base")


def test_gates_below_the_floor_are_named_in_full_and_so_reached() -> None:
    more: Tensors = {f"blk.{i}.ssm_alpha.weight": ((256, 8), "BF16") for i in range(2)}
    base = tiny(n_block=2, more=more)
    model = quantized(base, dict.fromkeys(more, "Q3_K"))
    assert rules(model)[1:] == [("blk.0.ssm_alpha.weight", "", "Q3_K"), ("blk.1.ssm_alpha.weight", "", "Q3_K")]
    assert differences(model, apply_to_base(extract_protocol(model, TEMPLATE), base)) == []


def test_what_no_plan_chooses_is_told() -> None:
    more: Tensors = {"blk.0.ssm_dt.weight": ((256, 256), "BF16")}
    base = tiny(n_block=1, more=more)
    model = model_of({t.name: (t.shape, "Q8_0" if t.name in more else t.type.name) for t in base.header.tensors},
                     base.header.metadata)
    found = differences(model, apply_to_base(extract_protocol(model, TEMPLATE), base))
    assert found == [Difference("blk.0.ssm_dt.weight", "Q8_0", "BF16", "keep: ssm_dt")]


@pytest.mark.parametrize(("ftype", "types", "expected"), [
    (15, {}, "Q4_K_M"), (14, {}, "Q4_K_S"),
    (None, {}, "Q4_K_S"),                # unknown: the first of the default type
    (999, {}, "Q4_K_S"),
    (32, {"output.weight": "BF16"}, "Q4_K_S"),  # a file of ftype BF16 could hold no other type
])
def test_ftype_is_the_files_own_or_one_that_can_hold_its_types(ftype: int | None, types: dict[str, str], expected: str) -> None:
    base = tiny(n_block=2)
    keys = {**base.header.metadata, **({} if ftype is None else {"general.file_type": ftype})}
    if ftype is None:
        del keys["general.file_type"]
    model = model_of({t.name: (t.shape, t.type.name) for t in quantized(base, types).header.tensors}, keys)
    assert extract_protocol(model, TEMPLATE).plan.tiers[0].ftype == expected


def test_a_head_that_only_the_base_has_is_the_templates() -> None:
    """Many publishers strip it."""
    base = tiny(n_block=2, n_nextn=1)
    model = quantized(tiny(n_block=2), {"output.weight": "Q6_K"})
    require_same_tensors(model, base)
    made = extract_protocol(model, TEMPLATE)
    plan = apply_to_base(made, base)
    assert made.plan.mtp_type == "Q8_0"
    assert differences(model, plan) == []
    assert {row.type for row in plan.rows if row.role == "mtp" and row.quantizable} == {"Q8_0"}


@pytest.mark.parametrize(("base", "expected"), [
    (tiny(n_block=3), r"the base has tensors that the file lacks, blk\.2\.attn_norm\.weight"),
    (tiny(n_block=1), r"expected its 21 tensors there, missing blk\.1\.attn_norm\.weight"),
    (tiny(n_block=2, n_ff=768), r"expected equal shapes, got blk\.0\.ffn_gate\.weight \(256, 512\), in the base \(256, 768\)"),
])
def test_another_base_is_refused_by_names_and_shapes(base: ModelInfo, expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        require_same_tensors(quantized(tiny(n_block=2), {}), base)


def test_types_that_nobody_can_write_are_refused() -> None:
    tensors = {**model_tensors(n_embd=256, n_ff=256), "output.weight": ((256, 260), "NVFP4")}
    with pytest.raises(PlanError, match=r"expected types that llama\.cpp can write in base\.gguf, got output\.weight \(NVFP4\)"):
        extract_protocol(model_of(tensors, model_metadata(n_embd=256, n_ff=256)), TEMPLATE)


@pytest.mark.parametrize(("name", "n_rules"), [("Q8_0", 0), ("Q4_K_M", 11), ("IQ2_S", 19), ("IQ1_M", 19)])
def test_llama_cpps_own_files(tiny_model: Path, shared: Path, name: str, n_rules: int) -> None:
    """Whatever its mix did to a model with recurrent blocks and an MTP head."""
    model = describe_model(read_header(shared / "oracle" / f"stock-{name}.gguf"))
    made = extract_protocol(model, TEMPLATE)
    assert len(made.plan.tiers[0].rules) == n_rules
    for base in (describe_model(read_header(tiny_model)), as_base(model)):
        assert differences(model, apply_to_base(made, base)) == []
