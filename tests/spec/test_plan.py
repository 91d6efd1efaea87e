from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quantkit.core.errors import GgufError, ImatrixError, PlanError
from quantkit.core.files import canonical_json
from quantkit.core.units import MIB
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, stock_plan
from quantkit.spec.protocol import Tier
from quantkit.spec.tensor_types import FALLBACKS, FTYPES, TENSOR_TYPES
from tests.spec.plan_models import lengths, model_of, resolve, rule, rules, tiny, types


def stock(model: ModelInfo, type_: str, ftype: str, *, imatrix: Any = None, mtp_type: str = "", **changed: str) -> Plan:
    """A stock plan of one type for every matrix, but those named by their last words."""
    mix = {t.name: t.type.name if len(t.shape) < 2 else type_ for t in model.header.tensors}
    for name in mix:
        for ending, other in changed.items():
            if name.removesuffix(".weight").endswith(ending):
                mix[name] = other
    tier = Tier(name="T", ftype=ftype, default=FTYPES[ftype].default_type, rules=())
    return stock_plan(model, tier, mix, imatrix, mtp_type=mtp_type)


@pytest.fixture(scope="module")
def shape_27b(shared: Path) -> ModelInfo:
    spec = importlib.util.spec_from_file_location("make_shape27b", shared / "models" / "make_shape27b.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = {name: (shape[::-1], type_.name) for name, shape, type_ in module.tensors(False)}
    return model_of(tensors, {"qwen35.block_count": 64}, arch="qwen35")


class TestSize:
    def test_q8_0_of_27b_is_what_llama_quantize_says(self, shape_27b: ModelInfo) -> None:
        plan = resolve(shape_27b, default="Q8_0", ftype="Q8_0")
        assert (len(plan.rows), f"{plan.size_bytes / MIB:.2f}") == (851, "27260.56")

    def test_stock_q6_k_of_27b_is_what_llama_quantize_says(self, shape_27b: ModelInfo) -> None:
        assert f"{stock(shape_27b, 'Q6_K', 'Q6_K').size_bytes / MIB:.2f}" == "21049.06"

    def test_gates_at_q8_0_cost_a_few_mib(self, shape_27b: ModelInfo) -> None:
        guarded, other = resolve(shape_27b, default="Q6_K", ftype="Q6_K"), stock(shape_27b, "Q6_K", "Q6_K")
        assert guarded.size_bytes - other.size_bytes == 48 * 2 * 48 * (5120 // 32 * 34 - 5120 // 256 * 210)

    def test_by_hand(self) -> None:
        tensors = {"token_embd.weight": ((64, 3), "BF16"), "output_norm.weight": ((3,), "F32"),
                   "blk.0.attn_q.weight": ((64, 2), "BF16")}
        plan = resolve(model_of(tensors, {"llama.block_count": 1}), default="Q8_0", ftype="Q8_0")
        # rows of two blocks of 34 bytes; three floats; padded to 32 one by one
        assert [row.size_bytes for row in plan.rows] == [3 * 68, 12, 2 * 68]
        assert (plan.size_bytes, plan.tensor_bytes) == (352, 224 + 32 + 160)
        assert plan.bpw == 8 * 352 / (192 + 3 + 128)
        assert plan.bpw_core == 8 * (12 + 136) / (3 + 128)

    def test_experts_count_every_matrix(self) -> None:
        row = next(r for r in resolve(tiny(n_expert=4), default="Q8_0", ftype="Q8_0").rows if "ffn_up_exps" in r.name)
        assert row.size_bytes == 4 * 512 * 256 // 32 * 34

    def test_core_leaves_embedding_output_and_mtp_out(self) -> None:
        plan = resolve(tiny(n_nextn=1), rule("output.weight", "BF16"), rule("token_embd.weight", "BF16"), mtp_type="BF16",
                       default="Q8_0")
        core = [row for row in plan.rows if row.role == "trunk"]
        assert plan.bpw_core == 8 * sum(r.size_bytes for r in core) / sum(r.n_elements for r in core)
        assert plan.bpw > plan.bpw_core
        assert not [row.name for row in core if row.name.startswith(("blk.8.", "output.", "token_embd"))]

    def test_types_by_parameters_and_bytes(self) -> None:
        plan = resolve(tiny(n_block=1), rule("output.weight", "Q8_0"), default="Q4_K")
        assert {t.type: (t.n_tensors, t.n_params, t.size_bytes) for t in plan.types} == {
            "Q4_K": (8, 256 * (260 + 4 * 256 + 3 * 512), 144 * (260 + 4 * 256 + 3 * 512)),
            "Q8_0": (1, 256 * 260, 272 * 260), "F32": (3, 768, 3072)}


class TestBase:
    def test_a_quantized_base_is_refused_by_names(self, shared: Path) -> None:
        with pytest.raises(PlanError, match=r"F32, F16 or BF16 tensors in .*Q4_K_M\.gguf, got output\.weight \(Q6_K\), .*more"):
            resolve(describe_model(read_header(shared / "oracle" / "stock-Q4_K_M.gguf")))

    def test_one_quantized_tensor_is_enough(self) -> None:
        with pytest.raises(PlanError, match=r"got blk\.0\.ffn_up\.weight \(Q8_0\): quantizing twice"):
            resolve(tiny(more={"blk.0.ffn_up.weight": ((256, 512), "Q8_0")}))

    def test_a_matrix_that_cannot_be_converted_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"got blk\.0\.x\.weight \(I32\)"):
            resolve(tiny(more={"blk.0.x.weight": ((256, 2), "I32")}))

    def test_an_integer_table_that_is_kept_is_no_fault(self) -> None:
        plan = resolve(tiny(more={"blk.0.ffn_gate_tid2eid.weight": ((256, 2), "I32")}))
        assert types(plan)["blk.0.ffn_gate_tid2eid.weight"] == "I32"

    def test_another_alignment_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"general.alignment = 32 in base.gguf, got 64: .*cannot be loaded"):
            resolve(tiny(alignment=64))

    def test_a_base_that_contradicts_itself_is_refused(self) -> None:
        with pytest.raises(GgufError, match="nextn"):
            resolve(tiny(n_nextn=1, without=".nextn."))

    def test_a_matrix_of_four_dimensions_stays(self) -> None:
        plan = resolve(tiny(more={"blk.0.x.weight": ((256, 2, 2, 2), "BF16")}))
        assert (types(plan)["blk.0.x.weight"], rules(plan)["blk.0.x.weight"]) == ("BF16", "keep: 4-D")
        assert plan.overrides()["blk.0.x.weight"] == "BF16"


