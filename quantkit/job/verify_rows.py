"""Are the numbers those of the rows? Rows by their metadata and shape, base's columns across tiers, summaries computed anew.

Parquet is read in a worker process with bounded memory: a damaged or hostile file can crash a decoder, or unpack without end, and
then it is one failure of one file.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_json
from quantkit.core.units import GIB
from quantkit.engine.pool import WorkerPool
from quantkit.engine.worker import WorkerState
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.refpack_audit import shortfall_of
from quantkit.job.verify_files import read_json_bounded
from quantkit.job.verify_findings import Findings
from quantkit.job.verify_records import Bundle
from quantkit.measure.articles import chunk_indices
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.protocol import Protocol
from quantkit.spec.records import ROW_DTYPE
from quantkit.spec.refpack_records import PackReference

MAX_ROWS = 1 << 25  # 130 times the whole test split of WikiText-2
ROUNDING = 1e-9  # relative; another processor or numpy rounds exp and ln in the last bits
_NOTHING = 1e-13  # absolute; what is left of numbers that cancel

_BASE_COLUMNS = ("chunk", "article", "pos", "token", "nll_base", "entropy_base", "top1_base", "margin_base")
_WORKER_BYTES = 4 * GIB  # address space; the libraries alone take 1.7
_BYTES_A_ROW = 400
_ARROW_TYPES = {"i4": "int32", "f8": "double"}


class TierRows(NamedTuple):
    """A tier's rows and its summary file's words, both sound by hash."""

    rows: Rows
    held: Mapping[str, Any]


def check_rows(bundle: Bundle, protocol: Protocol) -> dict[str, TierRows]:
    """Read every tier's rows and hold them against the summary's words, the protocol and the other tiers'.

    Returns:
        Those that could be read, by tier.
    """
    findings, read = bundle.findings, {}
    with WorkerPool(1) as pool:
        for tier, record in bundle.tiers.items():
            name, summary = f"audit/{tier}/rows.parquet", f"audit/{tier}/summary.json"
            for file, key in ((name, "rows_sha256"), (summary, "summary_sha256")):
                entry = bundle.manifest.entries.get(file)
                findings.equal("rows", file, f"the {key} of tier {tier},", record.get(key), entry.sha256 if entry else None)
            if not (bundle.is_sound(name) and bundle.is_sound(summary)):
                continue
            with findings.reading("rows", name, "rows of an audit"):
                held = read_json_bounded(bundle.run.summary(tier))
                chunks = _check_chunks(findings, summary, held, protocol)
                n_rows = len(chunks) * len(_positions(protocol))
                rows, metadata = pool.call(f"read rows {tier}", read_rows, path=bundle.run.rows(tier), n_rows=n_rows)
                _check_metadata(bundle, tier, held, metadata)
                _check_shape(findings, name, rows, chunks, _positions(protocol))
                read[tier] = TierRows(rows, held)
    _check_base_columns(bundle, read)
    return read


def read_rows(state: WorkerState, *, path: Path, n_rows: int) -> tuple[Rows, dict[str, str]]:
    """Rows and metadata of a parquet file that is not trusted. Worker processes only.

    Raises:
        InputError: other columns, types or number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.suppress(ValueError, OSError):  # not every system knows this limit
        limit = _WORKER_BYTES + _BYTES_A_ROW * n_rows
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    pa.set_cpu_count(1)
    try:
        schema, n_found = pq.read_schema(path), pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"not a parquet file: {error}") from error
    found = {field.name: str(field.type) for field in schema}
    expected = {name: _ARROW_TYPES[ROW_DTYPE[name].str[1:]] for name in ROW_DTYPE.names or ()}
    if found != expected:
        raise InputError(f"columns {found}, not those of an audit")
    if n_found != n_rows:
        raise InputError(f"{n_found} rows, not the {n_rows} of the protocol's chunks")
    return read_parquet(path)


