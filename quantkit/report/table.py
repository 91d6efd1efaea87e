"""The retention table: one record a file, written as markdown for people, csv for programs and json for verification.

The csv is an interface: its first columns never change, new ones are appended. Fractions, not percent; full precision; empty
where a number is not defined. The base is the first row, the others follow by size, largest first.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence

from quantkit.core.files import pretty_json
from quantkit.report.escape import base_name, csv_text
from quantkit.report.table_md import retention_md
from quantkit.report.table_rows import TableHeader, TableRow, order_rows
from quantkit.spec.json_records import record_to_json
from quantkit.spec.records import KLD_QUANTILES, P_DIFF_QUANTILES
from quantkit.spec.verdict_records import Verdicts

__all__ = ["COLUMNS", "TEXT_COLUMNS", "TableHeader", "TableRow", "order_rows", "retention_csv", "retention_json", "retention_md"]

Cell = str | int | float | None
Reader = Callable[[TableRow], Cell]


def retention_csv(rows: Sequence[TableRow]) -> str:
    """The table as csv: comma, one line a file, `\\n` line ends; see `COLUMNS`.

    Raises:
        InputError: see `order_rows`.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in order_rows(rows):
        writer.writerow([_csv_cell(read(row)) for read in COLUMNS.values()])
    return out.getvalue()


def retention_json(header: TableHeader, rows: Sequence[TableRow], verdicts: Verdicts | None = None) -> str:
    """The table as json: the header, each row with its whole summary, and the verdicts between them.

    Raises:
        InputError: see `order_rows`.
    """
    tiers = []
    for row in order_rows(rows):
        tiers.append(record_to_json(row) | {"file": base_name(row.file), "summary": row.summary.to_json()})
    head = dataclasses.asdict(header) | {"base_file": base_name(header.base_file)}
    return pretty_json({"schema": 1, "header": head, "tiers": tiers, "verdicts": record_to_json(verdicts)}).decode()


def _csv_cell(value: Cell) -> str:
    if value is None:
        return ""
    return csv_text(value) if isinstance(value, str) else repr(value)


def _estimate(statistic: str, attribute: str) -> Reader:
    def read(row: TableRow) -> Cell:
        value: Cell = getattr(getattr(row.summary, statistic), attribute)
        return value

    return read


def _quantile(kind: str, q: float, attribute: str) -> Reader:
    def read(row: TableRow) -> Cell:
        quantile = row.summary.kld_quantile(q) if kind == "kld" else row.summary.p_diff_quantile(q)
        value: Cell = getattr(quantile, attribute)
        return value

    return read


def _optional(record: str, attribute: str) -> Reader:
    def read(row: TableRow) -> Cell:
        value: Cell = getattr(getattr(row, record), attribute, None)
        return value

    return read


_QUANTILE_NAMES = {0.0: "min", 0.001: "p001", 0.01: "p01", 0.05: "p05", 0.1: "p10", 0.25: "p25", 0.5: "p50", 0.75: "p75",
                   0.9: "p90", 0.95: "p95", 0.99: "p99", 0.999: "p999", 1.0: "max"}
_STATISTIC_NAMES = {"ppl_base": "ppl_base", "ppl_q": "ppl_q", "ln_ppl_ratio": "ln_ppl_ratio", "kld_mean": "kld",
                    "p_diff_mean": "p_diff", "p_diff_rms": "p_diff_rms", "same_top_p": "same_top_p"}
_INTERFACE: dict[str, Reader] = {
    "tier": lambda row: row.tier,
    "file": lambda row: base_name(row.file),
    "size_bytes": lambda row: row.size_bytes,
    "size_vs_base": lambda row: row.size_vs_base,
    "bpw": lambda row: row.bpw,
    "n_chunk": lambda row: row.summary.n_chunk,
    "n_scored": lambda row: row.summary.n_scored,
    "ppl_base": _estimate("ppl_base", "value"),
    "ppl_q": _estimate("ppl_q", "value"),
    "ln_ppl_ratio": _estimate("ln_ppl_ratio", "value"),
    "ln_ppl_ratio_se": _estimate("ln_ppl_ratio", "se"),
    "kld_mean": _estimate("kld", "value"),
    "kld_mean_se": _estimate("kld", "se"),
    "kld_p999": _quantile("kld", 0.999, "value"),
    "p_diff_mean": _estimate("p_diff", "value"),
    "p_diff_rms": _estimate("p_diff_rms", "value"),
    "same_top_p": _estimate("same_top_p", "value"),
    "same_top_p_se": _estimate("same_top_p", "se"),
    "n_article": lambda row: row.summary.n_article,
    "g_eff": lambda row: row.summary.g_eff,
}


def _more_columns() -> dict[str, Reader]:
    """Errors, ends of intervals, quantiles and diagnostics of all statistics, then facts of the file."""
    columns: dict[str, Reader] = {}
    for name, statistic in _STATISTIC_NAMES.items():
        columns |= {f"{name}_{part}": _estimate(statistic, part) for part in ("se", "lo", "hi", "se_iid", "se_chunk")}
    for kind, levels in (("kld", KLD_QUANTILES), ("p_diff", P_DIFF_QUANTILES)):
        for q in levels:
            name = f"{kind}_{_QUANTILE_NAMES[q]}"
            columns[name] = _quantile(kind, q, "value")
            if 0 < q < 1:
                columns |= {f"{name}_{end}": _quantile(kind, q, end) for end in ("lo", "hi")}
    columns["nll_correlation"] = _estimate("nll_correlation", "value")
    columns["bpw_core"] = lambda row: row.bpw_core
    columns["substituted"] = lambda row: row.substituted
    columns["is_base"] = lambda row: int(row.is_base)
    columns["sha256"] = lambda row: row.sha256
    columns["notes"] = lambda row: "; ".join(row.notes)
    columns["letters"] = lambda row: row.letters
    columns["floor_kernel"] = lambda row: row.floor.kernel if row.floor else ""
    columns["floor_kld"] = lambda row: row.floor.kld.value if row.floor else None
    for name, attribute in (("kld_over_floor", "ratio"), ("kld_over_floor_lo", "lo"), ("kld_over_floor_hi", "hi")):
        columns[name] = _optional("floor_verdict", attribute)
    columns["indistinguishable"] = lambda row: int(row.floor_verdict.indistinguishable) if row.floor_verdict else None
    for part in ("value", "se", "lo", "hi"):
        name = "kld_weights" + (f"_{part}" if part != "value" else "")
        columns[name] = lambda row, part=part: getattr(row.weights.kld, part) if row.weights else None  # type: ignore[misc]
    columns["ref"] = lambda row: "" if row.is_base else row.reference.kind if row.reference else "base"
    for name, attribute in (("ref_mass", "mass"), ("kld_shortfall", "shortfall"), ("kld_shortfall_se", "shortfall_se")):
        columns[name] = _optional("reference", attribute)
    columns["ref_sha256"] = lambda row: row.reference.sha256 if row.reference else ""
    return columns


#: Name and content of every csv column, in order.
COLUMNS: dict[str, Reader] = _INTERFACE | {name: read for name, read in _more_columns().items() if name not in _INTERFACE}

#: Those that hold text.
TEXT_COLUMNS = frozenset({"tier", "file", "sha256", "notes", "letters", "floor_kernel", "ref", "ref_sha256"})
