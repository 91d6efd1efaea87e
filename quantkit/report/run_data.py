"""Everything that a report of a run is made from, read once: manifest, protocol, plans, summaries, and what else was measured.

What a run does not have (verdicts, floors, slices, MTP checks, facts of the base) is None or empty; a report says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.core.errors import InputError
from quantkit.job.fit import read_base
from quantkit.job.foreign import reading_records
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.source import read_source
from quantkit.report.mtp_report import read_results, read_speeds
from quantkit.report.run_form import check_manifest
from quantkit.report.sentences import tier_sentences
from quantkit.report.table import TableHeader, TableRow, order_rows
from quantkit.spec.base_facts import BaseFacts
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.records import TierSummary
from quantkit.spec.refpack_records import PackReference, reference_notes
from quantkit.spec.source_facts import FileSource
from quantkit.spec.speed_records import SpeedResult
from quantkit.spec.verdict_records import Floor, Slices, Verdicts, WeightsKld

_Line = TypeVar("_Line", TableHeader, TableRow)
_Record = TypeVar("_Record", Verdicts, Floor, Slices, WeightsKld)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """A run as reports take it: what was measured on one text.

    Attributes:
        rows: the base first, then the tiers by size.
        plans: by tier; none for a file that came from elsewhere.
        verdicts: of the pairs of all these tiers; None where they were not computed, or of other rows than these.
        floors: by the sha256 of the file.
        speeds: by tier, on the machine that each names; of tiers of this table alone.
    """

    run: RunFolder
    manifest: Mapping[str, Any]
    protocol: Protocol
    header: TableHeader
    rows: tuple[TableRow, ...]
    plans: Mapping[str, Plan]
    base: BaseFacts | None
    verdicts: Verdicts | None
    floors: Mapping[str, Floor]
    slices: tuple[Slices, ...]
    mtp: tuple[MtpResult, ...]
    speeds: Mapping[str, SpeedResult]

    @property
    def tiers(self) -> tuple[TableRow, ...]:
        """The rows without the base."""
        return self.rows[1:]

    @property
    def letters(self) -> Mapping[str, str]:
        """By tier: tiers that share a letter are not told apart by mean KLD; empty where no pair was tested."""
        if self.verdicts is None or "kld" not in {c.statistic for c in self.verdicts.comparisons}:
            return {}
        return self.verdicts.comparison("kld").letters

    @property
    def sentences(self) -> Mapping[str, str]:
        """What each tier came to in one sentence."""
        return tier_sentences(self.rows, self.verdicts)

    @property
    def protocol_text(self) -> str:
        """The protocol's file."""
        return self.run.protocol.read_text("utf-8")


def read_texts(path: Path) -> list[RunData]:
    """A run on each of its texts, the first one first; their numbers are never mixed.

    Raises:
        InputError: see `read_run`.
    """
    first = read_run(path)
    return [first, *(read_run(path, text["name"]) for text in first.manifest.get("further_corpora", ()))]


def read_run(path: Path, corpus: str = "") -> RunData:
    """Read a run directory, or the published bundle of one.

    Args:
        corpus: which of the further texts; "" is the first.

    Raises:
        InputError: no run there, none with a measured tier, or a summary that is missing or damaged.
    """
    with reading_records(path):
        return _read_run(RunFolder(path=path, corpus=corpus))


def _read_run(run: RunFolder) -> RunData:
    manifest, corpus = read_json(run.manifest), run.corpus
    if not isinstance(manifest, dict) or "protocol" not in manifest:
        raise InputError(f"expected a run directory, found no manifest.json of one in {run.path}: make one with `quantkit run`")
    if not manifest.get("tiers"):
        raise InputError(f"expected at least one measured tier in {run.path}, found none: run the same command again to finish it")
    check_manifest(manifest, run.path)
    summaries = {tier: _summary(run, tier) for tier in manifest["tiers"]}
    plans = {tier: Plan.from_json(value) for tier in manifest["tiers"] if (value := read_json(run.plan(tier))) is not None}
    protocol = load_protocol(run.protocol)
    rows = order_rows(_rows(manifest, summaries, plans))
    slices = [s for row in rows[1:] if (s := _optional(Slices, run.slices(row.tier))) is not None]
    floors = [f for name in ("base", *manifest["tiers"]) if (f := _optional(Floor, run.floor(name))) is not None]
    text = next((t for t in manifest.get("further_corpora", ()) if t["name"] == corpus),
                {**manifest["corpus"], "token_ids_sha256": manifest["token_ids_sha256"]})
    header = _header(manifest, protocol, next(iter(summaries.values())), text)
    verdicts = _verdicts(run.pairs, summaries)
    return RunData(
        run=run, manifest=manifest, protocol=protocol, header=_sound(header),
        rows=tuple(_sound(_with_measures(run, row, verdicts)) for row in rows), plans=plans, base=read_base(run), verdicts=verdicts,
        floors={floor.sha256: floor for floor in floors}, slices=tuple(slices),
        mtp=_mtp(run, [row.tier for row in rows]),
        speeds={s.tier: s for s in read_speeds(run) if s.tier in manifest["tiers"]})


def _sound(record: _Line) -> _Line:
    """A line of the table whose every value is of the kind that it is told as.

    Raises:
        KeyError, TypeError: one is not.
    """
    return record_from_json(type(record), record_to_json(record))


def _summary(run: RunFolder, tier: str) -> dict[str, Any]:
    held = read_json(run.summary(tier))
    if not isinstance(held, dict) or "summary" not in held:
        raise InputError(f"expected the summary of tier {tier} at {run.summary(tier)}, found none that can be read: run the same "
                         "command again to measure it")
    return held


