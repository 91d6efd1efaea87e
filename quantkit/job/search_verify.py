"""A proposal before the report chunks: rows of incumbent and proposal, the obligations, the commit rule, the log.

The report chunks belong to articles that nothing of the search saw. Every proposal that they judge is counted, over all searches of
a run directory: the k-th must prove itself at a level that shrinks with k. Rows are kept as evidence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.files import sha256_json, write_atomic
from quantkit.engine.lockstep import Rows
from quantkit.job.parts import read_parquet, write_parquet
from quantkit.job.rundir import read_json
from quantkit.job.search_trials import ChunkSet, TrialRunner
from quantkit.measure.search_stats import Margins, Obligation, compare_plans, label_proposal, proposal_alpha
from quantkit.spec.protocol import Protocol
from quantkit.spec.search_records import JudgedObligation, SearchLabel


class Judgement(NamedTuple):
    """What the report set says of one proposal."""

    k: int
    alpha: float
    obligations: tuple[JudgedObligation, ...]
    label: SearchLabel
    commits: bool


class Contest(NamedTuple):
    """Two plans by the kinds of their groups, as `ShardStore.compose` takes them."""

    incumbent: Mapping[str, str]
    proposal: Mapping[str, str]


class EvidenceLog:
    """Every proposal that was judged in a run directory, one line each, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    self._lines.append(json.loads(line))
                except ValueError:
                    break

    def number(self, report_set: str, contest: str) -> int:
        """Which proposal on this report set a contest is: its own number where it was judged before, else the next."""
        own = [line for line in self._lines if line["report_set"] == report_set]
        for line in own:
            if line["contest"] == contest:
                return int(line["k"])
        return len(own) + 1

    def add(self, entry: Mapping[str, Any]) -> None:
        """Write a judgement down, once."""
        if any(line["report_set"] == entry["report_set"] and line["contest"] == entry["contest"] for line in self._lines):
            return
        self._lines.append(dict(entry))
        write_atomic(self._path, b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in self._lines))


def judge(runner: TrialRunner, contests: Mapping[str, Contest], report: ChunkSet, second: ChunkSet | None, protocol: Protocol,
          folder: Path) -> dict[str, Judgement]:
    """Hold each proposal against its incumbent on the report set, in the order given.

    Args:
        contests: by the tier's name.
        folder: where `rows/` and `log.jsonl` are.
    """
    sets = [report, *([second] if second is not None else [])]
    rows = {chunks.name: _rows_of(runner, contests, chunks, folder / "rows") for chunks in sets}
    log = EvidenceLog(folder / "log.jsonl")
    report_set = sha256_json([report.tokens_sha256, list(report.chunks)])
    margins = protocol.gate.margins
    found = {}
    for tier, contest in contests.items():
        a, b = (sha256_json(dict(sorted(plan.items()))) for plan in contest)
        k = log.number(report_set, f"{tier} {a} {b}")
        alpha = proposal_alpha(protocol.search.alpha, k)
        other = (rows[second.name][a], rows[second.name][b]) if second is not None else None
        obligations = compare_plans(
            rows[report.name][a], rows[report.name][b], second=other, alpha=alpha,
            margins=Margins(kld_mean=margins.kld_mean, kld_p999=margins.kld_p999, same_top_p=margins.same_top_p,
                            ln_ppl_ratio=margins.ln_ppl_ratio))
        decision = label_proposal(obligations)
        found[tier] = Judgement(k, alpha, tuple(map(_record, obligations)), decision.label, decision.commits)
        log.add({"report_set": report_set, "contest": f"{tier} {a} {b}", "k": k, "alpha": alpha, "tier": tier,
                 "label": decision.label, "commits": decision.commits, "incumbent": a, "proposal": b,
                 "obligations": [o._asdict() for o in obligations]})
    return found


def _rows_of(runner: TrialRunner, contests: Mapping[str, Contest], chunks: ChunkSet, folder: Path) -> dict[str, Rows]:
    """Rows of every plan that takes part, by the hash of its kinds; measured where they are not kept yet."""
    plans = {sha256_json(dict(sorted(plan.items()))): plan for contest in contests.values() for plan in contest}
    found: dict[str, Rows] = {}
    paths = {}
    for name, kinds in plans.items():
        key = runner.content_key(chunks, kinds)
        paths[name] = (folder / f"{key}.parquet", key)
        if paths[name][0].exists():
            rows, metadata = read_parquet(paths[name][0])
            if metadata.get("trial") == key:
                found[name] = rows
    missing = {name: kinds for name, kinds in plans.items() if name not in found}
    if missing:
        for name, rows in runner.rows(chunks, missing, f"verify on {chunks.name}"):
            write_parquet(paths[name][0], rows, {"trial": paths[name][1], "chunks": chunks.name})
            found[name] = rows
    return found


def _record(o: Obligation) -> JudgedObligation:
    return JudgedObligation(**o._asdict())


def read_start(path: Path, search_id: str) -> dict[str, Mapping[str, str]] | None:
    """The incumbents with which this very search began, tier to tensor types; None where it begins now."""
    held = read_json(path)
    if isinstance(held, dict) and held.get("search_id") == search_id:
        return dict(held["incumbents"])
    return None