class TestUnquantizedTier:
    def test_may_have_its_own_type_everywhere(self) -> None:
        assert set(resolve(tiny(), default="BF16", ftype="BF16").overrides().values()) == {"BF16"}

    def test_and_nothing_else(self) -> None:
        for refused in ({"default": "Q8_0"}, {"mtp_type": "Q8_0"}, {"common": (rule("output.weight", "Q8_0"),)}):
            with pytest.raises(PlanError, match="ignores tensor types in a file of ftype F16"):
                resolve(tiny(n_nextn=1), **{"default": "F16", "ftype": "F16", **refused})  # type: ignore[arg-type]


class TestSubstitution:
    @pytest.mark.parametrize(("wanted", "expected"),
                             [(t, f) for t, f in FALLBACKS.items() if TENSOR_TYPES[t].block_size == 256])
    def test_rows_of_288_get_the_librarys_fallback(self, wanted: str, expected: str) -> None:
        plan = resolve(tiny(n_embd=288, n_block=1), default=wanted)
        row = next(r for r in plan.rows if r.name == "output.weight")
        assert (row.type, row.wanted, row.change) == (expected, wanted, "substituted")
        assert row.rule == f"substituted from {wanted}, 288 is not divisible by 256 (default)"

    @pytest.mark.parametrize("wanted", ["Q4_K", "Q8_0", "IQ4_NL", "Q2_K", "MXFP4"])
    def test_rows_of_100_become_f16(self, wanted: str) -> None:
        assert types(resolve(tiny(n_embd=100), default=wanted))["output.weight"] == "F16"

    def test_a_type_without_fallback_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"divisible by 128 for Q1_0, got 288 in token_embd\.weight"):
            resolve(tiny(n_embd=288), default="Q1_0")

    def test_marks_the_tier_with_shares(self) -> None:
        plan = resolve(tiny(n_embd=288, n_ff=512, n_block=2), default="Q4_K")
        assert {row.type for row in plan.substituted} == {"Q5_0"}
        assert len(plan.substituted) == 14
        kept = sum(row.n_elements for row in plan.rows if row.type in ("Q4_K", "F32"))
        assert plan.share_params(plan.substituted) == 1 - kept / plan.n_params
        assert re.match(r"14 of 21 tensors substituted, .* \(82\.6% of parameters, 84\.9% of bytes\)", plan.notes()[0])
        assert resolve(tiny()).notes() == ()

    def test_can_be_forbidden(self) -> None:
        with pytest.raises(PlanError, match=r"'fail', and 14 tensors .*token_embd\.weight substituted from Q4_K"):
            resolve(tiny(n_embd=288, n_block=2), on_substitute="fail")
        assert resolve(tiny(), on_substitute="fail") == resolve(tiny())

    def test_embedding_and_output_are_checked_like_the_rest(self) -> None:
        found = types(resolve(tiny(n_embd=288), rule("token_embd.weight", "Q6_K"), default="Q8_0"))
        assert found["token_embd.weight"] == "Q8_0"