def _rows(manifest: Mapping[str, Any], summaries: Mapping[str, Any], plans: Mapping[str, Plan]) -> list[TableRow]:
    base = manifest["base"]
    base_summary = TierSummary.from_json(next(iter(summaries.values()))["base_summary"])
    rows = [TableRow(tier=base["type"], file=base["file"], sha256=base["sha256"], size_bytes=base["size_bytes"], size_vs_base=1.0,
                     bpw=base["bpw"], bpw_core=base["bpw_core"], summary=base_summary, is_base=True)]
    for tier, record in manifest["tiers"].items():
        plan = plans.get(tier)
        rows.append(TableRow(
            tier=tier, file=record["file"], sha256=record["sha256"], size_bytes=record["size_bytes"],
            size_vs_base=record["size_bytes"] / base["size_bytes"], bpw=record["bpw"], bpw_core=record["bpw_core"],
            summary=TierSummary.from_json(summaries[tier]["summary"]),
            reference=PackReference.from_json(summaries[tier]["ref"]) if "ref" in summaries[tier] else None,
            substituted=plan.share_params(plan.substituted) if plan else 0.0,
            notes=(*(plan.notes() if plan else ()), *reference_notes(summaries[tier]))))
    return rows


def _verdicts(path: Path, summaries: Mapping[str, Mapping[str, Any]]) -> Verdicts | None:
    """The verdicts that stand, if they are of these rows and of all of them: another tier makes it another family."""
    held = _optional(Verdicts, path)
    rows = {tier: summary.get("rows_sha256") for tier, summary in summaries.items()}
    return held if held is not None and dict(held.rows_sha256) == rows else None


def _with_measures(run: RunFolder, row: TableRow, verdicts: Verdicts | None) -> TableRow:
    """A row with what was measured beside it: letters, noise floor, the weights alone."""
    floor = _optional(Floor, run.floor("base" if row.is_base else row.tier))
    letters = verdicts.comparison("kld").letters if verdicts and verdicts.comparisons else {}
    return dataclasses.replace(
        row, letters="" if row.is_base else letters.get(row.tier, ""), floor=floor.largest() if floor else None,
        floor_verdict=next((f for f in verdicts.floors if f.tier == row.tier), None) if verdicts and not row.is_base else None,
        weights=None if row.is_base else _optional(WeightsKld, run.weights(row.tier)), source=_source(run, row))


def _source(run: RunFolder, row: TableRow) -> FileSource | None:
    """Where a file that came from elsewhere is from; a record of other bytes is none."""
    held = None if row.is_base or run.plan(row.tier).exists() else read_source(run, row.tier)
    return held if held is not None and held.sha256 == row.sha256 else None


def _optional(kind: type[_Record], path: Path) -> _Record | None:
    value = read_json(path)
    if value is None:
        return None
    try:
        return record_from_json(kind, value)
    except (KeyError, TypeError) as error:
        raise InputError(f"expected {path} to be written by this version of quantkit, found something else ({error}): measure it "
                         "again with the same command") from error


def _mtp(run: RunFolder, order: list[str]) -> tuple[MtpResult, ...]:
    """Results in the order of the table; of what is not in it, after that."""
    return tuple(sorted(read_results(run), key=lambda r: (order.index(r.tier) if r.tier in order else len(order), r.tier)))


def _header(manifest: Mapping[str, Any], protocol: Protocol, summary: Mapping[str, Any], text: Mapping[str, Any]) -> TableHeader:
    facts, base, build = manifest["protocol"], manifest["base"], manifest["build"]
    numbers = summary["summary"]
    return TableHeader(
        result_id=manifest["result_id"], protocol_name=facts["name"], protocol_id=facts["protocol_id"], eval_id=facts["eval_id"],
        derived="; ".join(facts["derived"]) or None, base_file=base["file"], base_sha256=base["sha256"], base_type=base["type"],
        corpus_name=text["name"], corpus_sha256=text["sha256"], token_ids_sha256=text["token_ids_sha256"],
        chunk_rule=_chunk_rule(protocol, summary), n_ctx=summary["n_ctx"],
        n_chunk=numbers["n_chunk"], n_scored=numbers["n_scored"], n_article=numbers["n_article"], backend=_backend(build),
        llama_commit=build["llama_cpp_commit"], library_version=build["llama_cpp_python"],
        calibration=_calibration(manifest.get("imatrix")))


def _calibration(facts: Mapping[str, Any] | None) -> str:
    """The calibration text beside the one that is measured on, both by hash."""
    if not facts:
        return ""
    if facts.get("given"):
        return f"a given matrix, sha256 {facts['sha256']}; over which text is unknown"
    shared = "; ".join(f"{o['share']:.2%} of its {o['ngram']}-grams are in {o['evaluation']}, sha256 {o['evaluation_sha256']}"
                       for o in facts.get("overlap") or ())
    return f"{', '.join(facts['datasets'])}, sha256 {facts['corpus_sha256']}" + (f"; {shared}" if shared else "")


def _chunk_rule(protocol: Protocol, summary: Mapping[str, Any]) -> str:
    n, total = len(summary["chunks"]), summary["n_chunk_total"]
    if protocol.until is not None:
        return f"{n} of {total} chunks, spread in an order of seed {protocol.eval.seed}; a screening until {protocol.until}"
    return {"all": f"all {n} chunks", "spread": f"{n} of {total} chunks, spread over the text",
            "first": f"the first {n} of {total} chunks"}[protocol.eval.chunks]


def _backend(build: Mapping[str, Any]) -> str:
    if build["backend"] == "CPU":
        return "CPU"
    split = f", split {','.join(map(str, build['tensor_split']))}" if build["tensor_split"] else ""
    return f"{build['backend']}, {build['n_gpu_layers']} layers{split}"
