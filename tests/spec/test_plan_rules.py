from __future__ import annotations

from typing import ClassVar

import pytest

from quantkit.core.errors import PlanError
from quantkit.spec.plan_rules import count_rule_uses
from quantkit.spec.protocol import PlanSpec, Rule, Tier
from tests.spec.plan_models import resolve, rule, rules, tiny, types


class TestDefault:
    def test_every_matrix_gets_the_default_and_says_so(self) -> None:
        plan = resolve(tiny(n_block=1))
        assert types(plan) == {
            "token_embd.weight": "Q4_K", "output.weight": "Q4_K", "output_norm.weight": "F32", "blk.0.attn_norm.weight": "F32",
            "blk.0.ffn_norm.weight": "F32", "blk.0.attn_q.weight": "Q4_K", "blk.0.attn_k.weight": "Q4_K",
            "blk.0.attn_v.weight": "Q4_K", "blk.0.attn_output.weight": "Q4_K", "blk.0.ffn_gate.weight": "Q4_K",
            "blk.0.ffn_up.weight": "Q4_K", "blk.0.ffn_down.weight": "Q4_K"}
        assert set(rules(plan).values()) == {"default", "keep: norm"}

    def test_no_row_names_a_rule_that_nobody_wrote(self) -> None:
        model = tiny(n_nextn=1, tied=True, more={"blk.0.ssm_alpha.weight": ((256, 8), "BF16")})
        assert not [text for text in rules(resolve(model, mtp_type="Q8_0")).values() if "rule" in text]


class TestMatching:
    def test_a_glob_is_the_whole_name(self) -> None:
        plan = resolve(tiny(), rule("output.weight", "Q8_0"))
        assert [row.name for row in plan.rows if row.type == "Q8_0"] == ["output.weight"]
        assert rules(plan)["output.weight"] == "rule 1: output.weight"

    def test_block_1_is_not_block_10(self) -> None:
        plan = resolve(tiny(n_block=12), rule("blk.1.ffn_down.weight", "Q8_0"))
        assert [row.name for row in plan.rows if row.type == "Q8_0"] == ["blk.1.ffn_down.weight"]

    @pytest.mark.parametrize("match", ["blk.99.*", "BLK.0.ATTN_Q.WEIGHT", "attn_q", "*.attn_qkv.weight"])
    def test_a_rule_that_matches_nothing_is_refused(self, match: str) -> None:
        with pytest.raises(PlanError, match=r"tier T, rule 1: .* matches none of the"):
            resolve(tiny(), rule(match, "Q8_0"))

    def test_unless_it_is_optional(self) -> None:
        assert resolve(tiny(), rule("*.attn_qkv.weight", "Q8_0", optional=True)) == resolve(tiny())

    def test_a_glob_may_cover_norms_too(self) -> None:
        plan = resolve(tiny(n_block=1), rule("blk.*", "Q6_K"))
        assert (types(plan)["blk.0.attn_q.weight"], types(plan)["blk.0.attn_norm.weight"]) == ("Q6_K", "F32")

    @pytest.mark.parametrize(("name", "shape", "type_", "why"), [
        ("blk.0.ssm_conv1d.weight", (4, 256), "F32", "short convolution, F32"),
        ("blk.0.ffn_gate_inp.weight", (256, 4), "F32", "expert gate, F32"),
        ("blk.0.ssm_dt.weight", (32, 256), "BF16", "ssm_dt, BF16"),
        ("blk.0.ssm_a", (256,), "F32", "1-D, F32"),
        ("blk.0.attn_norm.weight", (256,), "F32", "norm, F32")])
    def test_a_rule_on_what_keeps_its_type_is_refused(self, name: str, shape: tuple[int, ...], type_: str, why: str) -> None:
        model = tiny(more={name: (shape, type_)})
        message = f"1 that keep their type, the first {name} \\({why}\\)"
        with pytest.raises(PlanError, match=message):
            resolve(model, rule(name, "Q8_0"))
        if len(shape) > 1:
            with pytest.raises(PlanError, match=message):
                resolve(model, rule(name, "Q8_0", optional=True))

    def test_an_optional_glob_may_find_norms_alone(self) -> None:
        """As `blk.*.attn_*` does in a model without attention."""
        model = tiny(without=".attn_", more={"blk.0.attn_norm.weight": ((256,), "F32")})
        assert resolve(model, rule("blk.*.attn_*.weight", "Q8_0", optional=True)) == resolve(model)


