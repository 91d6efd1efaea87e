"""The longest tier first: what a plan costs is told by its types, not by its size."""

from __future__ import annotations

from quantkit.job.quantize_cost import NS_A_WEIGHT, quantize_s
from quantkit.spec.quantizable import WRITABLE_TYPES
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.spec.plan_models import lengths, resolve, tiny


def test_every_type_that_is_searched_for_has_its_cost() -> None:
    assert {name for name in WRITABLE_TYPES if TENSOR_TYPES[name].is_quantized} == set(NS_A_WEIGHT)


def test_fewer_bits_may_take_longer_and_take_less_time_too() -> None:
    """By size Q3_K would come before Q5_K; it is made three times as fast. IQ2_S is smaller and slower than both."""
    model = tiny()
    made = {name: resolve(model, default=name, ftype=ftype, imatrix=lengths(model))
            for name, ftype in (("Q5_K", "Q5_K_M"), ("Q3_K", "Q3_K_M"), ("IQ2_S", "IQ2_M"), ("Q8_0", "Q8_0"))}
    assert sorted(made, key=lambda name: made[name].tensor_bytes) == ["IQ2_S", "Q3_K", "Q5_K", "Q8_0"]
    assert sorted(made, key=lambda name: quantize_s(made[name]), reverse=True) == ["IQ2_S", "Q5_K", "Q3_K", "Q8_0"]
