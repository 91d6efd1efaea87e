"""The retention table as GitHub markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.core.units import format_bytes
from quantkit.report.cells import reference_text, shortfall_text
from quantkit.report.escape import base_name, md_text, significant, with_error
from quantkit.report.sentences import tier_sentences
from quantkit.report.table_rows import TableHeader, TableRow, order_rows
from quantkit.report.verdict_table import verdict_lines
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Verdicts


def retention_md(header: TableHeader, rows: Sequence[TableRow], verdicts: Verdicts | None = None) -> str:
    """The table as GitHub markdown, with what its numbers depend on and what they mean.

    Args:
        verdicts: between the tiers; columns and sections of what was not measured are left away.

    Raises:
        InputError: see `order_rows`.
    """
    ordered = order_rows(rows)
    shown = {name: write for name, write in _MD_COLUMNS.items()
             if name not in _MD_OPTIONAL or any(_MD_OPTIONAL[name](row) for row in ordered)}
    names = [name.replace("base", md_text(header.base_type)) for name in shown]
    lines = [f"# Retention of {md_text(base_name(header.base_file))}", "", *_md_header(header), ""]
    lines += _md_table(names, [[write(row) for write in shown.values()] for row in ordered], "---:")
    lines += ["", *_md_notes(header, ordered)]
    if verdicts is not None:
        sentences = tier_sentences(ordered, verdicts)
        lines += ["", "## In words", "", *(f"- **{md_text(tier)}**: {md_text(text)}" for tier, text in sentences.items())]
        lines += verdict_lines(verdicts)
    lines += ["", "## Files", ""]
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
        return _md_value(estimate, percent=percent, signed=signed)

    return write


def _md_value(estimate: Estimate, *, percent: bool = False, signed: bool = False) -> str:
    scale, unit = (100.0, " %") if percent else (1.0, "")
    value = scale * (estimate.value or 0.0)
    return with_error(value, None if estimate.se is None else scale * estimate.se, signed=signed) + unit


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
    "KLD short by": lambda row: shortfall_text(row.reference),
    "Reference": lambda row: md_text(reference_text(row)),
    "Group": lambda row: row.letters,
    "Noise floor": lambda row: significant(row.floor.kld.value or 0.0, 2) if row.floor else "",
    "KLD of weights": lambda row: _md_value(row.weights.kld) if row.weights else "",
    "99.9 % KLD": lambda row: significant(row.summary.kld_quantile(0.999).value, 3),
    "Mean Δp": _md_estimate("p_diff", percent=True, signed=True),
    "RMS Δp": _md_estimate("p_diff_rms", percent=True),
    "Same top token": _md_estimate("same_top_p", percent=True),
}


_MD_OPTIONAL: dict[str, Callable[[TableRow], object]] = {
    "KLD short by": lambda row: row.reference, "Reference": lambda row: row.reference,
    "Group": lambda row: row.letters, "Noise floor": lambda row: row.floor, "KLD of weights": lambda row: row.weights}


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
        *([f"Calibration: {md_text(header.calibration)}"] if header.calibration else []),
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
    few = f"No ± and no interval: {ratio.reason}. They need ten articles of equal length."
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