class TestRanks:
    def test_a_tiers_rule_overrides_a_common_one_and_a_layer_range_both(self) -> None:
        down = "blk.*.ffn_down.weight"
        plan = resolve(tiny(n_block=3), rule(down, "Q5_K"), rule(down, "Q8_0", layers="2"), common=(rule(down, "Q6_K"),
                                                                                                 rule("*attn_v*", "Q6_K")))
        found = {row.name: (row.type, row.rule) for row in plan.rows}
        assert found["blk.0.ffn_down.weight"] == ("Q5_K", "rule 1: blk.*.ffn_down.weight")
        assert found["blk.2.ffn_down.weight"] == ("Q8_0", "rule 2: blk.*.ffn_down.weight in layers 2")
        assert found["blk.2.attn_v.weight"] == ("Q6_K", "common rule 2: *attn_v*")

    @pytest.mark.parametrize("order", [1, -1])
    def test_two_types_at_one_rank_contradict(self, order: int) -> None:
        two = [rule("*.attn_*.weight", "Q6_K"), rule("*.attn_v.weight", "Q8_0")][::order]
        with pytest.raises(PlanError, match=r"contradict each other for blk\.0\.attn_v\.weight: rule 1: .*, rule 2: .*narrow"):
            resolve(tiny(), *two)

    def test_even_where_a_higher_rank_would_decide(self) -> None:
        two = (rule("*.attn_*.weight", "Q6_K"), rule("*.attn_v.weight", "Q8_0"))
        with pytest.raises(PlanError, match="contradict"):
            resolve(tiny(), rule("*.attn_v.weight", "Q5_K"), common=two)

    def test_one_type_twice_is_no_contradiction(self) -> None:
        plan = resolve(tiny(), rule("*.attn_*.weight", "Q6_K"), rule("*.attn_v.weight", "Q6_K"))
        assert types(plan)["blk.0.attn_v.weight"] == "Q6_K"


class TestFloors:
    @pytest.mark.parametrize(("default", "floor", "expected"), [
        ("Q4_K", "Q6_K", "Q6_K"), ("Q8_0", "Q6_K", "Q8_0"), ("Q4_K", "Q4_0", "Q4_K"), ("IQ4_XS", "Q4_K", "Q4_K"),
        ("Q3_K", "IQ3_XXS", "Q3_K"), ("Q6_K", "BF16", "BF16")])
    def test_raise_by_bits_and_never_lower(self, default: str, floor: str, expected: str) -> None:
        plan = resolve(tiny(), rule("output.weight", at_least=floor), default=default)
        assert types(plan)["output.weight"] == expected

    def test_a_common_floor_holds_against_a_tiers_own_type(self) -> None:
        plan = resolve(tiny(), rule("*.ffn_down.weight", "Q3_K"), common=(rule("*.ffn_down.weight", at_least="Q5_K"),))
        assert (types(plan)["blk.0.ffn_down.weight"], rules(plan)["blk.0.ffn_down.weight"]) == (
            "Q5_K", "common rule 1: *.ffn_down.weight at least Q5_K")

    @pytest.mark.parametrize("order", [1, -1])
    def test_of_two_floors_of_equal_bits_the_same_one_wins_in_any_order(self, order: int) -> None:
        two = [rule("output.weight", at_least="Q5_0"), rule("output.weight", at_least="Q5_K")][::order]
        assert types(resolve(tiny(), *two))["output.weight"] == "Q5_K"


