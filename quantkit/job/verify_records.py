"""Do the records of a bundle agree with each other? Protocol, plans, importance matrix, tiers' files, and every id that one names.

Only files whose bytes are those of the manifest are read; the others have failed already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.core.errors import InputError
from quantkit.job.foreign import read_imatrix
from quantkit.job.rundir import RunFolder
from quantkit.job.verify_files import Manifest, is_sound, read_json_bounded
from quantkit.job.verify_findings import Findings
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.model import describe_model
from quantkit.spec.plan import Plan, as_mapping
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.tensor_types import FTYPES

_IDS = ("protocol_id", "eval_id", "plan_id", "imatrix_id", "mtp_id")


class Text(NamedTuple):
    """An evaluation text: where its results lie in the bundle, and what the manifest says of it."""

    run: RunFolder
    corpus: str
    sha256: str
    token_ids_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle under verification. `tiers` are the manifest's records by tier, each an object; the first of `texts` leads."""

    run: RunFolder
    manifest: Manifest
    tiers: Mapping[str, Mapping[str, Any]]
    texts: tuple[Text, ...]
    findings: Findings

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifest.facts

    def name(self, path: Path) -> str:
        """A path as the manifest names it."""
        return path.relative_to(self.run.path).as_posix()

    def is_sound(self, name: str) -> bool:
        """Whether a file is listed, there, and has the bytes that the manifest says."""
        return is_sound(self.run.path, name, self.manifest, self.findings)


def open_bundle(folder: Path, manifest: Manifest, findings: Findings) -> Bundle:
    """A bundle whose tiers and texts have names that can be paths; others are failures."""
    facts, run = manifest.facts, RunFolder(path=folder)
    tiers: dict[str, Mapping[str, Any]] = {}
    texts: list[Text] = []
    with findings.reading("manifest", "manifest.json", "records of tiers and texts"):
        for tier, record in facts["tiers"].items():
            if not _can_be_folder(tier) or not isinstance(record, dict):
                raise InputError(f"tier {tier!a}")
            tiers[tier] = record
        texts.append(Text(run, facts["corpus"]["name"], facts["corpus"]["sha256"], facts["token_ids_sha256"]))
        for further in facts["further_corpora"]:
            if not _can_be_folder(further["name"]):
                raise InputError(f"corpus {further['name']!a}")
            own = replace(run, corpus=further["name"])
            texts.append(Text(own, further["name"], further["sha256"], further["token_ids_sha256"]))
    return Bundle(run=run, manifest=manifest, tiers=tiers, texts=tuple(texts), findings=findings)