class TestImportances:
    NO_DOWN = "ffn_down"

    def test_not_known_yet_means_complete(self) -> None:
        model = tiny()
        complete = lengths(model, without="token_embd")
        assert resolve(model, default="IQ2_XXS") == resolve(model, default="IQ2_XXS", imatrix=complete)

    @pytest.mark.parametrize(("wanted", "expected"), [
        ("IQ1_S", "Q2_K"), ("IQ1_M", "Q2_K"), ("IQ2_XXS", "Q2_K"), ("IQ2_XS", "Q2_K"), ("IQ2_S", "Q2_K"), ("IQ3_XXS", "Q3_K")])
    def test_a_default_without_importances_moves_up_visibly(self, wanted: str, expected: str) -> None:
        model = tiny()
        plan = resolve(model, default=wanted, imatrix=lengths(model, without=self.NO_DOWN))
        assert {row.type for row in plan.no_imatrix} == {expected}
        assert [row.name for row in plan.no_imatrix] == [f"blk.{i}.ffn_down.weight" for i in range(8)]
        assert rules(plan)["blk.0.ffn_down.weight"] == f"no imatrix for {wanted} (default)"
        assert plan.notes()[0].startswith("8 of 75 tensors at a type that needs no importances")

    @pytest.mark.parametrize("wanted", ["IQ3_S", "IQ4_XS", "Q2_K", "Q3_K", "TQ1_0"])
    def test_other_types_need_none(self, wanted: str) -> None:
        assert set(resolve(tiny(), default=wanted, imatrix={}).overrides().values()) == {wanted}

    def test_q2_k_needs_them_inside_q2_k_s_only(self) -> None:
        model = tiny(n_block=1)
        plan = resolve(model, default="Q2_K", ftype="Q2_K_S", imatrix=lengths(model, without=self.NO_DOWN))
        assert (types(plan)["blk.0.ffn_down.weight"], types(plan)["blk.0.ffn_up.weight"]) == ("Q3_K", "Q2_K")
        two_steps = resolve(model, default="IQ2_XXS", ftype="Q2_K_S", imatrix=lengths(model, without=self.NO_DOWN))
        assert types(two_steps)["blk.0.ffn_down.weight"] == "Q3_K"

    def test_embedding_and_output_are_exempt_but_from_what_aborts(self) -> None:
        model = tiny(n_block=1)
        matrix = {name: n for name, n in lengths(model).items() if name.startswith("blk.")}
        for wanted, expected in {"IQ1_M": "IQ1_M", "IQ3_XXS": "IQ3_XXS", "IQ1_S": "Q2_K", "IQ2_XS": "Q2_K"}.items():
            found = types(resolve(model, default=wanted, imatrix=matrix))
            assert (found["output.weight"], found["token_embd.weight"]) == (expected, expected)

    def test_an_embedding_that_is_looked_up_never_has_any(self) -> None:
        untied, tied = (resolve(tiny(tied=t), default="IQ2_XXS") for t in (False, True))
        assert (types(untied)["token_embd.weight"], types(untied)["output.weight"]) == ("Q2_K", "IQ2_XXS")
        assert types(tied)["token_embd.weight"] == "IQ2_XXS"

    def test_a_shape_fallback_comes_first(self) -> None:
        plan = resolve(tiny(n_embd=288, n_ff=288), default="IQ2_XXS", imatrix={})
        assert {row.change for row in plan.rows} == {"", "substituted"}

    @pytest.mark.parametrize("how", ["rule", "mtp_type"])
    def test_a_type_that_the_protocol_names_for_the_tensor_is_refused(self, how: str) -> None:
        model = tiny(n_nextn=1)
        matrix = lengths(model, without="blk.8.")
        plan = ({"mtp_type": "IQ2_XXS"}, ()) if how == "mtp_type" else ({}, (rule("blk.8.*", "IQ2_XXS"),))
        with pytest.raises(PlanError, match=r"there are none for blk\.8\.attn_q\.weight \(IQ2_XXS\), .*collect a matrix"):
            resolve(model, *plan[1], imatrix=matrix, **plan[0])  # type: ignore[arg-type]
        assert types(resolve(model, *plan[1], imatrix=lengths(model), **plan[0]))["blk.8.attn_q.weight"] == "IQ2_XXS"  # type: ignore[arg-type]

    def test_no_matrix_at_all_is_refused_where_one_is_needed(self) -> None:
        with pytest.raises(PlanError, match="tier T needs an importance matrix, and there is none: 56 tensors"):
            resolve(tiny(), default="IQ1_M", imatrix={})

    def test_can_be_forbidden(self) -> None:
        model = tiny()
        with pytest.raises(PlanError, match=r"'fail', and 8 tensors .* no imatrix for IQ2_S"):
            resolve(model, default="IQ2_S", on_substitute="fail", imatrix=lengths(model, without=self.NO_DOWN))

    @pytest.mark.parametrize("default", ["IQ2_S", "Q4_K"])
    def test_a_wrong_length_is_refused_for_any_type(self, default: str) -> None:
        model = tiny(n_expert=4)
        matrix = lengths(model) | {"blk.3.ffn_up_exps.weight": 1023}
        with pytest.raises(ImatrixError, match=r"expected 1024 importances for blk\.3\.ffn_up_exps\.weight .* got 1023"):
            resolve(model, default=default, imatrix=matrix)