class TestGates:
    """Errors of state gates add up along a sequence."""

    MORE: ClassVar = {f"blk.0.ssm_{name}.weight": ((256, 8), "BF16") for name in ("alpha", "beta", "ba")}

    @pytest.mark.parametrize(("default", "expected"), [("Q4_K", "Q8_0"), ("Q8_0", "Q8_0"), ("BF16", "BF16"), ("F32", "F32")])
    def test_are_never_below_q8_0(self, default: str, expected: str) -> None:
        found = types(resolve(tiny(more=self.MORE), default=default))
        assert {found[name] for name in self.MORE} == {expected}

    def test_the_plan_says_what_raised_them(self) -> None:
        plan = resolve(tiny(more=self.MORE), rule("*.ssm_beta.weight", "Q4_K"), rule("*.ssm_ba.weight", "F32"))
        assert {name: rules(plan)[name] for name in self.MORE} == {
            "blk.0.ssm_alpha.weight": "gate floor Q8_0, above default",
            "blk.0.ssm_beta.weight": "gate floor Q8_0, above rule 1: *.ssm_beta.weight",
            "blk.0.ssm_ba.weight": "rule 2: *.ssm_ba.weight"}

    def test_a_rule_with_the_whole_name_means_it(self) -> None:
        plan = resolve(tiny(more=self.MORE), rule("blk.0.ssm_beta.weight", "Q4_K"), rule("blk.?.ssm_ba.weight", "Q4_K"))
        assert [types(plan)[f"blk.0.ssm_{name}.weight"] for name in ("alpha", "beta", "ba")] == ["Q8_0", "Q4_K", "Q8_0"]

    def test_the_rest_of_the_recurrence_stays(self) -> None:
        more = {"blk.0.ssm_conv1d.weight": ((4, 256), "F32"), "blk.0.ssm_a": ((16, 256), "F32"),
                "blk.0.ssm_dt.bias": ((256,), "F32"), "blk.0.ssm_dt.weight": ((32, 256), "BF16")}
        plan = resolve(tiny(more=more))
        assert {name: types(plan)[name] for name in more} == {name: type_ for name, (_, type_) in more.items()}
        assert plan.overrides()["blk.0.ssm_dt.weight"] == "BF16"  # the library would quantize it


class TestMtp:
    def test_the_whole_block_gets_mtp_type(self) -> None:
        plan = resolve(tiny(n_block=2, n_nextn=1), mtp_type="Q8_0")
        block = {row.name: (row.type, row.rule) for row in plan.rows if row.name.startswith("blk.2.") and row.quantizable}
        assert len(block) == 8
        assert set(block.values()) == {("Q8_0", "mtp_type")}

    def test_rules_pass_it_by(self) -> None:
        plan = resolve(tiny(n_block=2, n_nextn=1), rule("blk.*", "Q6_K"), rule("*", at_least="BF16"), mtp_type="Q5_K")
        assert types(plan)["blk.2.ffn_down.weight"] == "Q5_K"

    def test_a_rule_for_it_alone_is_refused_unless_optional(self) -> None:
        model = tiny(n_block=2, n_nextn=1)
        with pytest.raises(PlanError, match=r"MTP block only, whose type is plan\.mtp_type"):
            resolve(model, rule("blk.2.*", "Q6_K"), mtp_type="Q8_0")
        assert types(resolve(model, rule("blk.2.*", "Q6_K", optional=True), mtp_type="Q8_0"))["blk.2.attn_q.weight"] == "Q8_0"

    def test_without_mtp_type_rules_reach_it_and_layer_ranges_do_not(self) -> None:
        two = rule("*.attn_q.weight", "Q6_K"), rule("*.attn_v.weight", "Q6_K", layers="last 1/2")
        found = types(resolve(tiny(n_block=2, n_nextn=1), *two))
        assert [found[f"blk.{i}.attn_q.weight"] for i in range(3)] == ["Q6_K", "Q6_K", "Q6_K"]
        assert [found[f"blk.{i}.attn_v.weight"] for i in range(3)] == ["Q4_K", "Q6_K", "Q4_K"]

    def test_its_gates_have_the_floor_too(self) -> None:
        model = tiny(n_block=2, n_nextn=1, more={"blk.2.ssm_alpha.weight": ((256, 8), "BF16")})
        assert types(resolve(model, mtp_type="Q4_K"))["blk.2.ssm_alpha.weight"] == "Q8_0"

    @pytest.mark.parametrize("n_block", [15, 16])
    def test_it_never_moves_the_trunks_types(self, n_block: int) -> None:
        edges = (rule("*.ffn_down.weight", "Q6_K", layers="first 1/8"), rule("*.attn_v.weight", "Q8_0", layers="last 1/8"))
        alone, beside = (types(resolve(tiny(n_block=n_block, n_nextn=n), *edges, mtp_type="Q8_0")) for n in (0, 1))
        assert alone.items() <= beside.items()


