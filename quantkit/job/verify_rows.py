"""Are the numbers those of the rows? Rows by their metadata and shape, base's columns across tiers, summaries computed anew.

Parquet is read by `job.parts`: a damaged or hostile file can crash a decoder, or unpack without end, and then it is one failure of
one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_json
from quantkit.job.parts import MAX_ROWS, Rows, read_parquet
from quantkit.job.verify_files import read_json_bounded
from quantkit.job.verify_findings import Findings
from quantkit.job.verify_records import Bundle, Text
from quantkit.measure.articles import chunk_indices, screening_order
from quantkit.spec.protocol import Protocol

ROUNDING = 1e-9  # relative; another processor or numpy rounds exp and ln in the last bits
_NOTHING = 1e-13  # absolute; what is left of numbers that cancel

_BASE_COLUMNS = ("chunk", "article", "pos", "token", "nll_base", "entropy_base", "top1_base", "margin_base")


class TierRows(NamedTuple):
    """A tier's rows and its summary file's words, both sound by hash."""

    rows: Rows
    held: Mapping[str, Any]


def check_rows(bundle: Bundle, text: Text, protocol: Protocol) -> dict[str, TierRows]:
    """Read every tier's rows on a text and hold them against the summary's words, the protocol and the other tiers'.

    Returns:
        Those that could be read, by tier.
    """
    findings, run, read = bundle.findings, text.run, dict[str, TierRows]()
    for tier, record in bundle.tiers.items():
        name, summary = bundle.name(run.rows(tier)), bundle.name(run.summary(tier))
        for file, key in ((name, "rows_sha256"), (summary, "summary_sha256")):
            entry = bundle.manifest.entries.get(file)
            if entry is None or text is bundle.texts[0]:
                expected = record.get(key) if text is bundle.texts[0] else "of a file"
                findings.equal("rows", file, f"the {key} of tier {tier},", expected, entry.sha256 if entry else None)
        if not (bundle.is_sound(name) and bundle.is_sound(summary)):
            continue
        with findings.reading("rows", name, "rows of an audit"):
            held = read_json_bounded(run.summary(tier))
            chunks = _check_chunks(bundle, text, summary, held, protocol)
            n_rows = len(chunks) * len(_positions(protocol))
            rows, metadata = read_parquet(run.rows(tier), n_rows=n_rows)
            _check_metadata(bundle, text, tier, held, metadata)
            _check_shape(findings, name, rows, chunks, _positions(protocol))
            read[tier] = TierRows(rows, held)
    _check_base_columns(bundle, text, read)
    return read


def _check_metadata(bundle: Bundle, text: Text, tier: str, held: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """What the rows say of themselves, what the summary says, and what both depend on, as one id."""
    findings, facts, record = bundle.findings, bundle.facts, bundle.tiers[tier]
    name, summary = bundle.name(text.run.rows(tier)), bundle.name(text.run.summary(tier))
    build, offload = held["build"], held["offload"]
    audit_id = sha256_json({"rows": facts["rows_version"], "eval_id": facts["protocol"]["eval_id"], "base": facts["base"]["sha256"],
                            "q": record["sha256"], "tokens": text.token_ids_sha256, "build": build, "offload": offload,
                            **({"ref": held["ref"]["sha256"]} if "ref" in held else {})})
    known = {"audit_id": audit_id, "eval_id": facts["protocol"]["eval_id"], "base_sha256": facts["base"]["sha256"],
             "q_sha256": record["sha256"], "token_ids_sha256": text.token_ids_sha256}
    known |= {"ref_sha256": held["ref"]["sha256"]} if "ref" in held else {}
    for key, value in known.items():
        findings.equal("rows", name, key, value, metadata.get(key))
    for key in ("file", "size_bytes", "sha256"):
        findings.equal("rows", summary, key, record[key], held[key])
    findings.equal("rows", summary, "tier", tier, held["tier"])
    findings.equal("rows", summary, "audit_id", audit_id, held["audit_id"])
    findings.equal("rows", summary, "rows_sha256", bundle.manifest.entries[name].sha256, held["rows_sha256"])
    findings.equal("rows", summary, "the text's sha256", text.sha256, held["corpus"]["sha256"])
    findings.equal("rows", summary, "the manifest's build,", facts["build"], {**build, **offload})


def _check_chunks(bundle: Bundle, text: Text, name: str, held: Mapping[str, Any], protocol: Protocol) -> npt.NDArray[np.int64]:
    """The chunks that the protocol evaluates of a text as long as the summary says; of a screening, up to where it stopped."""
    spec, n_total = protocol.eval, held["n_chunk_total"]
    if not isinstance(n_total, int) or not 2 <= n_total * len(_positions(protocol)) <= MAX_ROWS:
        raise InputError(f"{n_total!r} chunks in the whole text")
    chunks = chunk_indices(spec.chunks, spec.n_chunk, n_total)
    if bundle.is_sound(bundle.name(text.run.screening)):
        n = read_json_bounded(text.run.screening)["n_chunk"]
        if n not in (*protocol.sequential.looks, len(chunks)):
            raise InputError(f"a screening that stopped after {n!r} chunks, where the protocol does not look")
        chunks = chunks[np.sort(screening_order(len(chunks), spec.seed)[:n])]
    bundle.findings.equal("rows", name, "the protocol's chunks", chunks.tolist(), held["chunks"])
    return chunks


def _positions(protocol: Protocol) -> npt.NDArray[np.int64]:
    """The scored positions of a chunk."""
    return np.arange(protocol.eval.n_ctx // 2, protocol.eval.n_ctx - 1)


def _check_shape(findings: Findings, name: str, rows: Rows, chunks: npt.NDArray[np.int64],
                 positions: npt.NDArray[np.int64]) -> None:
    """Every scored position of every chunk once and in order, one article a chunk."""
    articles = rows["article"].reshape(len(chunks), len(positions))
    _all(findings, name, "the protocol's chunks in order", rows, rows["chunk"] == np.repeat(chunks, len(positions)))
    _all(findings, name, "every scored position in order", rows, rows["pos"] == np.tile(positions, len(chunks)))
    _all(findings, name, "one article a chunk", rows, (articles == articles[:, :1]).ravel())
    finite = [np.isfinite(rows[column]) for column in rows.dtype.names or () if rows.dtype[column].kind == "f"]
    _all(findings, name, "finite numbers", rows, np.logical_and.reduce(finite))


def _all(findings: Findings, name: str, expected: str, rows: Rows, holds: npt.NDArray[np.bool_]) -> None:
    findings.count("rows")
    if not holds.all():
        row = rows[int(np.argmin(holds))]
        findings.fail("rows", name, expected, f"chunk {row['chunk']} position {row['pos']} article {row['article']} in its place")


def _check_base_columns(bundle: Bundle, text: Text, read: Mapping[str, TierRows]) -> None:
    """Base was the same for every tier, bit by bit; so was a reference pack that stood in its place."""
    findings = bundle.findings
    firsts: dict[str | None, str] = {}
    for tier, (_, held) in read.items():
        findings.count("base's columns")
        first = firsts.setdefault(held["ref"]["sha256"] if "ref" in held else None, tier)
        a, b = read[first].rows, read[tier].rows
        wrong = [column for column in _BASE_COLUMNS if len(a) != len(b) or a[column].tobytes() != b[column].tobytes()]
        if wrong:
            findings.fail("base's columns", bundle.name(text.run.rows(tier)),
                          f"base's own columns as in {bundle.name(text.run.rows(first))}", f"others: {', '.join(wrong)}")
