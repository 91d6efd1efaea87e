"""The gate: a candidate's bundle against the incumbent's, tier by tier, obligation by obligation.

    size_bytes      within the incumbent's bytes and the margin; fewer by more than the margin is better
    kld_mean, kld_p999, same_top_p, ln_ppl_ratio    `measure.obligations`, from the rows of both
    acceptance_rate where both have a check of the MTP head: teacher-forced if both have it with an error, else of sampled text
    smoke           the file answered the protocol's prompt; a candidate that was not asked where the incumbent was, did not
    valid           the bundle verifies

The vector of all obligations of all tiers decides at once (`measure.gate`): a candidate is taken whole or not at all. An incumbent
that does not verify protects nothing, so that is an error.

In a store the first incumbent sets the ranks; each commit lowers their sum by one at least, and their sum at the start and the
protocol's max_commits bound the number of commits. Both are in every label.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import InputError
from quantkit.job.bundles import Store, open_store
from quantkit.job.gate_obligations import compare_tier, first_ranks, margin_of, read_evidence
from quantkit.job.rundir import read_json
from quantkit.job.verify import ReportMaker, verify_bundle
from quantkit.measure.gate import Decision, decide, next_rank
from quantkit.measure.obligations import Obligation, settle
from quantkit.spec.protocol import Protocol

LABEL_SCHEMA = 1


class JudgedObligation(NamedTuple):
    """An obligation of a tier with the ranks that go into the decision."""

    tier: str
    obligation: Obligation
    incumbent_rank: int
    candidate_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What a gate came to.

    Attributes:
        label: of the decision. commits: the candidate may replace the incumbent. moved: it has, in a store.
        reason: why a candidate with the right label is not taken, such as the bound on commits.
        ranks: the candidate's, by tier and obligation: an incumbent's in the next gate.
        n_commits: strict commits of the store so far, this one included where it moved. bound: how many there can be.
    """

    label: str
    commits: bool
    moved: bool
    reason: str | None
    candidate: str
    incumbent: str
    obligations: tuple[JudgedObligation, ...]
    ranks: Mapping[str, Mapping[str, int]]
    n_commits: int
    first_rank_sum: int
    max_commits: int

    @property
    def bound(self) -> int:
        """Strict commits that there can be at most."""
        return min(self.first_rank_sum, self.max_commits)

    def to_json(self, protocol: Protocol) -> dict[str, Any]:
        """The evidence: what label.json holds."""
        return {
            "schema": LABEL_SCHEMA, "label": self.label, "commits": self.commits, "reason": self.reason,
            "candidate": self.candidate, "incumbent": self.incumbent, "protocol": protocol.name,
            "protocol_id": protocol.protocol_id, "rules": _rules(protocol), "n_commits": self.n_commits,
            "max_commits": self.max_commits, "first_rank_sum": self.first_rank_sum, "ranks": self.ranks,
            "obligations": [{"tier": j.tier, "incumbent_rank": j.incumbent_rank, "candidate_rank": j.candidate_rank,
                             **dataclasses.asdict(j.obligation)} for j in self.obligations],
        }

    @property
    def is_valid(self) -> bool:
        """Whether the candidate's bundle verifies."""
        return all(j.obligation.verdict != "worse" for j in self.obligations if j.obligation.name == "valid")


def gate_runs(candidate: Path, incumbent: Path, protocol: Protocol, make_report: ReportMaker,
              tiers: Sequence[str] | None = None) -> GateResult:
    """Compare two bundles; nothing is written.

    Raises:
        InputError: bundles that cannot be compared: another text, base, tokens, chunks or tiers.
        CheckFailed: the incumbent does not verify.
    """
    return _judge(candidate, incumbent, protocol, make_report, tiers, None, 0)


