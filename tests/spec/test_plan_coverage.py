from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import ImatrixError
from quantkit.core.files import canonical_json
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, read_imatrix
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan
from quantkit.spec.plan_coverage import Coverage, ThinEntry, check_coverage
from quantkit.spec.protocol import ImatrixSpec
from tests.spec.plan_models import resolve, tiny

SPEC = ImatrixSpec(n_ctx=512, n_batch=512, n_ubatch=512, type_k="F16", type_v="F16", flash_attn="off", use_extra_bufts=False,
                   n_threads=0, corpus="c", chunks="all", n_chunk=0, output=True, mtp=True, zero_floor=0.01,
                   min_count=100, max_missing_experts=0.25, min_match=0.9, ngram=13, max_shared_ngrams=0.01)


def matrix_of(model: ModelInfo, *, without: str = "", rows: float = 1000, legacy: bool = False) -> Imatrix:
    """An entry of ones for every matrix but those whose name contains a text."""
    entries = {}
    for t in model.header.tensors:
        if len(t.shape) > 1 and not (without and without in t.name):
            n_expert = t.shape[2] if len(t.shape) > 2 else 1
            entries[t.name] = ImatrixEntry(in_sum2=np.ones((n_expert, t.shape[0]), np.float32),
                                           counts=np.full(n_expert, rows, np.float32))
    return with_entries(entries, legacy=legacy)


def with_entries(entries: Mapping[str, ImatrixEntry], *, legacy: bool = False) -> Imatrix:
    return Imatrix(entries=entries, datasets=("c.txt",), chunk_count=2, chunk_size=512, legacy=legacy)


def changed(imatrix: Imatrix, name: str, *, sums: float | None = None, columns: slice = slice(None),
            counts: tuple[float, ...] | None = None) -> Imatrix:
    entry = imatrix.entries[name]
    in_sum2 = entry.in_sum2.copy()
    if sums is not None:
        in_sum2[:, columns] = sums
    new = ImatrixEntry(in_sum2=in_sum2, counts=entry.counts if counts is None else np.array(counts, np.float32))
    return with_entries({**imatrix.entries, name: new}, legacy=imatrix.legacy)


def check(plan: Plan, imatrix: Imatrix) -> Coverage:
    return check_coverage(plan, imatrix, SPEC)


DENSE = tiny(n_block=2, n_nextn=1)
EXPERTS = tiny(n_block=2, n_expert=4)
UP, UPS = "blk.1.ffn_up.weight", "blk.1.ffn_up_exps.weight"


class TestWholeMatrix:
    def test_names_are_told_both_ways(self) -> None:
        matrix = matrix_of(DENSE, without="blk.2.")
        matrix = with_entries({**matrix.entries, "blk.0.attn_norm.weight": matrix.entries[UP], "mm.0.weight": matrix.entries[UP]})
        coverage = check(resolve(DENSE), matrix)
        assert len(coverage.matched) == 16
        assert len(coverage.without_entry) == 8
        assert {name[:6] for name in coverage.without_entry} == {"blk.2."}
        assert (coverage.unused, coverage.unknown, coverage.needed) == (("blk.0.attn_norm.weight",), ("mm.0.weight",), ())
        assert coverage.match == 17 / 18

    def test_what_needs_one_comes_from_the_plan(self) -> None:
        coverage = check(resolve(DENSE, default="IQ2_XXS", mtp_type="Q8_0"), matrix_of(DENSE, without="blk.2."))
        assert {name.split(".")[1] for name in coverage.needed if name.startswith("blk.")} == {"0", "1"}
        assert "output.weight" in coverage.needed  # this type aborts without one
        assert "token_embd.weight" not in coverage.needed  # looked up, so planned at another type

    def test_is_json(self) -> None:
        value = check(resolve(EXPERTS), changed(matrix_of(EXPERTS), UPS, counts=(1000, 0, 5, 1000))).to_json()
        assert json.loads(canonical_json(value)) == {**value, **{k: list(v) for k, v in value.items() if isinstance(v, tuple)}}
        assert value["thin"] == [{"name": UPS, "n_low": 1, "n_missing": 1, "n_expert": 4}]


class TestMatch:
    def test_names_without_their_suffix_match_nothing(self) -> None:
        stripped = with_entries({name.removesuffix(".weight"): e for name, e in matrix_of(DENSE).entries.items()})
        with pytest.raises(ImatrixError, match=r"at least 90% of names .* got 0%: 0 tensors have an entry, none for 23"):
            check(resolve(DENSE, default="Q4_K"), stripped)

    def test_a_matrix_of_a_deeper_model_is_refused(self) -> None:
        with pytest.raises(ImatrixError, match=r"got 42%: 30 .* no tensor for 42"):
            check(resolve(tiny(n_block=4)), matrix_of(tiny(n_block=10)))

    def test_the_mtp_block_embedding_and_output_do_not_count(self) -> None:
        matrix = matrix_of(DENSE, without="blk.2.")
        trunk = {name: e for name, e in matrix.entries.items() if name.startswith("blk.")}
        assert check(resolve(DENSE, mtp_type="Q8_0"), with_entries(trunk)).match == 1.0

    def test_an_empty_matrix_matches_nothing(self) -> None:
        with pytest.raises(ImatrixError, match="got 0%"):
            check(resolve(DENSE), with_entries({}))


