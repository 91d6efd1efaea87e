"""What a tier is obliged to, and how a candidate's evidence compares with the incumbent's.

On a second and later text each number of rows is an obligation of its own, such as "kld_mean on calibration.txt": texts are never
pooled, and none may get worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.core.errors import InputError
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.smoke import SmokeRecord, smoke_path
from quantkit.measure.gate import Verdict, first_rank
from quantkit.measure.obligations import Margins, Obligation, compare_rows, compare_shares
from quantkit.measure.summary import summarize
from quantkit.spec.json_records import record_from_json
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.protocol import Protocol

_LEAST_MARGIN = 1e-6
_ON = " on "


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEvidence:
    """A tier of a bundle that verifies.

    Attributes:
        rows: of each text, the first by "", the others by the text's name.
        mtp: None where no head was checked. smoke: None where the file was not asked.
        packs: of each text, the hash of the reference pack that stood in base's place; None where base itself was run.
    """

    size_bytes: int
    rows: Mapping[str, Rows]
    mtp: MtpResult | None
    smoke: SmokeRecord | None
    packs: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """The share of drafts that the trunk accepts."""
        if self.mtp is None or self.mtp.status != "measured":
            return None
        forced = self.mtp.teacher_forced_acceptance
        return forced.value if forced is not None else self.mtp.acceptance_rate


def read_evidence(folder: Path, manifest: Mapping[str, Any], tier: str) -> TierEvidence:
    """A tier's evidence from a bundle that has been verified.

    Raises:
        InputError: records of another form.
    """
    run = RunFolder(path=folder)
    texts = ["", *(further["name"] for further in manifest["further_corpora"])]
    rows = {text: read_parquet(replace(run, corpus=text).rows(tier))[0] for text in texts}
    summaries = {text: read_json(replace(run, corpus=text).summary(tier)) or {} for text in texts}
    packs = {text: summary["ref"]["sha256"] if "ref" in summary else None for text, summary in summaries.items()}
    mtp = None
    if f"mtp/{tier}.json" in manifest["files"]:
        try:
            mtp = record_from_json(MtpResult, read_json(run.path / "mtp" / f"{tier}.json"))
        except (KeyError, TypeError) as error:
            raise InputError(f"expected an MTP check in {run.path}/mtp/{tier}.json, got something else: {error}; "
                             "run the check again, or fetch the bundle again") from error
    smoke = SmokeRecord.from_json(read_json(smoke_path(run, tier))) if f"smoke/{tier}.json" in manifest["files"] else None
    return TierEvidence(size_bytes=int(manifest["tiers"][tier]["size_bytes"]), rows=rows, packs=packs, mtp=mtp, smoke=smoke)


def margin_of(name: str, protocol: Protocol) -> float:
    """How much of an obligation does not matter, on the scale of its loss; 1 for those that are met or broken."""
    margins, name = protocol.gate.margins, name.split(_ON)[0]
    if name == "size_bytes":  # the protocol's own measure of sizes that are equal for a plan; a budget may have no slack at all
        return max(margins.size_bytes, protocol.search.size_tolerance, _LEAST_MARGIN)
    return {"kld_mean": margins.kld_mean, "kld_p999": margins.kld_p999, "same_top_p": margins.same_top_p,
            "ln_ppl_ratio": margins.ln_ppl_ratio, "acceptance_rate": margins.acceptance_rate}.get(name, 1.0)


def first_ranks(evidence: TierEvidence, protocol: Protocol) -> dict[str, int]:
    """Ranks of a first incumbent: margins between each number and a perfect tier; 0 or 1 for what is met or broken."""
    distances = {
        "valid": 0.0, "smoke": float(evidence.smoke is not None and not evidence.smoke.passed), "size_bytes": 1.0,
        "acceptance_rate": 0.0 if evidence.acceptance is None else 1 - evidence.acceptance,
    }
    for text, rows in evidence.rows.items():
        summary = summarize(rows)
        distances |= {_on(name, text): distance for name, distance in {
            "kld_mean": float(bool(summary.kld.value)), "kld_p999": float(bool(summary.kld_quantile(0.999).value)),
            "same_top_p": 1 - (summary.same_top_p.value or 0.0), "ln_ppl_ratio": summary.ln_ppl_ratio.value or 0.0}.items()}
    return {name: first_rank(distance, margin_of(name, protocol)) for name, distance in distances.items()}


def _on(name: str, text: str) -> str:
    return f"{name}{_ON}{text}" if text else name


def compare_tier(incumbent: TierEvidence, candidate: TierEvidence | None, protocol: Protocol, why: str) -> list[Obligation]:
    """All obligations of one tier.

    Args:
        candidate: None where it has nothing that could be trusted; `why` says what is wrong.

    Raises:
        InputError: rows that cannot be paired, of different references, or too few chunks.
    """
    n_chunk = min(len(np.unique(rows["chunk"])) for rows in incumbent.rows.values())
    if n_chunk < protocol.gate.min_n_chunk:
        raise InputError(f"expected at least {protocol.gate.min_n_chunk} chunks for a gate, got {n_chunk}: fewer prove nothing; "
                         "evaluate more of the text")
    if candidate is None:
        return [Obligation(name="valid", incumbent=1.0, candidate=0.0, margin=1.0, verdict="worse", reason=why)]
    if incumbent.packs != candidate.packs:
        raise InputError("expected incumbent and candidate measured against one reference, got base and a reference pack, or two "
                         "packs: a pack's KLD is a lower bound, so its tier would look better by what it falls short; measure both "
                         "against base, or both with one --ref")
    gate = protocol.gate
    margins = Margins(kld_mean=gate.margins.kld_mean, kld_p999=gate.margins.kld_p999, same_top_p=gate.margins.same_top_p,
                      ln_ppl_ratio=gate.margins.ln_ppl_ratio)
    numbers = [replace(obligation, name=_on(obligation.name, text)) for text, rows in incumbent.rows.items()
               for obligation in compare_rows(rows, candidate.rows[text], margins, alpha=gate.alpha)]
    return [
        Obligation(name="valid", incumbent=1.0, candidate=1.0, margin=1.0, verdict="not worse"),
        _compare_smoke(incumbent.smoke, candidate.smoke),
        _compare_sizes(incumbent.size_bytes, candidate.size_bytes, protocol),
        *numbers,
        _compare_heads(incumbent, candidate, protocol),
    ]


def _compare_smoke(incumbent: SmokeRecord | None, candidate: SmokeRecord | None) -> Obligation:
    """Answers to the protocol's prompt. Not to have been asked is as good as the other's not to have been."""
    known: dict[str, Any] = {"name": "smoke", "margin": 1.0, "incumbent": None if incumbent is None else float(incumbent.passed),
             "candidate": None if candidate is None else float(candidate.passed)}
    if incumbent is None and (candidate is None or candidate.passed):
        return Obligation(**known, verdict="not compared", reason="the incumbent was not asked")
    if candidate is None:
        return Obligation(**known, verdict="worse", reason="the incumbent was asked, the candidate was not")
    passed = incumbent is None or incumbent.passed
    if candidate.passed == passed:
        return Obligation(**known, verdict="not worse")
    reason = "; ".join(candidate.failures) or None
    return Obligation(**known, verdict="better" if candidate.passed else "worse", reason=reason)


def _compare_sizes(incumbent: int, candidate: int, protocol: Protocol) -> Obligation:
    """Bytes within the budget, which is the incumbent's and the margin; the rest of the loss's scale is a fraction of it."""
    loss = candidate / incumbent - 1
    within = loss <= protocol.gate.margins.size_bytes
    fewer = loss < -margin_of("size_bytes", protocol)
    verdict: Verdict = "worse" if not within else "better" if fewer else "not worse"
    return Obligation(name="size_bytes", incumbent=float(incumbent), candidate=float(candidate), loss=loss,
                      margin=protocol.gate.margins.size_bytes, verdict=verdict)


def _compare_heads(incumbent: TierEvidence, candidate: TierEvidence, protocol: Protocol) -> Obligation:
    """Acceptance of the MTP head; a head that was lost, was not checked, or fails its check, is worse than one that passed."""
    margin, a, b = protocol.gate.margins.acceptance_rate, incumbent.mtp, candidate.mtp
    known: dict[str, Any] = {"name": "acceptance_rate", "incumbent": incumbent.acceptance, "candidate": candidate.acceptance,
                             "margin": margin}
    if a is None or a.status != "measured" or incumbent.acceptance is None:
        return Obligation(**known, verdict="not compared", reason="the incumbent has no measured head")
    if b is None or b.status != "measured" or candidate.acceptance is None:
        return Obligation(**known, verdict="worse", reason=(b and b.reason) or "the candidate's head was not checked")
    if b.problems and not a.problems:
        return Obligation(**known, verdict="worse", reason="; ".join(b.problems))
    if a == b:  # one file, one head, one build: the same measurement, with no error between the two
        return Obligation(**known, loss=0.0, p_not_worse=0.0, p_better=1.0, verdict="not worse")
    x, y = a.teacher_forced_acceptance, b.teacher_forced_acceptance
    if x is not None and y is not None and x.se is not None and y.se is not None:
        df = min(x.n_article, y.n_article) - 1
        return compare_shares("acceptance_rate", x.value, y.value, (x.se, y.se), df, margin, alpha=protocol.gate.alpha)
    return compare_shares("acceptance_rate", incumbent.acceptance, candidate.acceptance, None, 1, margin,
                          alpha=protocol.gate.alpha)
