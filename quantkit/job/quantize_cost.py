"""How long a plan takes, roughly: enough to begin with the longest of several, so that they end together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quantkit.spec.plan import Plan

# Nanoseconds a weight with importances, one thread (benchmarks/quantize_types.py). Machines differ, hardly the proportions.
NS_A_WEIGHT: Mapping[str, float] = {
    "IQ2_XS": 790, "IQ3_XXS": 470, "IQ2_XXS": 390, "IQ3_S": 330, "IQ2_S": 220, "IQ4_XS": 180, "IQ4_NL": 180, "IQ1_S": 150,
    "IQ1_M": 150, "Q2_K": 130, "Q5_K": 110, "Q4_K": 110, "Q5_1": 110, "Q4_1": 110, "Q3_K": 36, "Q6_K": 29, "Q5_0": 25, "Q4_0": 25,
    "NVFP4": 25, "Q1_0": 5, "MXFP4": 5, "Q2_0": 3, "Q8_0": 3, "TQ1_0": 3, "TQ2_0": 3,
}
_ANY_OTHER = 2.0  # copied or rounded


def quantize_s(plan: Plan) -> float:
    """Seconds on one core: Σ elements * ns a weight of their type."""
    return sum(math.prod(row.shape) * NS_A_WEIGHT.get(row.type, _ANY_OTHER) for row in plan.rows) * 1e-9