def gate_store(candidate: Path, incumbent: Path | None, protocol: Protocol, store_path: Path, make_report: ReportMaker,
               tiers: Sequence[str] | None = None, *, dry_run: bool = False) -> GateResult:
    """Compare a candidate with a store's current bundle, and make it the current one if the rule allows.

    Args:
        incumbent: the current bundle, or the first one for a new store; None means the current one.
        dry_run: say what would be done; the store stays as it is.

    Raises:
        InputError, CheckFailed: as `gate_runs`; or the incumbent is not the store's current bundle.
    """
    if dry_run and not store_path.exists():
        return gate_runs(candidate, _required(incumbent, store_path), protocol, make_report, tiers)
    with open_store(store_path) as store:
        current = store.current_id()
        if current is None:
            first = _required(incumbent, store_path)
            if dry_run:
                return gate_runs(candidate, first, protocol, make_report, tiers)
            current = _found(store, first, protocol, make_report)
        elif incumbent is not None and _result_id(incumbent) != current:
            raise InputError(f"expected the store's current bundle as the incumbent ({current}), got {_result_id(incumbent)} at "
                             f"{incumbent}: leave --against away, or give {store.current}")
        label = store.label(current)
        _check_rules(store, label, protocol)
        result = _judge(candidate, store.bundle(current), protocol, make_report, tiers, label, int(label["n_commits"]))
        if dry_run or result.candidate == current:
            return result
        if result.commits:
            result = dataclasses.replace(result, moved=True, n_commits=result.n_commits + 1)
            store.commit(candidate, result.candidate, result.to_json(protocol))
        else:
            store.reject(candidate if result.is_valid else None, result.candidate, result.to_json(protocol))
        return result


def _found(store: Store, first: Path, protocol: Protocol, make_report: ReportMaker) -> str:
    """Begin a store with its first incumbent, whose distance from perfect sets the ranks."""
    verify_bundle(first, make_report).require(str(first))
    manifest = read_json(first / "manifest.json")
    ranks = {tier: first_ranks(read_evidence(first, manifest, tier), protocol) for tier in manifest["tiers"]}
    total = sum(sum(own.values()) for own in ranks.values())
    store.commit(first, manifest["result_id"], {
        "schema": LABEL_SCHEMA, "label": "first", "candidate": manifest["result_id"], "protocol": protocol.name,
        "protocol_id": protocol.protocol_id, "rules": _rules(protocol), "n_commits": 0,
        "max_commits": protocol.gate.max_commits, "first_rank_sum": total, "ranks": ranks})
    return str(manifest["result_id"])


def _judge(candidate: Path, incumbent: Path, protocol: Protocol, make_report: ReportMaker, names: Sequence[str] | None,
           label: Mapping[str, Any] | None, n_commits: int) -> GateResult:
    verify_bundle(incumbent, make_report).require(str(incumbent))
    verification = verify_bundle(candidate, make_report)
    held, new = (read_json(path / "manifest.json") for path in (incumbent, candidate))
    if verification.result_id is None:
        verification.require(str(candidate))  # nothing to give a label to
    tiers = list(held["tiers"])
    if verification.passed:
        tiers = _choose_tiers(held, new, names)
        _check_comparable(protocol, held, new)
    obligations: dict[str, list[Obligation]] = {}
    ranks: dict[str, dict[str, int]] = {}
    for tier in tiers:
        evidence = read_evidence(incumbent, held, tier)
        ranks[tier] = label["ranks"][tier] if label is not None else first_ranks(evidence, protocol)
        other = read_evidence(candidate, new, tier) if verification.passed and tier in new["tiers"] else None
        why = "the tier is missing"
        if not verification.passed:
            why = f"{verification.failures[0].file} does not verify"
        obligations[tier] = compare_tier(evidence, other, protocol, why)
    judged = _with_ranks(obligations, ranks, protocol)
    decision = decide([j.incumbent_rank for j in judged], [j.candidate_rank for j in judged])
    return _result(decision, judged, held, new, protocol, label, ranks, n_commits)


def _result(decision: Decision, judged: Sequence[JudgedObligation], held: Mapping[str, Any], new: Mapping[str, Any],
            protocol: Protocol, label: Mapping[str, Any] | None, ranks: Mapping[str, Mapping[str, int]],
            n_commits: int) -> GateResult:
    total = int(label["first_rank_sum"]) if label is not None else sum(sum(own.values()) for own in ranks.values())
    result = GateResult(label=decision.label, commits=decision.commits, moved=False, reason=None, candidate=new["result_id"],
                        incumbent=held["result_id"], obligations=tuple(judged), n_commits=n_commits, first_rank_sum=total,
                        max_commits=protocol.gate.max_commits, ranks={**(label["ranks"] if label else {}), **_ranks_of(judged)})
    if result.commits and n_commits >= result.bound:
        return dataclasses.replace(result, commits=False, reason=f"{n_commits} commits were made, and there can be {result.bound}")
    return result


