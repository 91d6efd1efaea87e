"""The hot kernel: against long double, against itself, and independent of how rows are cut into calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import InputError
from quantkit.measure.scoring import GroupScores, Logits, Scorer

N_VOCAB = 20_011  # three tiles, the last one of odd width


def make_logits(n_row: int, n_vocab: int, seed: int, *, noise: float = 0.3) -> tuple[Logits, npt.NDArray[np.int32], Logits]:
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal((n_row, n_vocab)) * 4 + 7).astype(np.float32)
    tier = (base + rng.standard_normal((n_row, n_vocab)) * noise).astype(np.float32)
    return base, rng.integers(0, n_vocab, n_row).astype(np.int32), tier


def score(base: Logits, targets: npt.NDArray[np.int32], *tiers: Logits) -> GroupScores:
    return Scorer().score(base, targets, tiers)


def exact(base: Logits, tier: Logits, target: int) -> dict[str, float]:
    """All numbers of one row by the textbook, in 80-bit floating point."""
    log_p = []
    for logits in (base, tier):
        x = logits.astype(np.longdouble)
        x -= x.max()
        log_p.append(x - np.log(np.exp(x).sum()))
    p = np.exp(log_p[0])
    first, second = np.sort(log_p[0])[::-1][:2]
    return {"nll_base": float(-log_p[0][target]), "nll_q": float(-log_p[1][target]), "entropy": float(-(p * log_p[0]).sum()),
            "kld": float((p * (log_p[0] - log_p[1])).sum()), "margin": float(first - second)}


@pytest.mark.parametrize("noise", [1e-3, 0.3, 5.0])
def test_equals_long_double_to_1e_12(noise: float) -> None:
    base, targets, tier = make_logits(5, N_VOCAB, 1, noise=noise)
    got = score(base, targets, tier)
    for i in range(5):
        want = exact(base[i], tier[i], int(targets[i]))
        assert got.base.nll[i] == pytest.approx(want["nll_base"], rel=1e-12)
        assert got.base.entropy[i] == pytest.approx(want["entropy"], rel=1e-12)
        assert got.base.margin[i] == pytest.approx(want["margin"], rel=1e-12)
        assert got.tiers[0].nll[i] == pytest.approx(want["nll_q"], rel=1e-12)
        assert got.tiers[0].kld[i] == pytest.approx(want["kld"], rel=1e-12, abs=1e-13)


def test_a_hand_computed_row() -> None:
    base = np.log(np.array([[0.5, 0.25, 0.25]])).astype(np.float32)
    tier = np.log(np.array([[0.25, 0.25, 0.5]])).astype(np.float32)
    got = score(base, np.array([2], np.int32), tier)
    assert got.tiers[0].kld[0] == pytest.approx(0.25 * np.log(2), rel=1e-6)
    assert got.base.nll[0] == pytest.approx(np.log(4), rel=1e-6)
    assert got.tiers[0].nll[0] == pytest.approx(np.log(2), rel=1e-6)
    assert got.base.margin[0] == pytest.approx(np.log(2), rel=1e-6)
    assert got.base.entropy[0] == pytest.approx(1.5 * np.log(2), rel=1e-6)
    assert [got.base.top1[0], got.tiers[0].top1[0]] == [0, 2]


def test_uniform_logits_have_a_perplexity_of_n_vocab() -> None:
    logits = np.full((3, 4096), -2.5, np.float32)
    got = score(logits, np.array([0, 17, 4095], np.int32), logits)
    assert np.exp(got.base.nll) == pytest.approx([4096] * 3, rel=1e-13)
    assert got.base.margin.tolist() == [0.0] * 3


def test_base_against_itself_is_exactly_zero() -> None:
    base, targets, _ = make_logits(40, N_VOCAB, 2)
    base[7] += 1000  # shifted by its maximum
    base[8, ::3] = -np.inf
    got = score(base, targets, base.copy())
    assert got.tiers[0].kld.tolist() == [0.0] * 40
    assert got.tiers[0].nll.tobytes() == got.base.nll.tobytes()
    assert got.tiers[0].top1.tobytes() == got.base.top1.tobytes()


@pytest.mark.parametrize("n_vocab", [320, 8192, N_VOCAB])
def test_rows_do_not_depend_on_the_call(n_vocab: int) -> None:
    base, targets, tier = make_logits(37, n_vocab, 3)
    _, _, other = make_logits(37, n_vocab, 4)
    other[5, 3] = np.nan
    other[6, 3] = -np.inf
    base[11] -= 900
    whole = score(base, targets, tier)
    beside = score(base, targets, other, tier)
    scorer = Scorer()
    for cuts in ([1] * 37, [2, 30, 5], [36, 1]):
        at = 0
        for n in cuts:
            rows = slice(at, at + n)
            part = scorer.score(base[rows], targets[rows], [tier[rows]])
            for name in ("nll", "entropy", "margin", "top1"):
                assert getattr(part.base, name).tobytes() == getattr(whole.base, name)[rows].tobytes()
            for name in ("nll", "kld", "top1"):
                assert getattr(part.tiers[0], name).tobytes() == getattr(whole.tiers[0], name)[rows].tobytes()
            at += n
    assert beside.tiers[1].kld.tobytes() == whole.tiers[0].kld.tobytes()


def test_rows_do_not_depend_on_alignment_or_strides() -> None:
    base, targets, tier = make_logits(4, N_VOCAB, 5)
    want = score(base, targets, tier).tiers[0]
    for skip in range(1, 17):
        raw = np.empty(4 * N_VOCAB + skip, np.float32)
        moved = raw[skip:].reshape(4, N_VOCAB)
        moved[:] = tier
        assert score(base, targets, moved).tiers[0].kld.tobytes() == want.kld.tobytes()
    wide = np.empty((4, N_VOCAB + 5), np.float32)
    wide[:, :N_VOCAB] = tier
    assert score(base, targets, wide[:, :N_VOCAB]).tiers[0].kld.tobytes() == want.kld.tobytes()
    assert score(base, targets, tier[::-1].copy()[::-1]).tiers[0].kld.tobytes() == want.kld.tobytes()


def test_inputs_are_only_read() -> None:
    base, targets, tier = make_logits(3, 700, 6)
    base.flags.writeable = tier.flags.writeable = False
    before = base.tobytes(), tier.tobytes()
    score(base, targets, tier)
    assert (base.tobytes(), tier.tobytes()) == before


def test_the_first_maximum_wins() -> None:
    base = np.zeros((1, 9000), np.float32)
    base[0, [400, 8500]] = 3.0
    tier = np.zeros((1, 9000), np.float32)
    tier[0, [8400, 8600]] = 3.0
    got = score(base, np.array([0], np.int32), tier)
    assert [got.base.top1[0], got.tiers[0].top1[0], got.base.margin[0]] == [400, 8400, 0.0]


def test_a_token_without_weight_in_the_base_adds_nothing() -> None:
    base, targets, tier = make_logits(2, 500, 7)
    targets[:] = 0
    base[0, 100:] = -np.inf
    got = score(base, targets, tier)
    narrow = score(base[:1, :100], targets[:1], tier[:1, :100])
    lost = got.tiers[0].nll[0] - narrow.tiers[0].nll[0]  # weight that the tier gives to the other tokens
    assert got.tiers[0].kld[0] == pytest.approx(narrow.tiers[0].kld[0] + lost, rel=1e-12)
    assert got.base.entropy[0] == pytest.approx(narrow.base.entropy[0], rel=1e-12)
    tier[0, 100:] = -np.inf  # masked in both
    assert score(base, targets, tier).tiers[0].kld[0] == pytest.approx(narrow.tiers[0].kld[0], rel=1e-12)


def test_a_tier_without_weight_where_the_base_has_some_is_infinitely_far() -> None:
    base, targets, tier = make_logits(2, 500, 8)
    tier[1, int(base[1].argmax())] = -np.inf
    kld = score(base, targets, tier).tiers[0].kld
    assert np.isfinite(kld[0])
    assert kld[1] == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["base", "tier"])
def test_a_row_that_is_not_finite_shows(bad: float, where: str) -> None:
    base, targets, tier = make_logits(3, N_VOCAB, 9)
    (base if where == "base" else tier)[1, 15_000] = bad
    got = score(base, targets, tier)
    assert np.isfinite(got.tiers[0].kld).tolist() == [True, False, True]
    assert np.isfinite(got.tiers[0].nll).tolist() == [True, where == "base", True]
    assert np.isfinite(got.base.nll).tolist() == [True, where == "tier", True]


def test_no_clip_at_16_nats() -> None:
    base = np.zeros((1, 4), np.float32)
    base[0, 0] = 22.0
    got = score(base, np.array([3], np.int32), base - np.float32(1))
    assert got.base.nll[0] == pytest.approx(22.0 + np.log1p(3 * np.exp(-22.0)), rel=1e-14)
    assert abs(got.tiers[0].kld[0]) < 1e-14


def test_equal_nll_with_permuted_probabilities_is_seen_by_kld() -> None:
    base, targets, _ = make_logits(1, 300, 10)
    targets[0] = 0
    tier = base.copy()
    tier[0, 1:] = tier[0, :0:-1]
    got = score(base, targets, tier)
    assert got.tiers[0].nll[0] == pytest.approx(got.base.nll[0], rel=1e-13)
    assert got.tiers[0].kld[0] > 0.1


def test_no_rows_give_no_scores() -> None:
    empty = np.empty((0, 50), np.float32)
    got = score(empty, np.empty(0, np.int32), empty)
    assert [len(got.base.nll), len(got.tiers[0].kld)] == [0, 0]


def test_refuses_what_cannot_be_compared() -> None:
    base, targets, tier = make_logits(2, 320, 11)
    with pytest.raises(InputError, match=r"320 tokens .* got the shape \(2, 322\)"):
        score(base, targets, np.zeros((2, 322), np.float32))
    with pytest.raises(InputError, match="one target for each of 2 rows"):
        score(base, targets[:1], tier)
    with pytest.raises(InputError, match="targets from 0 to 319, got 0 to 320"):
        score(base, np.array([0, 320], np.int32), tier)
    with pytest.raises(InputError, match="at least 2 tokens"):
        score(base[:, :1], targets, tier[:, :1])


logit_rows = st.lists(st.floats(-90, 90, width=32), min_size=2, max_size=40)


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.integers(0, 2**32 - 1), st.floats(0, 8))
@pytest.mark.slow
def test_kld_is_never_negative_beyond_rounding(values: list[float], seed: int, noise: float) -> None:
    base = np.array([values], np.float32)
    tier = (base + np.random.default_rng(seed).standard_normal(base.shape) * noise).astype(np.float32)
    got = score(base, np.array([0], np.int32), tier)
    assert got.tiers[0].kld[0] >= -1e-9
    assert got.base.nll[0] >= -1e-13
    assert got.base.entropy[0] >= -1e-12
    assert got.base.entropy[0] <= np.log(len(values)) + 1e-12


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-2000, 2000), min_size=2, max_size=30), st.integers(-4000, 4000), st.integers(-4000, 4000))
@pytest.mark.slow
def test_shifting_logits_changes_nothing(values: list[int], shift_base: int, shift_tier: int) -> None:
    base = np.array([values], np.float32) / np.float32(64)  # sums with the shifts are exact in float32
    tier = base[:, ::-1].copy()
    target = np.array([1], np.int32)
    want = score(base, target, tier)
    got = score(base + np.float32(shift_base / 8), target, tier + np.float32(shift_tier / 8))
    assert got.tiers[0].kld[0] == pytest.approx(want.tiers[0].kld[0], abs=1e-11)
    assert got.tiers[0].nll[0] == pytest.approx(want.tiers[0].nll[0], abs=1e-11)
    assert got.base.entropy[0] == pytest.approx(want.base.entropy[0], abs=1e-11)
    assert got.base.margin[0] == want.base.margin[0]
