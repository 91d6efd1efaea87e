from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantkit.measure.importance import describe_entry, describe_importances, mean_square_by_role, role_of
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry

NAME = "blk.3.ffn_down_exps.weight"


def entry(sums: list[list[float]], counts: list[float]) -> ImatrixEntry:
    return ImatrixEntry(in_sum2=np.array(sums, np.float32), counts=np.array(counts, np.float32))


def test_a_dense_entry_by_hand() -> None:
    found = describe_entry("blk.7.attn_q.weight", entry([[600, 200, 200, 200]], [100]))
    assert (found.role, found.layer, found.n_column, found.n_expert) == ("attn_q", 7, 4, 1)
    assert (found.mean_square, found.peak, found.share_half) == (3.0, 2.0, 0.25)  # importances 6, 2, 2, 2
    assert (found.n_row_min, found.n_row_max) == (100, 100)
    assert found.is_sound


def test_experts_are_weighted_by_their_rows() -> None:
    found = describe_entry(NAME, entry([[400, 0], [0, 0], [90, 90]], [100, 0, 30]))
    assert (found.n_few, found.n_missing, found.n_zero, found.n_expert) == (1, 1, 1, 3)
    assert found.mean_square == 580 / (2 * 130)
    assert found.peak == pytest.approx(4 / (580 / 260))
    assert not found.is_sound


def test_what_is_not_finite_or_below_zero_is_counted_and_left_out() -> None:
    found = describe_entry(NAME, entry([[np.nan, np.inf, -1, 50]], [50]))
    assert (found.n_not_finite, found.n_zero, found.mean_square, found.peak) == (3, 0, 0.25, 4.0)
    nothing = describe_entry(NAME, entry([[np.nan, np.nan]], [50]))
    assert (nothing.n_not_finite, nothing.mean_square, nothing.peak, nothing.share_half) == (2, None, None, None)


@pytest.mark.parametrize("counts", [[0], [50]])
def test_a_number_without_data_is_none_and_not_zero(counts: list[float]) -> None:
    found = describe_entry(NAME, entry([[0, 0]], counts))
    assert (found.peak, found.share_half) == (None, None)
    assert found.mean_square == (None if counts == [0] else 0.0)


def test_a_legacy_entry_counts_calls_and_is_never_short_of_rows() -> None:
    assert describe_entry(NAME, entry([[8, 8]], [1]), legacy=True).n_few == 0
    assert describe_entry(NAME, entry([[8, 8]], [1])).n_few == 1


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(0, 1000, width=32)),
       st.integers(32, 1000))
@pytest.mark.slow
def test_laws(sums: npt.NDArray[np.float32], count: int) -> None:
    whole = ImatrixEntry(in_sum2=sums, counts=np.full(len(sums), count, np.float32))
    found = describe_entry(NAME, whole)
    assert found.mean_square == pytest.approx(float(sums.mean(dtype=np.float64)) / count)
    assert found.n_zero == int((sums == 0).sum())
    if found.peak is not None and found.share_half is not None:
        assert found.peak >= 1 - 1e-6
        assert 0 < found.share_half <= 0.5 + 1 / sums.size


def test_entries_come_block_by_block_and_the_output_last() -> None:
    names = ["output.weight", "blk.10.attn_q.weight", "blk.2.attn_q.weight", "blk.2.attn_k.weight"]
    matrix = Imatrix(entries={name: entry([[100, 300]], [100]) for name in names}, datasets=(), chunk_count=1, chunk_size=512,
                     legacy=False)
    tensors = describe_importances(matrix)
    assert [t.name for t in tensors] == ["blk.2.attn_k.weight", "blk.2.attn_q.weight", "blk.10.attn_q.weight", "output.weight"]
    assert mean_square_by_role(tensors) == {"attn_k": {2: 2.0}, "attn_q": {2: 2.0, 10: 2.0}}


@pytest.mark.parametrize(("name", "role"), [("blk.12.nextn.eh_proj.weight", "nextn.eh_proj"), ("output.weight", "output"),
                                            ("mm.0.weight", "mm.0"), ("blk.1.blk.2.x", "blk.2.x")])
def test_role(name: str, role: str) -> None:
    assert role_of(name) == role
