"""The retention table: one record a file, written as markdown for people, csv for programs and json for verification.

The csv is an interface: its first columns never change, new ones are appended. Fractions, not percent; full precision; empty
where a number is not defined. The base is the first row, the others follow by size, largest first.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.core.errors import InputError
from quantkit.core.files import pretty_json
from quantkit.core.units import format_bytes
from quantkit.report.escape import base_name, csv_text, md_text, significant, with_error
from quantkit.spec.records import KLD_QUANTILES, P_DIFF_QUANTILES, Estimate, TierSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """What the numbers of a table depend on, and what they can be verified with.

    Attributes:
        derived: the settings by which the protocol differs from the frozen one of its name; None if it is that one.
        base_type: the type of most of the base's parameters, such as BF16.
        chunk_rule: in words: "all 783 chunks", "64 chunks spread over the text", "the first 16 chunks".
        backend: where the arithmetic ran, such as "CPU" or "CUDA, 33 layers".
        notes: what else a reader must know, such as tiers that failed.
    """

    result_id: str
    protocol_name: str
    protocol_id: str
    eval_id: str
    derived: str | None = None
    base_file: str
    base_sha256: str
    base_type: str
    corpus_name: str
    corpus_sha256: str
    token_ids_sha256: str
    chunk_rule: str
    n_ctx: int
    n_chunk: int
    n_scored: int
    n_article: int
    backend: str
    llama_commit: str
    library_version: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One file of the table.

    Attributes:
        size_bytes: of all its parts. size_vs_base: a fraction of the base's.
        bpw: tensor bits a weight, whole file; bpw_core: without embedding, output and MTP block.
        substituted: share of parameters (0 to 1) whose type is another than the plan's rules asked for.
        notes: what was substituted, where a foreign file is from, and the like.
    """

    tier: str
    file: str
    sha256: str
    size_bytes: int
    size_vs_base: float
    bpw: float
    bpw_core: float | None
    summary: TierSummary
    is_base: bool = False
    substituted: float = 0.0
    notes: tuple[str, ...] = ()


Cell = str | int | float | None
Reader = Callable[[TableRow], Cell]


def order_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    """The base, then the tiers by size, largest first; of equal sizes by name and hash.

    Raises:
        InputError: not exactly one base, or a tier measured on another number of chunks or tokens than the base.
    """
    bases = [row for row in rows if row.is_base]
    if len(bases) != 1:
        raise InputError(f"expected one base in the table, got {len(bases)} among {len(rows)} rows")
    design = bases[0].summary
    for row in rows:
        if (row.summary.n_chunk, row.summary.n_scored) != (design.n_chunk, design.n_scored):
            raise InputError(f"expected {design.n_chunk} chunks and {design.n_scored} scored tokens as for the base, got "
                             f"{row.summary.n_chunk} and {row.summary.n_scored} for {row.tier}: tiers are compared on the same "
                             "chunks only; audit them under one protocol")
    return sorted(rows, key=lambda row: (not row.is_base, -row.size_bytes, row.tier, row.sha256))


# csv and json.


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


def retention_json(header: TableHeader, rows: Sequence[TableRow]) -> str:
    """The table as json: the header, and each row with its whole summary.

    Raises:
        InputError: see `order_rows`.
    """
    tiers = []
    for row in order_rows(rows):
        record = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        tiers.append(record | {"file": base_name(row.file), "summary": row.summary.to_json()})
    head = dataclasses.asdict(header) | {"base_file": base_name(header.base_file)}
    return pretty_json({"schema": 1, "header": head, "tiers": tiers}).decode()


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
    return columns


#: Name and content of every csv column, in order.
COLUMNS: dict[str, Reader] = _INTERFACE | {name: read for name, read in _more_columns().items() if name not in _INTERFACE}


# markdown.


def retention_md(header: TableHeader, rows: Sequence[TableRow]) -> str:
    """The table as GitHub markdown, with what its numbers depend on and what they mean.

    Raises:
        InputError: see `order_rows`.
    """
    ordered = order_rows(rows)
    names = [name.replace("base", md_text(header.base_type)) for name in _MD_COLUMNS]
    lines = [f"# Retention of {md_text(base_name(header.base_file))}", "", *_md_header(header), ""]
    lines += _md_table(names, [[write(row) for write in _MD_COLUMNS.values()] for row in ordered], "---:")
    lines += ["", *_md_notes(header, ordered), "", "## Files", ""]
    lines += _md_table(["Tier", "File", "sha256"],
                       [[md_text(row.tier), md_text(base_name(row.file)), f"`{row.sha256}`"] for row in ordered], ":---")
    return "\n".join(lines) + "\n"


