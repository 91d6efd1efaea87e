"""Records go to JSON and come back unchanged."""

from __future__ import annotations

import json

import pytest

from quantkit.core.files import canonical_json
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.records import KLD_QUANTILES, P_DIFF_QUANTILES, TierSummary
from tests.measure.synthetic import make_rows


@pytest.mark.parametrize("n_article", [2, 10])
@pytest.mark.parametrize("of_base", [False, True])
def test_a_summary_comes_back_from_json(n_article: int, of_base: bool) -> None:
    rows = make_rows(n_article=n_article)
    summary = summarize(base_rows(rows) if of_base else rows)
    assert TierSummary.from_json(json.loads(canonical_json(summary.to_json()))) == summary


def test_json_is_plain_and_has_no_nan() -> None:
    data = summarize(make_rows(n_article=2)).to_json()
    assert list(data)[:4] == ["n_chunk", "n_scored", "n_article", "g_eff"]
    assert data["kld"].keys() == {"value", "se_iid", "se_chunk", "se", "lo", "hi", "reason"}
    assert [x["q"] for x in data["kld_quantiles"]] == list(KLD_QUANTILES)
    assert [x["q"] for x in data["p_diff_quantiles"]] == list(P_DIFF_QUANTILES)
    assert "NaN" not in json.dumps(data)


@pytest.mark.parametrize("damage", ["missing", "unknown", "inner"])
def test_json_with_other_keys_is_refused(damage: str) -> None:
    data = summarize(make_rows()).to_json()
    if damage == "missing":
        del data["kld"]
    elif damage == "unknown":
        data["kld2"] = 1
    else:
        data["kld"]["error"] = 1
    with pytest.raises(KeyError, match="expected the keys"):
        TierSummary.from_json(data)


def test_an_unknown_quantile_is_refused() -> None:
    with pytest.raises(KeyError, match=r"no quantile at 0\.42"):
        summarize(make_rows()).kld_quantile(0.42)