def _can_be_folder(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and name not in ("", ".", "..")


def check_protocol(bundle: Bundle) -> Protocol | None:
    """protocol.toml reads back to the ids of the manifest."""
    findings, name = bundle.findings, "protocol.toml"
    if not bundle.is_sound(name):
        if name not in bundle.manifest.entries:
            findings.fail("protocol", name, "a protocol in the manifest's list", "none")
        return None
    with findings.reading("protocol", name, "a protocol"):
        protocol = load_protocol(bundle.run.protocol)
        facts = bundle.facts["protocol"]
        for key in _IDS:
            findings.equal("protocol", name, key, facts[key], getattr(protocol, key))
        findings.equal("protocol", name, "name", facts["name"], protocol.name)
        findings.equal("protocol", name, "derived", facts["derived"], list(protocol.derived))
        texts = [protocol.corpus(corpus) for corpus in protocol.eval.corpora]
        findings.equal("protocol", name, "the texts", [(text.corpus, text.sha256) for text in bundle.texts],
                       [(text.name, text.sha256) for text in texts])
        return protocol
    return None


def check_plans(bundle: Bundle, protocol: Protocol | None) -> dict[str, Plan]:
    """Every plan reloads, is its tier's, and has the bits per weight that the manifest says of the tier.

    Returns:
        Plans as the files hold them: without the MTP block where the protocol leaves it out.
    """
    findings, plans = bundle.findings, {}
    for tier, record in bundle.tiers.items():
        if record.get("plan_sha256") is None:
            findings.note("plans", f"{tier} came without a plan")
            continue
        name = f"plan/{tier}.json"
        if not _is_listed_as(bundle, "plans", name, record["plan_sha256"]) or not bundle.is_sound(name):
            continue
        with findings.reading("plans", name, "a plan of schema 1"):
            findings.count("plans")
            plan = Plan.from_json(read_json_bounded(bundle.run.plan(tier)))
            findings.equal("plans", name, "tier", tier, plan.tier)
            if protocol is not None and protocol.plan.mtp_mode != "inside":
                plan = replace(plan, rows=tuple(row for row in plan.rows if row.role != "mtp"))
            findings.equal("plans", name, "bpw of the manifest,", record["bpw"], plan.bpw)
            findings.equal("plans", name, "bpw_core of the manifest,", record["bpw_core"], plan.bpw_core)
            plans[tier] = plan
    return plans


def check_imatrix(bundle: Bundle) -> None:
    """The importance matrix is the one that the manifest, and every tier made with one, names."""
    findings, facts = bundle.findings, bundle.facts.get("imatrix")
    if facts is None:
        findings.note("importance matrix", "the run has none")
        return
    with findings.reading("importance matrix", "manifest.json", "facts of the importance matrix"):
        for tier, record in bundle.tiers.items():
            if record["imatrix_sha256"] is not None:
                findings.equal("importance matrix", "manifest.json", f"the bundle's matrix for tier {tier},", facts["sha256"],
                               record["imatrix_sha256"])
        name = facts["file"]
        if _is_listed_as(bundle, "importance matrix", name, facts["sha256"]) and bundle.is_sound(name):
            with findings.reading("importance matrix", name, "an importance matrix"):
                matrix = read_imatrix(bundle.run.path / name)
                findings.equal("importance matrix", name, "chunk_count", facts["chunk_count"], matrix.chunk_count)
                findings.equal("importance matrix", name, "datasets", facts["datasets"], list(matrix.datasets))


def check_tier_files(bundle: Bundle, plans: Mapping[str, Plan]) -> None:
    """Every tier's file that the bundle holds is the one that was measured, and has the types that its plan says."""
    findings, absent = bundle.findings, []
    findings.count("tier files", 0)
    for tier, record in bundle.tiers.items():
        with findings.reading("tier files", "manifest.json", f"the record of tier {tier}"):
            name = f"quants/{record['file']}"
            entry = bundle.manifest.entries.get(name)
            if entry is None:
                absent.append(tier)
                continue
            findings.equal("tier files", name, "the sha256 that was measured,", record["sha256"], entry.sha256)
            findings.equal("tier files", name, "size_bytes", record["size_bytes"], entry.size_bytes)
            if bundle.is_sound(name):
                with findings.reading("tier files", name, "a GGUF file"):
                    _check_header(findings, name, record, read_header(bundle.run.path / name), plans.get(tier))
    if absent:
        findings.note("tier files", f"not in the bundle: {', '.join(absent)}")


def _check_header(findings: Findings, name: str, record: Mapping[str, Any], header: GgufHeader, plan: Plan | None) -> None:
    findings.equal("tier files", name, "bpw", record["bpw"], describe_model(header).bpw)
    findings.equal("tier files", name, "quantize.imatrix.sha256", record["imatrix_sha256"],
                   header.metadata.get("quantize.imatrix.sha256"))
    if plan is None:
        return
    findings.equal("tier files", name, "general.file_type", FTYPES[plan.ftype].id, header.metadata.get("general.file_type"))
    expected, found = as_mapping(plan.rows), {tensor.name: tensor.type.name for tensor in header.tensors}
    wrong = [f"{tensor} {found.get(tensor, 'missing')} instead of {expected.get(tensor, 'nothing')}"
             for tensor in sorted(expected.keys() | found.keys()) if expected.get(tensor) != found.get(tensor)]
    findings.count("tier files", len(found))
    if wrong:
        findings.fail("tier files", name, "the plan's types", f"{len(wrong)} other tensors: {'; '.join(wrong[:5])}")


def check_references(bundle: Bundle) -> None:
    """Every record of a measurement that names an id, the base, the text or a tier's file names the manifest's."""
    facts = bundle.facts
    with bundle.findings.reading("references", "manifest.json", "the ids and hashes of the run"):
        known = {key: facts["protocol"][key] for key in _IDS} | {"base_sha256": facts["base"]["sha256"]}
        for name in bundle.manifest.entries:
            if name.endswith(".json") and name.split("/")[0] not in {"plan", "report"} and bundle.is_sound(name):
                _check_record(bundle, name, known)


def _check_record(bundle: Bundle, name: str, known: Mapping[str, str]) -> None:
    findings = bundle.findings
    with findings.reading("references", name, "a record in JSON"):
        value = read_json_bounded(bundle.run.path / name)
        if not isinstance(value, dict):
            return
        known = {**known, "token_ids_sha256": _text_of(bundle, name).token_ids_sha256}
        for key in known.keys() & value.keys():
            findings.equal("references", name, key, known[key], value[key])
        tier = bundle.tiers.get(value["tier"]) if isinstance(value.get("tier"), str) else None
        if tier is not None:
            for key in {"sha256", "q_sha256"} & value.keys():
                findings.equal("references", name, f"{key} of tier {value['tier']},", tier["sha256"], value[key])


def _text_of(bundle: Bundle, name: str) -> Text:
    """The text that a record speaks of: a second and later one has its own folders below audit/."""
    folders = name.split("/")[1:-1]
    return next((text for text in bundle.texts[1:] if name.startswith("audit/") and folders[-1:] == [text.corpus]), bundle.texts[0])


def _is_listed_as(bundle: Bundle, check: str, name: str, sha256: str) -> bool:
    """Whether the list of files has the hash that a record of the manifest has for this file."""
    entry = bundle.manifest.entries.get(name)
    if entry is None:
        bundle.findings.fail(check, name, "a file of the bundle", "nothing of that name in the manifest's list")
        return False
    return bundle.findings.equal(check, name, "the sha256 of the manifest's record,", sha256, entry.sha256)