def _check_metadata(bundle: Bundle, tier: str, held: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """What the rows say of themselves, what the summary says, and what both depend on, as one id."""
    findings, facts, record = bundle.findings, bundle.facts, bundle.tiers[tier]
    name, summary = f"audit/{tier}/rows.parquet", f"audit/{tier}/summary.json"
    build, offload = held["build"], held["offload"]
    audit_id = sha256_json({"rows": facts["rows_version"], "eval_id": facts["protocol"]["eval_id"], "base": facts["base"]["sha256"],
                            "q": record["sha256"], "tokens": facts["token_ids_sha256"], "build": build, "offload": offload,
                            **({"ref": held["ref"]["sha256"]} if "ref" in held else {})})
    known = {"audit_id": audit_id, "eval_id": facts["protocol"]["eval_id"], "base_sha256": facts["base"]["sha256"],
             "q_sha256": record["sha256"], "token_ids_sha256": facts["token_ids_sha256"]}
    known |= {"ref_sha256": held["ref"]["sha256"]} if "ref" in held else {}
    for key, value in known.items():
        findings.equal("rows", name, key, value, metadata.get(key))
    for key in ("file", "size_bytes", "sha256"):
        findings.equal("rows", summary, key, record[key], held[key])
    findings.equal("rows", summary, "tier", tier, held["tier"])
    findings.equal("rows", summary, "audit_id", audit_id, held["audit_id"])
    findings.equal("rows", summary, "rows_sha256", record["rows_sha256"], held["rows_sha256"])
    findings.equal("rows", summary, "the manifest's build,", facts["build"], {**build, **offload})


def _check_chunks(findings: Findings, name: str, held: Mapping[str, Any], protocol: Protocol) -> npt.NDArray[np.int64]:
    """The chunks that the protocol evaluates of a text as long as the summary says."""
    spec, n_total = protocol.eval, held["n_chunk_total"]
    if not isinstance(n_total, int) or not 2 <= n_total * len(_positions(protocol)) <= MAX_ROWS:
        raise InputError(f"{n_total!r} chunks in the whole text")
    chunks = chunk_indices(spec.chunks, spec.n_chunk, n_total)
    findings.equal("rows", name, "the protocol's chunks", chunks.tolist(), held["chunks"])
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


def _check_base_columns(bundle: Bundle, read: Mapping[str, TierRows]) -> None:
    """Base was the same for every tier, bit by bit; so was a reference pack that stood in its place."""
    findings = bundle.findings
    firsts: dict[str | None, str] = {}
    for tier, (_, held) in read.items():
        findings.count("base's columns")
        first = firsts.setdefault(held["ref"]["sha256"] if "ref" in held else None, tier)
        a, b = read[first].rows, read[tier].rows
        wrong = [column for column in _BASE_COLUMNS if len(a) != len(b) or a[column].tobytes() != b[column].tobytes()]
        if wrong:
            findings.fail("base's columns", f"audit/{tier}/rows.parquet", f"base's own columns as in audit/{first}/rows.parquet",
                          f"others: {', '.join(wrong)}")


def check_summaries(bundle: Bundle, read: Mapping[str, TierRows]) -> None:
    """Every published number is computed from the rows again."""
    findings = bundle.findings
    for tier, (rows, held) in read.items():
        name = f"audit/{tier}/summary.json"
        with findings.reading("summaries", name, "numbers that the rows come to"):
            for key, again in (("summary", summarize(rows)), ("base_summary", summarize(base_rows(rows)))):
                compare_numbers(findings, "summaries", name, again.to_json(), held[key], key)
            if "ref" in held:
                _check_shortfall(bundle, tier, PackReference.from_json(held["ref"]))


def _check_shortfall(bundle: Bundle, tier: str, ref: PackReference) -> None:
    """Measured against a reference pack: the shortfall is what the rows that it keeps whole come to."""
    again = shortfall_of(read_json_bounded(bundle.run.shortfall(tier)))
    computed = {"shortfall": again.value, "shortfall_se": again.se, "n_full": again.n_full}
    held = {"shortfall": ref.shortfall, "shortfall_se": ref.shortfall_se, "n_full": ref.n_full}
    compare_numbers(bundle.findings, "summaries", f"audit/{tier}/summary.json", computed, held, "ref")


def compare_numbers(findings: Findings, check: str, name: str, computed: Any, held: Any, where: str) -> None:
    """Hold a record against the one computed anew; numbers may differ by rounding, and then it is told."""
    largest = 0.0
    for path, expected, found in _leaves(computed, held, where):
        findings.count(check)
        if type(expected) is type(found) and expected == found:
            continue
        if isinstance(expected, float) and isinstance(found, float) and math.isclose(expected, found, rel_tol=ROUNDING,
                                                                                     abs_tol=_NOTHING):
            largest = max(largest, abs(expected - found) / max(abs(expected), abs(found)))
        else:
            findings.fail(check, name, f"{path} {expected!r}", repr(found))
    if largest:
        findings.note(check, f"numbers of {name} differ from those of this machine by rounding, at most {largest:.0e} of their "
                             "size")


def _leaves(computed: Any, held: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of values with their place; a missing or an added key, or another kind, is a pair that cannot agree."""
    if isinstance(computed, dict) and isinstance(held, dict):
        for key in dict.fromkeys([*computed, *held]):
            yield from _leaves(computed.get(key, "nothing of that name"), held.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(computed, list) and isinstance(held, list) and len(computed) == len(held):
        for i, (a, b) in enumerate(zip(computed, held, strict=True)):
            yield from _leaves(a, b, f"{where}[{i}]")
    else:
        yield where, computed, held
