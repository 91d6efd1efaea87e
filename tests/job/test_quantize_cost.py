"""The longest tier first: what a plan costs is told by its types, not by its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.job import standalone
from quantkit.job.progress import Silent
from quantkit.job.quantize import QuantizedTier, quantize_tier
from quantkit.job.quantize_cost import NS_A_WEIGHT, quantize_s
from quantkit.spec.protocol import load_protocol
from quantkit.spec.quantizable import WRITABLE_TYPES
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.gguf_factory import tiny_model
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


@pytest.mark.engine
def test_tiers_are_begun_with_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that the workers get, whatever order was asked for."""
    base = tiny_model(tmp_path / "tiny-BF16.gguf", n_embd=256, n_ff=256)[0]
    began: list[str] = []

    def note(*args: Any, **kwargs: Any) -> QuantizedTier:
        began.append(args[2].tier)
        return quantize_tier(*args, **kwargs)

    monkeypatch.setattr(standalone, "quantize_tier", note)
    monkeypatch.setattr(standalone, "n_cores", lambda: 1)
    targets = {name: tmp_path / f"{name}.gguf" for name in ("Q8_0", "Q6_K", "Q5_K_M")}
    made = standalone.quantize_to_files(base, load_protocol("wikitext2-stock-v1"), targets, Silent())
    assert began == ["Q5_K_M", "Q6_K", "Q8_0"]
    assert [tier.tier for tier in made] == list(targets)