class TestLayers:
    @pytest.mark.parametrize(("layers", "expected"), [
        ("", list(range(16))), ("3", [3]), ("2-4", [2, 3, 4]), ("first 1/8", [0, 1]), ("last 1/8", [14, 15]),
        ("14-99", [14, 15])])
    def test_ranges(self, layers: str, expected: list[int]) -> None:
        found = types(resolve(tiny(n_block=16), rule("*.ffn_down.weight", "Q6_K", layers=layers)))
        assert [i for i in range(16) if found[f"blk.{i}.ffn_down.weight"] == "Q6_K"] == expected

    def test_a_small_model_has_its_one_layer_of_each(self) -> None:
        found = types(resolve(tiny(n_block=4), rule("*.ffn_down.weight", "Q6_K", layers="first 1/8")))
        assert [found[f"blk.{i}.ffn_down.weight"] for i in range(4)] == ["Q6_K", "Q4_K", "Q4_K", "Q4_K"]

    def test_tensors_outside_the_blocks_are_in_no_range(self) -> None:
        assert types(resolve(tiny(), rule("*", "Q8_0", layers="0-99")))["output.weight"] == "Q4_K"

    def test_a_range_beyond_the_trunk_is_refused(self) -> None:
        with pytest.raises(PlanError, match="in the 8 trunk layers"):
            resolve(tiny(n_nextn=1), rule("blk.*", "Q6_K", layers="8-9"))


class TestTied:
    @pytest.mark.parametrize(("of_embedding", "of_output", "expected"), [
        ([], [], "Q4_K"),
        ([], [rule("output.weight", "Q6_K")], "Q6_K"),
        ([rule("token_embd.weight", "Q2_K")], [], "Q2_K"),
        ([rule("token_embd.weight", "Q2_K")], [rule("output.weight", "Q6_K")], "Q6_K"),
        ([rule("token_embd.weight", "Q8_0")], [rule("output.weight", "Q6_K")], "Q8_0"),
        ([rule("token_embd.weight", "Q2_K")], [rule("output.weight", at_least="Q3_K")], "Q3_K"),
        ([rule("token_embd.weight", at_least="Q8_0")], [rule("output.weight", "Q6_K")], "Q8_0"),
    ])
    def test_the_embedding_follows_the_outputs_rules_too(self, of_embedding: list[Rule], of_output: list[Rule],
                                                         expected: str) -> None:
        plan = resolve(tiny(tied=True), *of_embedding, *of_output)
        assert types(plan)["token_embd.weight"] == expected
        assert rules(plan)["token_embd.weight"].endswith(" (tied: the embedding is the output)")

    def test_untied_they_are_two(self) -> None:
        found = types(resolve(tiny(), rule("token_embd.weight", "Q2_K"), rule("output.weight", "Q6_K")))
        assert (found["token_embd.weight"], found["output.weight"]) == ("Q2_K", "Q6_K")


def test_uses_of_rules_are_counted() -> None:
    own = (rule("blk.*.attn_v.weight", "Q6_K"), rule("blk.*.attn_v.weight", "Q8_0", layers="0-1"),
           rule("blk.*.ffn_down.weight", at_least="Q2_K"), rule("output.weight", "Q6_K"), rule("nothing", "Q6_K", optional=True))
    common = (rule("blk.*.ssm_alpha.weight", at_least="Q6_K"), rule("blk.*.attn_v.weight", "Q5_K"))
    spec = PlanSpec(ladder="guarded", on_substitute="mark", mtp_mode="inside", mtp_type="", rules=common, tiers=())
    tier = Tier(name="T", ftype="Q4_K_M", default="Q4_K", rules=own)
    model = tiny(n_block=4, tied=True, more={"blk.0.ssm_alpha.weight": ((256, 32), "BF16")})
    uses = count_rule_uses(model, tier, spec)
    assert [(use.rule, use.is_own) for use in uses] == [(r, False) for r in common] + [(r, True) for r in own]
    # the gate's own floor lies above the common one's type; the embedding is the output
    assert [(use.n_reached, use.n_decided) for use in uses] == [(1, 1), (4, 0), (4, 2), (2, 2), (4, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize("type_", ["Q8_K", "Q8_1", "I32"])
def test_a_type_with_no_quantizer_is_refused(type_: str) -> None:
    model, message = tiny(), f"that llama.cpp can write .*, got {type_}"
    with pytest.raises(PlanError, match=f"rule 1: output.weight: .*{message}"):
        resolve(model, rule("output.weight", type_))
    with pytest.raises(PlanError, match=f"common rule 1: .* at least {type_}: .*{message}"):
        resolve(model, common=(rule("*", at_least=type_),))
    with pytest.raises(PlanError, match=f"default: .*{message}"):
        resolve(model, default=type_)
    with pytest.raises(PlanError, match=f"mtp_type: .*{message}"):
        resolve(model, mtp_type=type_)
