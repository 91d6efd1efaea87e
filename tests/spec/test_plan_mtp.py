"""The MTP block and the published ladders: it never moves a trunk tensor, and its own matrices, large ones too, have a rule.

FAULTS 76 (the block counted into the mix), 79 (its own output matrix), 86 (gates of a recurrent state).
"""

from __future__ import annotations

import pytest

from quantkit.spec.plan import Plan, resolve_plan
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import Tensors
from tests.spec.plan_models import tiny, types

PROTOCOL = load_protocol("wikitext2-v1")
TIERS = [tier.name for tier in PROTOCOL.plan.tiers]


def guarded(tier: str, *, n_nextn: int, more: Tensors | None = None) -> Plan:
    model = tiny(n_block=15, n_nextn=n_nextn, more=more)  # n/8 and 7n/8 differ between 15 and 16 blocks
    return resolve_plan(model, PROTOCOL.plan.tier(tier), PROTOCOL.plan, None)


@pytest.mark.parametrize("tier", TIERS)
def test_fifteen_blocks_get_the_same_types_with_an_mtp_block_and_without(tier: str) -> None:
    with_head, without = types(guarded(tier, n_nextn=1)), types(guarded(tier, n_nextn=0))
    assert {name: type_ for name, type_ in with_head.items() if not name.startswith("blk.15.")} == without


@pytest.mark.parametrize("tier", TIERS)
def test_every_matrix_of_the_mtp_block_is_q8_0(tier: str) -> None:
    own: Tensors = {"blk.15.nextn.embed_tokens.weight": ((256, 260), "BF16"),
                    "blk.15.nextn.shared_head_head.weight": ((256, 260), "BF16")}
    rows = [row for row in guarded(tier, n_nextn=1, more=own).rows if row.role == "mtp" and row.quantizable]
    assert {"blk.15.nextn.shared_head_head.weight", "blk.15.nextn.embed_tokens.weight", "blk.15.nextn.eh_proj.weight",
            "blk.15.ffn_down.weight"} <= {row.name for row in rows}
    assert {(row.type, row.rule) for row in rows} == {("Q8_0", "mtp_type")}


@pytest.mark.parametrize("tier", TIERS)
def test_gates_of_a_state_are_q8_0_and_its_small_tensors_stay(tier: str) -> None:
    state: Tensors = {
        "blk.3.ssm_alpha.weight": ((256, 8), "BF16"), "blk.3.ssm_beta.weight": ((256, 8), "BF16"),
        "blk.3.ssm_ba.weight": ((256, 16), "BF16"), "blk.3.ssm_conv1d.weight": ((4, 64), "F32"), "blk.3.ssm_a": ((8,), "F32"),
        "blk.3.ssm_dt.bias": ((8,), "F32"), "blk.3.ssm_norm.weight": ((64,), "F32"),
    }
    found = types(guarded(tier, n_nextn=1, more=state))
    assert {name: found[name] for name in state} == {
        "blk.3.ssm_alpha.weight": "Q8_0", "blk.3.ssm_beta.weight": "Q8_0", "blk.3.ssm_ba.weight": "Q8_0",
        "blk.3.ssm_conv1d.weight": "F32", "blk.3.ssm_a": "F32", "blk.3.ssm_dt.bias": "F32", "blk.3.ssm_norm.weight": "F32"}
