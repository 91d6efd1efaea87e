"""The tables of a run directory, from its manifest, plans and summaries. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import InputError
from quantkit.core.files import write_atomic
from quantkit.job.manifest import refresh_files
from quantkit.job.rundir import RunFolder, read_json
from quantkit.report.table import TableHeader, TableRow, retention_csv, retention_json, retention_md
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.records import TierSummary


class Tables(NamedTuple):
    """One table in three forms."""

    markdown: str
    csv: str
    json: str


def write_report(path: Path) -> Tables:
    """Write report/retention.md, .csv and .json of a run, and list them in its manifest.

    Raises:
        InputError: no run there, or none with a measured tier.
    """
    run = RunFolder(path=path)
    refresh_files(run)  # the id that the tables print is that of everything measured so far
    texts = render_tables(run)
    for name, text in texts.items():
        write_atomic(run.path / name, text.encode())
    refresh_files(run)
    return Tables(*texts.values())


def render_tables(run: RunFolder) -> dict[str, str]:
    """The tables of a run by their paths in it, made from its records alone: `verify` makes them again and compares bytes.

    Raises:
        InputError: see `read_tables`.
    """
    header, rows = read_tables(run)
    return {"report/retention.md": retention_md(header, rows), "report/retention.csv": retention_csv(rows),
            "report/retention.json": retention_json(header, rows)}


def read_tables(run: RunFolder) -> tuple[TableHeader, list[TableRow]]:
    """The records of a run as the table takes them; the base first.

    Raises:
        InputError: no run there, none with a measured tier, or a summary that is missing or damaged.
    """
    manifest = read_json(run.manifest)
    if not isinstance(manifest, dict) or "protocol" not in manifest:
        raise InputError(f"expected a run directory, found no manifest.json of one in {run.path}: make one with `quantkit run`")
    if not manifest.get("tiers"):
        raise InputError(f"expected at least one measured tier in {run.path}, found none: run the same command again to finish it")
    summaries = {tier: _summary(run, tier) for tier in manifest["tiers"]}
    base = manifest["base"]
    first = next(iter(summaries.values()))
    rows = [TableRow(tier=base["type"], file=base["file"], sha256=base["sha256"], size_bytes=base["size_bytes"], size_vs_base=1.0,
                     bpw=base["bpw"], bpw_core=base["bpw_core"], summary=TierSummary.from_json(first["base_summary"]), is_base=True)]
    for tier, record in manifest["tiers"].items():
        notes, substituted = _plan_notes(run, tier)
        rows.append(TableRow(
            tier=tier, file=record["file"], sha256=record["sha256"], size_bytes=record["size_bytes"],
            size_vs_base=record["size_bytes"] / base["size_bytes"], bpw=record["bpw"], bpw_core=record["bpw_core"],
            summary=TierSummary.from_json(summaries[tier]["summary"]), substituted=substituted, notes=notes))
    return _header(manifest, load_protocol(run.protocol), first), rows


def _summary(run: RunFolder, tier: str) -> dict[str, Any]:
    held = read_json(run.summary(tier))
    if not isinstance(held, dict) or "summary" not in held:
        raise InputError(f"expected the summary of tier {tier} at {run.summary(tier)}, found none that can be read: run the same "
                         "command again to measure it")
    return held


def _plan_notes(run: RunFolder, tier: str) -> tuple[tuple[str, ...], float]:
    """What the plan says before its name may be believed; nothing for a file that came without one."""
    value = read_json(run.plan(tier))
    if value is None:
        return (), 0.0
    plan = Plan.from_json(value)
    return plan.notes(), plan.share_params(plan.substituted)


def _header(manifest: Mapping[str, Any], protocol: Protocol, summary: Mapping[str, Any]) -> TableHeader:
    facts, base, build = manifest["protocol"], manifest["base"], manifest["build"]
    numbers = summary["summary"]
    return TableHeader(
        result_id=manifest["result_id"], protocol_name=facts["name"], protocol_id=facts["protocol_id"], eval_id=facts["eval_id"],
        derived="; ".join(facts["derived"]) or None, base_file=base["file"], base_sha256=base["sha256"], base_type=base["type"],
        corpus_name=manifest["corpus"]["name"], corpus_sha256=manifest["corpus"]["sha256"],
        token_ids_sha256=manifest["token_ids_sha256"], chunk_rule=_chunk_rule(protocol, summary), n_ctx=summary["n_ctx"],
        n_chunk=numbers["n_chunk"], n_scored=numbers["n_scored"], n_article=numbers["n_article"], backend=_backend(build),
        llama_commit=build["llama_cpp_commit"], library_version=build["llama_cpp_python"])


def _chunk_rule(protocol: Protocol, summary: Mapping[str, Any]) -> str:
    n, total = len(summary["chunks"]), summary["n_chunk_total"]
    return {"all": f"all {n} chunks", "spread": f"{n} of {total} chunks, spread over the text",
            "first": f"the first {n} of {total} chunks"}[protocol.eval.chunks]


def _backend(build: Mapping[str, Any]) -> str:
    if build["backend"] == "CPU":
        return "CPU"
    split = f", split {','.join(map(str, build['tensor_split']))}" if build["tensor_split"] else ""
    return f"{build['backend']}, {build['n_gpu_layers']} layers{split}"
