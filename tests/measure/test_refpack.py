"""Heads of distributions, and tiers against them: the chain rule, exact zeros, and what the estimate of the shortfall is worth."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.measure.refpack import (
    EncodedRow,
    HeadRule,
    PackedChunk,
    PackScores,
    choose_head,
    decode_chunk,
    encode_block,
    encode_heads,
    encode_tails,
    estimate_shortfall,
    head_step,
    is_full,
    round_weights,
    score_packed,
)
from quantkit.measure.scoring import Ints, Logits, Scorer

RULE = HeadRule(mass=0.99, max_ids=1000, full_every=2)
N_ROW, N_VOCAB = 40, 600


def draw(sharpness: float = 2.0, seed: int = 0, noise: float = 0.1) -> tuple[Logits, Ints, Logits]:
    """Base, targets, tier."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0, sharpness, (N_ROW, N_VOCAB)).astype(np.float32)
    return base, rng.integers(0, N_VOCAB, N_ROW).astype(np.int32), (base + rng.normal(0, noise, base.shape)).astype(np.float32)


def rows_of(base: Logits, targets: Ints, rule: HeadRule = RULE) -> tuple[list[EncodedRow], PackedChunk]:
    full = is_full(0, np.arange(len(base)), len(base), rule.full_every)
    rows = encode_block(Scorer(), base, targets, full, rule)
    numbers = np.concatenate([row.numbers for row in rows])
    return rows, decode_chunk(numbers, encode_heads(rows), encode_tails(rows), full, base.shape[1])


def against(base: Logits, targets: Ints, tier: Logits, rule: HeadRule = RULE) -> PackScores:
    return score_packed(Scorer(), rows_of(base, targets, rule)[1], 0, tier, targets)


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


@pytest.mark.parametrize("mass", [0.5, 0.99, 0.9999])
def test_the_head_is_the_smallest_set_with_the_mass(mass: float) -> None:
    base, _, _ = draw()
    for row in base:
        p = np.exp(log_softmax(row))
        ids = choose_head(row, float(np.log(np.exp(row.astype(np.float64)).sum())), HeadRule(mass=mass, max_ids=1000, full_every=1))
        n = int(np.searchsorted(np.cumsum(np.sort(p)[::-1]), mass)) + 1
        assert ids.tolist() == sorted(np.argsort(-p, kind="stable")[:n].tolist())


def test_the_head_is_cut_at_the_most_ids_and_of_equals_the_first_stay() -> None:
    rule = HeadRule(mass=0.9, max_ids=7, full_every=1)
    assert choose_head(np.zeros(50, np.float32), float(np.log(50)), rule).tolist() == list(range(7))


def test_all_the_mass_is_the_whole_vocabulary() -> None:
    row = draw()[0][0]
    lse = float(np.log(np.exp(row.astype(np.float64)).sum())) + 1e-9  # the sum of all p a little below 1
    assert len(choose_head(row, lse, HeadRule(mass=1.0, max_ids=1000, full_every=1))) == N_VOCAB


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 3.0, 40.0], ids=["uniform", "flat", "sharp", "one token holds all"])
@pytest.mark.parametrize("mass", [0.5, 0.999, 1.0])
def test_the_base_against_its_own_pack_is_exactly_zero(sharpness: float, mass: float) -> None:
    base, targets, _ = draw(sharpness)
    own = against(base, targets, base.copy(), HeadRule(mass=mass, max_ids=300, full_every=2))
    assert np.count_nonzero(own.kld) == 0
    assert np.count_nonzero(own.tail_kld[::2]) == 0
    assert np.isnan(own.tail_kld[1::2]).all()


def test_a_bit_of_difference_is_not_zero() -> None:
    base, targets, _ = draw()
    tier = base.copy()
    tier[0] += np.linspace(0, 1e-4, N_VOCAB, dtype=np.float32)
    kld = against(base, targets, tier).kld
    assert kld[0] != 0
    assert np.count_nonzero(kld) == 1


def test_a_shift_of_all_logits_changes_nothing() -> None:
    base, targets, tier = draw()
    assert against(base, targets, tier + np.float32(4)).kld == pytest.approx(against(base, targets, tier).kld, abs=1e-6)


def test_nll_and_top_token_are_those_of_an_audit_bit_by_bit() -> None:
    base, targets, tier = draw()
    rows, _ = rows_of(base, targets)
    exact = Scorer().score(base, targets, [tier])
    scores = against(base, targets, tier)
    assert scores.nll.tobytes() == exact.tiers[0].nll.tobytes()
    assert scores.top1.tobytes() == exact.tiers[0].top1.tobytes()
    for name, values in (("nll", exact.base.nll), ("entropy", exact.base.entropy), ("margin", exact.base.margin),
                         ("top1", exact.base.top1)):
        assert np.concatenate([row.numbers[name] for row in rows]).tobytes() == values.tobytes()


def test_the_kld_is_that_of_head_and_bucket_and_with_the_tail_the_whole() -> None:
    base, targets, tier = draw(noise=0.3)
    rows, packed = rows_of(base, targets)
    scores = against(base, targets, tier)
    whole = Scorer().score(base, targets, [tier]).tiers[0].kld
    for i, row in enumerate(rows):
        p, q = np.exp(log_softmax(base[i])), np.exp(log_softmax(tier[i]))
        head = p[row.ids] @ np.log(p[row.ids] / q[row.ids])
        bucket = (1 - p[row.ids].sum()) * np.log((1 - p[row.ids].sum()) / (1 - q[row.ids].sum()))
        assert scores.kld[i] == pytest.approx(head + bucket, abs=2e-6)
    assert (scores.kld <= whole + 2e-6).all()
    assert scores.kld[packed.full] + scores.tail_kld[packed.full] == pytest.approx(whole[packed.full], abs=5e-6)
    assert (scores.tail_kld[packed.full] > 0).all()