def _with_ranks(obligations: Mapping[str, Sequence[Obligation]], ranks: Mapping[str, Mapping[str, int]],
                protocol: Protocol) -> list[JudgedObligation]:
    """The whole family settled, and each verdict as a step of its rank."""
    places = [(tier, obligation) for tier, own in obligations.items() for obligation in own]
    settled = settle([obligation for _, obligation in places], alpha=protocol.gate.alpha)
    out = []
    for (tier, _), obligation in zip(places, settled, strict=True):
        rank = ranks[tier].get(obligation.name, 0)
        margin = margin_of(obligation.name, protocol)
        gain = margin * rank if obligation.loss is None else max(0.0, -obligation.loss)
        out.append(JudgedObligation(tier, obligation, rank, next_rank(rank, obligation.verdict, gain, margin)))
    return out


def _ranks_of(judged: Sequence[JudgedObligation]) -> dict[str, dict[str, int]]:
    """The ranks of the candidate, which it has as the incumbent of the next gate."""
    ranks: dict[str, dict[str, int]] = {}
    for item in judged:
        ranks.setdefault(item.tier, {})[item.obligation.name] = item.candidate_rank
    return ranks


def _choose_tiers(held: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    """The tiers to compare: the incumbent's, or those that were named, where all others are the same files with the same rows."""
    mine, theirs = held["tiers"], new["tiers"]
    if extra := [tier for tier in theirs if tier not in mine]:
        raise InputError(f"expected the incumbent's tiers ({', '.join(mine)}), got {extra[0]} in the candidate: a tier that "
                         "nothing stands against cannot be gated; audit the candidate without it")
    if names is None:
        return list(mine)
    if unknown := [name for name in names if name not in mine]:
        raise InputError(f"expected a tier of the incumbent ({', '.join(mine)}), got {unknown[0]}: name one of them")
    for tier in mine:
        same = tier in theirs and all(mine[tier][key] == theirs[tier][key] for key in ("sha256", "rows_sha256"))
        if tier not in names and not same:
            raise InputError(f"expected every tier but {', '.join(names)} as in the incumbent, got another {tier}: what is not "
                             "compared may not change; leave --tier away")
    return [tier for tier in mine if tier in names]


def _check_comparable(protocol: Protocol, held: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Rows may be compared where eval_id, base, tokens and build agree, and the gate's protocol evaluates as they did."""
    for what, manifest in (("incumbent", held), ("candidate", new)):
        if manifest["protocol"]["eval_id"] != protocol.eval_id:
            raise InputError(f"expected bundles that were evaluated as {protocol.name} says (eval_id {protocol.eval_id}), got "
                             f"eval_id {manifest['protocol']['eval_id']} in the {what}: audit it under this protocol, or gate with "
                             "its own")
    pairs = {"the base": [m["base"]["sha256"] for m in (held, new)], "the tokens": [m["token_ids_sha256"] for m in (held, new)],
             "the further texts": [m["further_corpora"] for m in (held, new)],
             "the build and device": [m["build"] for m in (held, new)]}
    for what, (a, b) in pairs.items():
        if a != b:
            raise InputError(f"expected {what} of the incumbent ({a}), got {b} in the candidate: KLD belongs to file and "
                             "arithmetic; audit both on one machine")


def _check_rules(store: Store, label: Mapping[str, Any], protocol: Protocol) -> None:
    """One store, one set of rules: margins that move would move what is protected."""
    if label.get("rules") != _rules(protocol):
        raise InputError(f"expected the rules that {store.path} was begun with (protocol {label.get('protocol')}), got others "
                         f"in {protocol.name}: gate with that protocol, or begin a new store")


def _rules(protocol: Protocol) -> dict[str, Any]:
    return {"eval_id": protocol.eval_id, "mtp_id": protocol.mtp_id, "size_tolerance": protocol.search.size_tolerance,
            "gate": dataclasses.asdict(protocol.gate)}


def _required(incumbent: Path | None, store: Path) -> Path:
    if incumbent is None:
        raise InputError(f"expected the first incumbent for the new store {store}, got none: give its run directory with --against")
    return incumbent


def _result_id(run: Path) -> str | None:
    held = read_json(run / "manifest.json")
    return str(held.get("result_id")) if isinstance(held, dict) else None