class TestNeeded:
    @pytest.mark.parametrize("without", ["blk.2.nextn.eh_proj", UP])
    def test_a_late_missing_entry_is_found_first(self, without: str) -> None:
        plan = resolve(DENSE, default="IQ2_XXS", mtp_type="IQ2_XXS")
        with pytest.raises(ImatrixError, match=rf"none for 1 \({without}.*IQ2_XXS\)\); collect"):
            check(plan, matrix_of(DENSE, without=without))

    def test_what_the_plan_made_larger_for_want_of_them_is_missed_in_the_trunk_alone(self) -> None:
        trunk, head = matrix_of(DENSE, without=UP), matrix_of(DENSE, without="blk.2.")
        plans = [resolve(DENSE, default="IQ2_XXS", imatrix=matrix.lengths()) for matrix in (trunk, head)]
        assert [len(plan.no_imatrix) > 0 for plan in plans] == [True, True]
        with pytest.raises(ImatrixError, match=rf"none for 1 \({UP} \(IQ2_XXS\)\); collect"):
            check(plans[0], trunk)
        assert len(check(plans[1], head).without_entry) == 8

    def test_types_that_need_none_may_go_without(self) -> None:
        coverage = check(resolve(DENSE, default="Q4_K"), matrix_of(DENSE, without=UP))
        assert (coverage.without_entry, coverage.needed, coverage.match) == ((UP,), (), 13 / 14)

    @pytest.mark.parametrize("rows", [0, 99])
    def test_few_rows_are_refused_where_they_are_needed(self, rows: float) -> None:
        thin = changed(matrix_of(DENSE), UP, counts=(rows,))
        with pytest.raises(ImatrixError, match=rf"at least 100 rows behind {UP} \(IQ2_S\), got {rows}: calibrate on more text"):
            check(resolve(DENSE, default="IQ2_S"), thin)
        assert check(resolve(DENSE), thin).thin == (
            ThinEntry(name=UP, n_low=int(rows > 0), n_missing=int(rows == 0), n_expert=1),)

    def test_a_legacy_file_does_not_tell_rows(self) -> None:
        assert check(resolve(DENSE, default="IQ2_S"), matrix_of(DENSE, rows=1, legacy=True)).thin == ()


class TestExperts:
    def test_one_of_four_without_rows_is_reported(self) -> None:
        matrix = changed(matrix_of(EXPERTS), UPS, counts=(1000, 0, 1000, 50))
        coverage = check(resolve(EXPERTS, default="IQ2_S"), matrix)
        assert coverage.thin == (ThinEntry(name=UPS, n_low=1, n_missing=1, n_expert=4),)

    def test_more_than_the_limit_is_refused_where_they_are_needed(self) -> None:
        matrix = changed(matrix_of(EXPERTS), UPS, counts=(1000, 0, 0, 1000))
        with pytest.raises(ImatrixError, match=rf"at most 25% of experts without rows behind {UPS} \(IQ2_S\), got 2 of 4"):
            check(resolve(EXPERTS, default="IQ2_S"), matrix)
        assert len(check(resolve(EXPERTS, default="Q4_K"), matrix).thin) == 1

    def test_the_expert_gate_is_kept_and_its_entry_unused(self) -> None:
        coverage = check(resolve(EXPERTS), matrix_of(EXPERTS))
        assert coverage.unused == ("blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight")
        assert coverage.match == 1.0


class TestEntries:
    @pytest.mark.parametrize("default", ["Q4_K", "IQ2_S"])
    @pytest.mark.parametrize("n", [255, 257])
    def test_a_wrong_length_is_refused_for_any_type(self, default: str, n: int) -> None:
        short = ImatrixEntry(in_sum2=np.ones((1, n), np.float32), counts=np.array([1000], np.float32))
        with pytest.raises(ImatrixError, match=rf"expected 256 importances for {UP} \(ne0 \* ne2\), got {n}"):
            check(resolve(DENSE, default=default), with_entries({**matrix_of(DENSE).entries, UP: short}))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
    def test_values_that_are_no_sums_of_squares_are_refused(self, value: float) -> None:
        with pytest.raises(ImatrixError, match=rf"sums of squares for {UP}, .* got 2 others, the first in column 7"):
            check(resolve(DENSE), changed(matrix_of(DENSE), UP, sums=value, columns=slice(7, 9)))


class TestOracle:
    def test_llama_imatrix_covers_the_trunk(self, tiny_model: Path, shared: Path) -> None:
        model, matrix = describe_model(read_header(tiny_model)), read_imatrix(shared / "oracle" / "imatrix-tiny.gguf")
        plan = resolve(model, default="IQ2_S", ftype="IQ2_S", mtp_type="Q8_0", imatrix=matrix.lengths())
        coverage = check(plan, matrix)
        assert (len(coverage.matched), coverage.match, coverage.unknown) == (31, 1.0, ())
        assert [name for name in coverage.without_entry if not name.startswith("blk.4.")] == ["output.weight"]
        assert coverage.lookups == ("token_embd.weight",)

    def test_and_not_an_mtp_block_of_low_bits(self, tiny_model: Path, shared: Path) -> None:
        model, matrix = describe_model(read_header(tiny_model)), read_imatrix(shared / "oracle" / "imatrix-tiny.gguf")
        plan = resolve(model, default="IQ1_M", ftype="IQ1_M", mtp_type="IQ2_XXS")
        with pytest.raises(ImatrixError, match=r"none for 8 \(blk\.4\..* \(IQ2_XXS\)"):
            check(plan, matrix)

    def test_a_matrix_of_another_model_is_refused(self, tiny_model: Path, shared: Path) -> None:
        model, matrix = describe_model(read_header(tiny_model)), read_imatrix(shared / "oracle" / "imatrix-smollm2.gguf")
        with pytest.raises(ImatrixError, match="collect the matrix from this base"):
            check(resolve(model, mtp_type="Q8_0"), matrix)
