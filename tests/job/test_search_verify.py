"""The report set: what was better on the search chunks alone is rejected, attempts are counted, evidence is kept and used again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from quantkit.core.files import sha256_json
from quantkit.job.search_trials import ChunkSet, TrialRunner
from quantkit.job.search_verify import Contest, EvidenceLog, judge
from quantkit.measure.numbers import Rows
from quantkit.measure.search_stats import proposal_alpha
from quantkit.spec.protocol import load_protocol
from tests.measure.synthetic import make_rows

PROTOCOL = load_protocol("wikitext2-quick-v1")
REPORT = ChunkSet(name="report", tokens=None, tokens_sha256="0", chunks=tuple(range(80)), articles=np.repeat(np.arange(20), 4))
STOCK, PLANTED, GOOD = {"a": "Q4_K"}, {"a": "Q5_K"}, {"a": "Q6_K"}


class FakeRunner:
    """Plans by their kinds: the planted one differs from stock by noise alone, the good one has three fifths of its KLD."""

    def __init__(self) -> None:
        self.n_measured = 0

    def content_key(self, chunks: ChunkSet, kinds: Mapping[str, str]) -> str:
        return sha256_json([chunks.name, dict(kinds)])

    def rows(self, chunks: ChunkSet, trials: Mapping[str, Mapping[str, str]], step: str) -> Iterator[tuple[str, Rows]]:
        for name, kinds in trials.items():
            self.n_measured += 1
            rows = make_rows(n_article=20, n_pos=255)
            rng = np.random.default_rng(1)
            if kinds == PLANTED:
                rows["kld"] *= np.exp(rng.normal(0, 0.1, 20))[rows["article"]]
            elif kinds == GOOD:
                rows["kld"] *= 0.6
            yield name, rows


@pytest.fixture
def runner() -> TrialRunner:
    return cast(TrialRunner, FakeRunner())


def test_a_planted_improvement_is_rejected_and_a_real_one_commits(runner: TrialRunner, tmp_path: Path) -> None:
    contests = {"planted": Contest(STOCK, PLANTED), "good": Contest(STOCK, GOOD)}
    found = judge(runner, contests, REPORT, None, PROTOCOL, tmp_path)
    assert found["planted"].commits is False
    assert found["planted"].obligations[0].verdict != "better"
    assert (found["good"].commits, found["good"].label) == (True, "strict progress")


def test_attempts_are_counted_over_all_searches_and_each_once(runner: TrialRunner, tmp_path: Path) -> None:
    first = judge(runner, {"tier": Contest(STOCK, PLANTED)}, REPORT, None, PROTOCOL, tmp_path)
    again = judge(runner, {"tier": Contest(STOCK, PLANTED)}, REPORT, None, PROTOCOL, tmp_path)
    other = judge(runner, {"tier": Contest(STOCK, GOOD)}, REPORT, None, PROTOCOL, tmp_path)
    assert (first["tier"].k, again["tier"].k, other["tier"].k) == (1, 1, 2)
    assert first == again
    assert other["tier"].alpha == proposal_alpha(PROTOCOL.search.alpha, 2)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["k"] for line in lines] == [1, 2]


def test_rows_are_measured_once_and_kept(runner: TrialRunner, tmp_path: Path) -> None:
    judge(runner, {"tier": Contest(STOCK, GOOD)}, REPORT, None, PROTOCOL, tmp_path)
    judge(runner, {"tier": Contest(STOCK, PLANTED)}, REPORT, None, PROTOCOL, tmp_path)
    assert cast(FakeRunner, runner).n_measured == 3
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 3


def test_another_report_set_counts_from_one(tmp_path: Path) -> None:
    log = EvidenceLog(tmp_path / "log.jsonl")
    log.add({"report_set": "a", "contest": "x", "k": 1})
    assert (log.number("a", "x"), log.number("a", "y"), log.number("b", "x")) == (1, 2, 1)