def _md_table(names: Sequence[str], cells: Sequence[Sequence[str]], align: str) -> list[str]:
    """A table whose columns after the first are aligned by `:---` (left) or `---:` (right)."""
    rows = [names, [":---", *[align] * (len(names) - 1)], *cells]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _md_estimate(statistic: str, *, percent: bool = False, signed: bool = False) -> Callable[[TableRow], str]:
    def write(row: TableRow) -> str:
        estimate: Estimate = getattr(row.summary, statistic)
        if estimate.value is None:
            return "n/a"
        scale, unit = (100.0, " %") if percent else (1.0, "")
        return with_error(scale * estimate.value, None if estimate.se is None else scale * estimate.se, signed=signed) + unit

    return write


def _md_tier(row: TableRow) -> str:
    return md_text(row.tier) + (" †" if row.substituted else "") + (" ‡" if row.notes else "")


_MD_COLUMNS: dict[str, Callable[[TableRow], str]] = {
    "Tier": _md_tier,
    "Size": lambda row: format_bytes(row.size_bytes),
    "Bytes": lambda row: f"{row.size_bytes:,}",
    "Size vs base": lambda row: f"{100 * row.size_vs_base:.1f} %",
    "bpw": lambda row: f"{row.bpw:.2f}",
    "PPL": lambda row: significant(row.summary.ppl_q.value or 0.0, 6),
    "PPL drift": _md_estimate("ppl_drift", percent=True, signed=True),
    "Mean KLD": _md_estimate("kld"),
    "99.9 % KLD": lambda row: significant(row.summary.kld_quantile(0.999).value, 3),
    "Mean Δp": _md_estimate("p_diff", percent=True, signed=True),
    "RMS Δp": _md_estimate("p_diff_rms", percent=True),
    "Same top token": _md_estimate("same_top_p", percent=True),
}


def _md_header(header: TableHeader) -> list[str]:
    articles = f"{header.n_article} article{'s' if header.n_article != 1 else ''}"
    lines = [
        f"Base: {md_text(base_name(header.base_file))}, {md_text(header.base_type)}, sha256 `{header.base_sha256}`",
        f"Protocol: **{md_text(header.protocol_name)}**, id `{header.protocol_id}`, eval_id `{header.eval_id}`",
    ]
    if header.derived is not None:
        lines.append(f"**Derived protocol**, not the frozen one of that name: {md_text(header.derived)}; its rows compare "
                     "only with rows of the same eval_id")
    lines += [
        f"Text: {md_text(header.corpus_name)}, sha256 `{header.corpus_sha256}`; tokens sha256 `{header.token_ids_sha256}`",
        f"Scored: {header.n_scored:,} tokens of {header.n_chunk} chunks of {header.n_ctx} tokens ({md_text(header.chunk_rule)}), "
        f"from {articles}",
        f"Arithmetic: {md_text(header.backend)}, llama.cpp {md_text(header.llama_commit)}, {md_text(header.library_version)}",
        f"Result: `{header.result_id}`",
    ]
    return [f"- {line}" for line in lines]


_MD_MEANING = """\
PPL drift is exp(mean ln ratio of perplexities) − 1, KLD the Kullback-Leibler divergence from the base in nats per token, Δp the \
change of the probability of the right token, "same top token" how often both find the same token the most likely. All are paired \
with the base, token by token. KLD belongs to the file and the arithmetic named above, not to the file alone. Retention is not a \
benchmark score, and a file's size is not its memory."""
_MD_ERRORS = """\
± is one standard error over articles, each left out in turn. 95 % intervals are in retention.csv (`_lo`, `_hi`); they are about \
text like this one and are not adjusted for many comparisons. Rows that differ by little are not ranked by this table."""


def _md_notes(header: TableHeader, rows: Sequence[TableRow]) -> list[str]:
    ratio = rows[-1].summary.ln_ppl_ratio  # all rows have the same articles
    few = f"No ± and no interval: {ratio.reason}. They need six articles of equal length."
    lines = [_MD_ERRORS if ratio.se is not None else few, "", _MD_MEANING]
    for row in rows:
        if row.substituted:
            lines += ["", f"† {md_text(row.tier)}: {100 * row.substituted:.1f} % of parameters have another type than was asked "
                          "for (substituted by shape or for want of importances); believe its bpw, not its name."]
        if row.notes:
            lines += ["", f"‡ {md_text(row.tier)}: {'; '.join(md_text(note) for note in row.notes)}"]
    for note in header.notes:
        lines += ["", md_text(note)]
    return lines
