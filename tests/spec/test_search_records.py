"""A search's record is the same after a trip through JSON."""

from __future__ import annotations

import json

from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.refpack_records import PackArithmetic
from quantkit.spec.search_records import Candidate, Cost, Group, JudgedObligation, Proposal, SearchResult

COST = Cost(group="a", type="Q4_K", size_bytes=144, weight_error=0.01, kld=1e-4, se=None, source="predicted")
OBLIGATION = JudgedObligation(name="kld_mean", incumbent=0.2, proposal=0.1, theta=-0.7, se=0.1, upper=-0.5, margin=0.02,
                              p_better=1e-5, verdict="better")
PROPOSAL = Proposal(
    tier="search-Q4_K_M", ftype="Q4_K_M", budget_bytes=200, tensor_bytes=144, incumbent="Q4_K_M", incumbent_bytes=160,
    choices=(COST,), fixed={"b": "F32"}, predicted_kld=1e-4, bound=1e-4, unmeasured_kld=1e-4, monotone_loss=0.0, screen_loss=0.01,
    search_kld=2e-4,
    candidates=(Candidate(name="measured", types={"a": "Q4_K"}, tensor_bytes=144, predicted_kld=1e-4, kld=1e-4,
                          verdict=""),),
    chosen="measured", k=1, alpha=0.015, obligations=(OBLIGATION,), label="strict progress", commits=True)
RESULT = SearchResult(
    search_id="0", base_sha256="1", imatrix_sha256=None, protocol_id="2", quick=False, search_chunks=(1, 2), select_chunks=(3,),
    report_chunks=(4,), second_chunks=(), n_trials=1, n_pairs=2, prediction_error=0.1,
    groups=(Group(name="a", tensors=("a",), n_elements=256, types=("Q8_0", "Q4_K")),), costs=(COST,), proposals=(PROPOSAL,),
    arithmetic=PackArithmetic(backend="CPU", llama_cpp_python="0", llama_cpp_commit="c", system_info="s", n_gpu_layers=20,
                              main_gpu=1, tensor_split=(3.0, 1.0)))


def test_round_trip() -> None:
    assert record_from_json(SearchResult, json.loads(json.dumps(record_to_json(RESULT)))) == RESULT