class TestStock:
    def test_shows_the_mix_as_it_is(self) -> None:
        model = tiny(more={"blk.0.ssm_alpha.weight": ((256, 8), "BF16")})
        plan = stock(model, "Q4_K", "Q4_K_M", output="Q6_K", ffn_down="Q6_K")
        asked = ["output.weight", "blk.0.ffn_down.weight", "blk.0.ssm_alpha.weight"]
        assert [types(plan)[name] for name in asked] == ["Q6_K", "Q6_K", "Q4_K"]
        assert set(rules(plan).values()) == {"stock", "keep: norm"}

    def test_the_mtp_block_can_be_pinned(self) -> None:
        plan = stock(tiny(n_nextn=1), "IQ1_M", "IQ1_M", mtp_type="Q8_0")
        assert (types(plan)["blk.8.attn_q.weight"], rules(plan)["blk.8.attn_q.weight"]) == ("Q8_0", "mtp_type")
        assert types(stock(tiny(n_nextn=1), "IQ1_M", "IQ1_M"))["blk.8.attn_q.weight"] == "IQ1_M"

    def test_what_the_matrix_lacks_moves_up(self) -> None:
        model = tiny(n_nextn=1)
        plan = stock(model, "IQ1_M", "IQ1_M", imatrix=lengths(model, without="blk.8."))
        assert types(plan)["blk.8.attn_q.weight"] == "Q2_K"
        assert rules(plan)["blk.8.attn_q.weight"] == "no imatrix for IQ1_M (stock)"

    @pytest.mark.parametrize(("type_", "ftype", "n_embd", "expected"), [
        ("Q5_0", "Q4_K_M", 288, "substituted"), ("F16", "Q8_0", 100, "substituted"), ("Q8_0", "Q4_0", 288, "substituted"),
        ("Q8_0", "Q8_0", 288, ""), ("Q8_0", "MXFP4_MOE", 288, ""), ("Q5_1", "Q5_0", 288, ""), ("Q8_0", "Q4_K_M", 256, ""),
        ("BF16", "BF16", 100, "")])
    def test_the_librarys_own_fallbacks_are_recognised(self, type_: str, ftype: str, n_embd: int, expected: str) -> None:
        row = next(r for r in stock(tiny(n_embd=n_embd), type_, ftype).rows if r.name == "blk.0.attn_q.weight")
        assert row.change == expected

    def test_every_tensor_must_have_been_told(self) -> None:
        with pytest.raises(PlanError, match=r"from the dry run, got none for token_embd\.weight, .* and 70 more"):
            stock_plan(tiny(), Tier(name="T", ftype="Q4_K_M", default="Q4_K", rules=()), {}, None)


