"""What holds for every plan, whatever the rules and shapes."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quantkit.core.errors import PlanError
from quantkit.core.files import canonical_json
from quantkit.spec.model import ModelInfo
from quantkit.spec.plan import Plan
from quantkit.spec.plan_rules import bits
from quantkit.spec.protocol import Rule
from quantkit.spec.quantizable import needs_imatrix
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.spec.plan_models import lengths, resolve, rule, tiny, types

# every example builds and plans a model: a few are enough, and the suite stays fast
few = settings(max_examples=25, deadline=None)

TYPES = st.sampled_from(["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_XXS", "Q2_K", "IQ2_S",
                         "IQ2_XXS", "IQ1_M", "F16", "BF16", "F32"])
GLOBS = st.sampled_from(["*", "output.weight", "token_embd.weight", "blk.*", "blk.*.attn_*.weight", "*.attn_v.weight",
                         "*.ffn_*", "blk.[0-3].ffn_down*.weight", "blk.?.ffn_up*"])
LAYERS = st.sampled_from(["", "", "0-3", "first 1/8", "last 1/8", "2"])


@st.composite
def any_rule(draw: st.DrawFn) -> Rule:
    exact = draw(st.booleans())
    type_ = draw(TYPES)
    return rule(draw(GLOBS), type_ if exact else "", at_least="" if exact else type_, layers=draw(LAYERS), optional=True)


@st.composite
def any_model(draw: st.DrawFn) -> ModelInfo:
    return tiny(n_embd=draw(st.sampled_from([256, 288, 100])), n_ff=draw(st.sampled_from([256, 96])),
                n_block=draw(st.integers(1, 4)), n_nextn=draw(st.integers(0, 1)), n_expert=draw(st.sampled_from([0, 4])),
                tied=draw(st.booleans()))


Case = tuple[ModelInfo, list[Rule], list[Rule], str, str]


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    return (draw(any_model()), draw(st.lists(any_rule(), max_size=4)), draw(st.lists(any_rule(), max_size=4)), draw(TYPES),
            draw(TYPES | st.just("")))


def try_resolve(case: Case, *, reverse: bool = False, imatrix: dict[str, int] | None = None) -> Plan | None:
    model, own, common, default, mtp_type = case
    step = -1 if reverse else 1
    try:
        return resolve(model, *own[::step], common=tuple(common[::step]), default=default, mtp_type=mtp_type, imatrix=imatrix)
    except PlanError:
        return None


def plan_of(case: Case) -> Plan:
    plan = try_resolve(case)
    assume(plan is not None)
    assert plan is not None
    return plan


@few
@given(any_case())
@pytest.mark.slow
def test_every_tensor_has_exactly_one_type_that_fits_its_rows(case: Case) -> None:
    plan = plan_of(case)
    assert [row.name for row in plan.rows] == [t.name for t in case[0].header.tensors]
    assert all(row.shape[0] % TENSOR_TYPES[row.type].block_size == 0 for row in plan.rows)
    assert all(row.rule for row in plan.rows)


@few
@given(any_case())
def test_the_order_of_rules_never_matters(case: Case) -> None:
    one, other = try_resolve(case), try_resolve(case, reverse=True)
    assert (one is None) == (other is None)
    if one and other:
        assert types(one) == types(other)


@few
@given(any_case())
def test_sizes_are_sums_of_parts(case: Case) -> None:
    plan = plan_of(case)
    assert plan.size_bytes == sum(row.size_bytes for row in plan.rows) == sum(t.size_bytes for t in plan.types)
    assert plan.n_params == sum(t.n_params for t in plan.types) == case[0].n_params
    assert 0 <= plan.tensor_bytes - plan.size_bytes < 32 * len(plan.rows)


@few
@given(any_case())
@pytest.mark.slow
def test_floors_are_never_undercut(case: Case) -> None:
    plan = plan_of(case)
    for floor in (r for r in case[2] if r.at_least and not r.layers and r.match == "*"):
        trunk = [row for row in plan.rows if row.quantizable and not (case[4] and row.role == "mtp")]
        assert all(bits(row.type) >= bits(floor.at_least) for row in trunk)


@few
@given(any_case())
@pytest.mark.slow
def test_a_changed_type_is_never_smaller(case: Case) -> None:
    assert all(bits(row.type) >= bits(row.wanted) for row in plan_of(case).rows if row.type != "F16")


@few
@given(any_case(), st.sampled_from(["ffn_down", "blk.1.", "attn"]))
@pytest.mark.slow
def test_what_lacks_importances_needs_none(case: Case, without: str) -> None:
    matrix = lengths(case[0], without=without)
    plan = try_resolve(case, imatrix=matrix)
    assume(plan is not None)
    assert plan is not None
    assert not [row.name for row in plan.rows if row.quantizable and row.name not in matrix
                and needs_imatrix(row.name, row.type, plan.ftype)]


@few
@given(any_case())
@pytest.mark.slow
def test_json_round_trip(case: Case) -> None:
    plan = plan_of(case)
    assert Plan.from_json(json.loads(canonical_json(plan.to_json()))) == plan