@pytest.mark.slow
def test_the_rounding_of_weights_is_below_a_millionth_of_a_mean() -> None:
    base = np.concatenate([draw(2.0, seed, 0.1)[0] for seed in range(20)])
    tier = np.concatenate([draw(2.0, seed, 0.1)[2] for seed in range(20)])
    targets = np.zeros(len(base), np.int32)
    rule = HeadRule(mass=1.0, max_ids=1000, full_every=10**6)  # everything in the head: nothing but rounding is left
    whole = Scorer().score(base, targets, [tier]).tiers[0].kld
    assert against(base, targets, tier, rule).kld.mean() == pytest.approx(whole.mean(), rel=1e-6)


def test_weights_are_within_a_step_and_their_sums_within_half_a_step() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(500, 0.1))
    step = head_step(500)
    weights = round_weights(p, step) * step
    assert np.abs(weights - p).max() <= step * (1 + 1e-9)
    assert np.abs(np.cumsum(weights) - np.cumsum(p)).max() <= step / 2 * (1 + 1e-9)


def test_a_logit_of_minus_infinity_counts_as_no_probability() -> None:
    base, targets, tier = draw()
    targets[:] = 5
    base[:, 3] = tier[:, 3] = -np.inf
    scores = against(base, targets, tier)
    assert np.isfinite(scores.kld).all()
    assert np.isfinite(scores.tail_kld[::2]).all()
    assert np.count_nonzero(against(base, targets, base).kld) == 0


def test_a_tier_that_rules_out_what_base_expects_is_infinitely_far() -> None:
    base, targets, tier = draw()
    tier[0, np.argmax(base[0])] = -np.inf
    assert against(base, np.where(targets == np.argmax(base[0]), 0, targets).astype(np.int32), tier).kld[0] == np.inf


def test_a_row_that_is_not_finite_has_no_head() -> None:
    base, targets, _ = draw()
    base[7, 0] = np.nan
    rows = encode_block(Scorer(), base, targets, np.zeros(N_ROW, np.bool_), RULE)
    assert [i for i, row in enumerate(rows) if not len(row.ids)] == [7]


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    base, targets, tier = draw()
    _, packed = rows_of(base, targets)
    whole = score_packed(Scorer(), packed, 0, tier, targets)
    part = score_packed(Scorer(), packed, 10, tier[10:13], targets[10:13])
    assert part.kld.tobytes() == whole.kld[10:13].tobytes()


def test_whole_rows_are_every_nth_of_the_text() -> None:
    flags = np.concatenate([is_full(chunk, np.arange(255), 255, 64) for chunk in range(9)])
    assert np.flatnonzero(flags).tolist() == list(range(0, 9 * 255, 64))
    assert is_full(7, np.arange(255), 255, 64).tolist() == flags[7 * 255:8 * 255].tolist()


def test_the_shortfall_is_what_the_formula_says() -> None:
    value, se, n = estimate_shortfall(0.01, np.array([0.01, 0.02, 0.03]), np.array([0.001, 0.001, 0.004]))
    assert n == 3
    assert value == pytest.approx(0.01 * 0.006 / 0.06)
    residuals = np.array([0.001 - 0.001, 0.001 - 0.002, 0.004 - 0.003])
    assert se == pytest.approx(0.01 / 0.02 * np.sqrt((residuals**2).sum() / 6))


@pytest.mark.parametrize(("mean", "masses", "klds", "expected"), [
    (0.01, [], [], (None, None, 0)),
    (0.01, [0.01], [0.001], (0.001, None, 1)),
    (0.0, [0.0, 0.0], [0.0, 0.0], (0.0, 0.0, 2)),
    (0.01, [0.0], [0.0], (None, None, 1)),
])
def test_a_shortfall_without_rows_or_tails(mean: float, masses: list[float], klds: list[float],
                                           expected: tuple[float | None, float | None, int]) -> None:
    assert tuple(estimate_shortfall(mean, np.array(masses), np.array(klds))) == expected


@pytest.mark.slow
def test_the_estimate_is_within_its_error_of_the_truth() -> None:
    deviations = []
    for seed in range(12):
        base, targets, tier = draw(2.0, seed, 0.2)
        rule = HeadRule(mass=0.95, max_ids=1000, full_every=4)
        scores = against(base, targets, tier, rule)
        masses = np.concatenate([row.numbers["tail_mass"] for row in rows_of(base, targets, rule)[0]])
        full = np.isfinite(scores.tail_kld)
        estimate = estimate_shortfall(float(masses.mean()), masses[full], scores.tail_kld[full])
        truth = Scorer().score(base, targets, [tier]).tiers[0].kld.mean() - scores.kld.mean()
        assert estimate.value is not None
        assert estimate.se is not None
        deviations.append((estimate.value - truth) / estimate.se)
    assert 0.4 < float(np.sqrt(np.mean(np.square(deviations)))) < 1.6