class TestOverrides:
    def test_one_anchored_escaped_pattern_for_each_quantizable_tensor(self) -> None:
        plan = resolve(tiny(n_block=11), rule("blk.1.ffn_down.weight", "Q8_0"))
        patterns = plan.override_patterns()
        assert ("^blk\\.1\\.ffn_down\\.weight$", "Q8_0") in patterns
        assert len(patterns) == len(plan.overrides()) == 2 + 11 * 7
        for row in plan.rows:  # each name is hit by its own pattern alone
            hits = [o.type for o in patterns if re.search(o.pattern, row.name)]
            assert hits == ([row.type] if row.quantizable else [])

    def test_syntax_characters_of_a_name_are_escaped(self) -> None:
        plan = resolve(tiny(more={r"a+b(c)[d]{e}|f?g*h^i$j\k/.weight": ((256, 2), "BF16")}))
        assert re.escape(r"a+b(c)[d]{e}|f?g*h^i$j\k/.weight").replace("/", r"\/") in plan.override_patterns()[-1].pattern


class TestJson:
    @pytest.fixture
    def plan(self) -> Plan:
        return resolve(tiny(n_embd=288, n_nextn=1, tied=True), rule("*.ffn_down.weight", "Q6_K", layers="0"), mtp_type="Q8_0")

    def test_round_trip(self, plan: Plan) -> None:
        assert Plan.from_json(json.loads(canonical_json(plan.to_json()))) == plan

    def test_is_deterministic(self, plan: Plan) -> None:
        again = resolve(tiny(n_embd=288, n_nextn=1, tied=True), rule("*.ffn_down.weight", "Q6_K", layers="0"), mtp_type="Q8_0")
        assert canonical_json(again.to_json()) == canonical_json(plan.to_json())

    @pytest.mark.parametrize("value", [None, [], {}, {"rows": 3}, {"tier": "T", "ftype": "Q4_K_M", "rows": [{}]}])
    def test_something_else_is_refused(self, value: Any) -> None:
        with pytest.raises(PlanError, match="expected a plan of schema 1"):
            Plan.from_json(value)

    def test_a_plan_changed_by_hand_is_refused(self, plan: Plan) -> None:
        value = copy.deepcopy(plan.to_json())
        value["bpw"] = 1.0
        with pytest.raises(PlanError, match="got another bpw"):
            Plan.from_json(value)
        value = copy.deepcopy(plan.to_json())
        value["rows"][0]["type"] = "Q2_K"
        with pytest.raises(PlanError, match="plan the tier again"):
            Plan.from_json(value)
