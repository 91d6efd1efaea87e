"""Standard errors against hand computations and laws."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.stats import (
    degrees_of_freedom,
    group_by,
    holm,
    jackknife_se,
    quantile_limits,
    se_clustered,
    se_iid,
    student_quantile,
    student_upper_tail,
)


def test_groups_count_from_zero_in_order_of_labels() -> None:
    groups = group_by(np.array([7, 3, 7, 9, 3, 7]))
    assert groups.index.tolist() == [1, 0, 1, 2, 0, 1]
    assert groups.sizes.tolist() == [2, 3, 1]
    assert groups.n_effective == 36 / 14
    assert groups.n_effective_whole == 14**2 / (2**4 + 3**4 + 1)
    assert groups.sums(np.array([1.0, 2, 3, 4, 5, 6])).tolist() == [7, 10, 4]
    assert groups.means_without(np.array([1.0, 2, 3, 4, 5, 6])).tolist() == [14 / 4, 11 / 3, 17 / 5]


def test_equal_groups_are_worth_their_number() -> None:
    assert group_by(np.repeat(np.arange(9), 5)).n_effective == 9.0
    assert group_by(np.empty(0, np.int32)).n_effective == 0.0
    assert group_by(np.repeat(np.arange(9), 5)).n_effective_whole == 9.0
    assert group_by(np.empty(0, np.int32)).n_effective_whole == 0.0


def test_se_iid_by_hand() -> None:
    assert se_iid(np.array([1.0, 2, 3, 6])) == pytest.approx(math.sqrt((12.5 - 9) / 3), rel=1e-15)
    assert se_iid(np.array([1.0])) is None


def test_se_clustered_by_hand() -> None:
    x = np.array([1.0, 2, 4, 5])  # mean 3, group residuals -3 and 3
    assert se_clustered(x, group_by(np.array([0, 0, 1, 1]))) == pytest.approx(math.sqrt(2 * 18) / 4, rel=1e-15)
    assert se_clustered(x, group_by(np.zeros(4, np.int32))) is None


def test_groups_of_one_give_the_independent_error() -> None:
    x = np.random.default_rng(0).standard_normal(50)
    assert se_clustered(x, group_by(np.arange(50))) == pytest.approx(se_iid(x), rel=1e-12)


def test_jackknife_of_a_mean_of_single_observations_is_the_independent_error() -> None:
    x = np.random.default_rng(1).standard_normal(40)
    assert jackknife_se(group_by(np.arange(40)).means_without(x)) == pytest.approx(se_iid(x), rel=1e-12)


def test_jackknife_of_equal_groups_is_cr1() -> None:
    x, labels = np.random.default_rng(2).standard_normal(60), np.repeat(np.arange(12), 5)
    groups = group_by(labels)
    assert jackknife_se(groups.means_without(x)) == pytest.approx(se_clustered(x, groups), rel=1e-12)


def test_student_agrees_with_tables() -> None:
    assert student_quantile(0.975, 5) == pytest.approx(2.570582, abs=1e-6)
    assert student_quantile(0.975, 1e9) == pytest.approx(1.959964, abs=1e-5)
    assert student_quantile(0.975, 10) < student_quantile(0.975, 9.5) < student_quantile(0.975, 9)
    assert student_upper_tail(2.570582, 5) == pytest.approx(0.025, abs=1e-7)
    assert student_upper_tail(40.0, 50) > 0  # no cancellation far out


def test_degrees_of_freedom_by_hand() -> None:
    one_another = np.array([1.0, -1.0] * 8)  # Σd⁴/(Σd²)² = 1/G: nothing to say against G_w
    assert degrees_of_freedom(group_by(np.arange(16)), one_another) == pytest.approx(0.75 * 15)
    assert degrees_of_freedom(group_by(np.arange(16)), np.zeros(16)) == pytest.approx(0.75 * 15)
    theta = np.array([0.0] * 15 + [16.0])  # d: fifteen times −1, once 15
    nu = 2 / ((15 + 15**4) / (15 + 15**2) ** 2 - 1 / 16)
    assert nu == pytest.approx(2.45, abs=0.01)
    assert degrees_of_freedom(group_by(np.arange(16)), theta) == pytest.approx(0.75 * (nu - 1))
    unequal = group_by(np.repeat(np.arange(12), [8] + [1] * 11))
    assert degrees_of_freedom(unequal, np.array([1.0, -1.0] * 6)) == 1.0  # (64 + 11)² / (4096 + 11) = 1.4 articles


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=30), st.floats(0.01, 100), st.floats(-1e3, 1e3))
@pytest.mark.slow
def test_degrees_of_freedom_know_no_unit_and_no_sign(theta: list[float], scale: float, shift: float) -> None:
    x, groups = np.array(theta), group_by(np.arange(len(theta)))
    df = degrees_of_freedom(groups, x)
    assert 1 <= df <= max(1.0, 0.75 * (len(theta) - 1) + 1e-9)
    if np.ptp(x) > 1:
        assert degrees_of_freedom(groups, shift - scale * x) == pytest.approx(df, rel=1e-5)


@pytest.mark.system
def test_scipy_is_not_loaded_with_the_module() -> None:
    code = "import sys, quantkit.core.stats, quantkit.measure.summary; print('scipy' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False True\n"


def test_quantile_limits_of_single_observations_are_near_the_binomial_ones() -> None:
    x = np.arange(2000, dtype=np.float64)
    lo, hi, reason = quantile_limits(x, 0.9, group_by(np.arange(2000)), 0.95)
    reach = student_quantile(0.975, 0.75 * 244 * 2) * math.sqrt(0.9 * 0.1 / 1999)  # about: Σd⁴/(Σd²)² of 9 in 10 and 1 in 10
    assert reason is None
    assert lo == pytest.approx(1999 * (0.9 - reach), abs=0.5)
    assert hi == pytest.approx(1999 * (0.9 + reach), abs=0.5)


def test_quantile_limits_are_none_in_a_thin_tail() -> None:
    groups = group_by(np.arange(1599) % 16)
    x = np.random.default_rng(3).standard_normal(1599)
    lo, hi, reason = quantile_limits(x, 0.99, groups, 0.8)
    assert [lo, hi, reason] == [None, None, "fewer than 16 tokens beyond the quantile"]
    assert quantile_limits(np.append(x, 0.0), 0.99, group_by(np.arange(1600) % 16), 0.8).reason is None
    assert quantile_limits(x, 0.01, groups, 0.8).lo is None
    many = np.arange(16000, dtype=np.float64)
    assert quantile_limits(many, 0.999, group_by(np.arange(16000)), 0.95).reason is None  # 16 exactly


def test_quantile_limits_are_none_where_one_would_lie_beyond_all() -> None:
    x = np.repeat([0.0, 1.0], [1900, 100]) + np.arange(2000) / 1e6  # all large ones in one of ten groups
    assert quantile_limits(x, 0.97, group_by(np.repeat(np.arange(10), 200)), 0.95).reason == (
        "too uncertain: a limit would lie beyond all tokens")


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_p_and_bonferroni_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= min(1.0, len(p_values) * p) + 1e-15 for p, a in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert all(adjusted[i] <= adjusted[j] for i, j in itertools.pairwise(order))
