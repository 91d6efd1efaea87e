"""`report.html`: the whole report of a run as one file that needs no network, no server and no JavaScript but for sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import quote

from quantkit.core.units import format_bytes
from quantkit.report.cells import estimate_text, reference_text, shortfall_text
from quantkit.report.escape import base_name, significant
from quantkit.report.fit_table import card_fits, short_n_ctx
from quantkit.report.guidance import recommend
from quantkit.report.html_mtp import mtp_section
from quantkit.report.html_pairs import pairs_section
from quantkit.report.html_parts import (
    Cell,
    Html,
    bullets,
    code,
    definitions,
    details,
    element,
    figure,
    join,
    page,
    preformatted,
    section,
    table,
)
from quantkit.report.html_plan import plan_details, source_details
from quantkit.report.html_speed import speed_table
from quantkit.report.not_measured import not_measured, verify_steps
from quantkit.report.plot_style import Picture
from quantkit.report.run_data import RunData
from quantkit.report.table import TableRow
from quantkit.spec.memory_fit import CARDS_GIB, RESERVE_BYTES

_MEANING = (
    "Mean KLD: the Kullback-Leibler divergence from the base, nats per token. PPL drift: exp(mean ln ratio of perplexities) − 1. "
    "Same top token: how often both find the same token the most likely. All are paired with the base, token by token; ± is one "
    "standard error over articles. KLD belongs to the file and the arithmetic named below, not to the file alone. Retention is not "
    "a benchmark score, and a file's size is not its memory.")


def report_html(data: RunData, pictures: Mapping[str, Picture]) -> str:
    """The page of a run."""
    header = data.header
    base = base_name(header.base_file)
    lead = (f"{header.base_type}, {format_bytes(data.rows[0].size_bytes)}, measured on {header.corpus_name}: {header.n_scored:,} "
            f"tokens of {header.n_article} articles, {header.chunk_rule}. Protocol {header.protocol_name}"
            f"{', derived: ' + header.derived if header.derived else ''}. Result {header.result_id[:12]}.")
    sections = list(_sections(data, pictures))
    links = join((element("a", title, href=f"#{name}") for name, title, _ in sections), " ")
    return page(f"Retention of {base}", element("h1", f"Retention of {base}"), element("p", lead, class_="lead"),
                Html(f"<nav>{links}</nav>"), *(section(name, title, *content) for name, title, content in sections))


def _sections(data: RunData, pictures: Mapping[str, Picture]) -> Iterator[tuple[str, str, Sequence[Html]]]:
    guidance = recommend(data)
    if guidance or data.sentences:
        yield "which", "Which file?", [bullets(guidance), *_sentences(data)]
    yield "table", "Table", [retention_table(data), element("p", _MEANING, class_="note"), *_table_notes(data), *speed_table(data)]
    if further := [] if data.run.corpus else data.manifest.get("further_corpora", []):
        yield "texts", "On other texts", [bullets(element("a", text["name"], href=f"{quote(text['name'])}/report.html")
                                                  for text in further)]
    if data.verdicts is not None and (pairs := pairs_section(data.verdicts)):
        yield "pairs", "Told apart", pairs
    yield "pictures", "Pictures", [figure(picture) for picture in pictures.values()]
    if data.mtp:
        yield "mtp", "MTP heads", mtp_section(data.mtp)
    if plans := [*_plans(data)]:
        yield "plans", "Plans", plans
    yield "not-measured", "What was not measured", [bullets(not_measured(data))]
    yield "protocol", "Protocol", [_protocol_ids(data), details("protocol.toml", preformatted(data.protocol_text))]
    yield "evidence", "Evidence", [_evidence(data), _files(data)]
    yield "verify", "How to verify", [bullets(
        join([element("span", step.what), code(step.command)], " ") if step.command else step.what for step in verify_steps(data))]


def _plans(data: RunData) -> Iterator[Html]:
    """Each tier's plan, or where its file is from."""
    for row in data.tiers:
        if row.tier in data.plans:
            yield plan_details(data.plans[row.tier], data.run.plan(row.tier))
        elif row.source is not None:
            yield source_details(row.tier, row.bpw, row.source)


def _sentences(data: RunData) -> list[Html]:
    if not data.sentences:
        return []
    return [definitions((tier, sentence) for tier, sentence in data.sentences.items())]


def retention_table(data: RunData) -> Html:
    """The table that can be sorted; every cell of a number sorts by its full precision."""
    optional = [name for name, read in _OPTIONAL.items() if any(read(row) is not None for row in data.rows)]
    fits = [m.n_ctx for m in data.base.memory] if data.base else []
    columns = ["Tier", "Size", f"of {data.header.base_type}", "bpw / core", "Mean KLD", "99.9 % KLD", "PPL drift", "Same top token"]
    columns += [*optional, *(f"Card at {short_n_ctx(n)}" for n in fits)]
    rows = []
    for row in data.rows:
        cells = [*_number_cells(row), *(_OPTIONAL[name](row) or Cell("") for name in optional)]
        if data.base is not None:
            cells += [Cell(fit.text, fit.card_gib or CARDS_GIB[-1] + 1)
                      for fit in card_fits(row, data.plans.get(row.tier), data.base)]
        rows.append(cells)
    return table(columns, rows, sortable=True, first_row_class="base")


# What only some runs have: a column is there where one row has it.
_OPTIONAL: dict[str, Callable[[TableRow], Cell | None]] = {
    "KLD short by": lambda row: Cell(shortfall_text(row.reference), row.reference.shortfall) if row.reference else None,
    "Reference": lambda row: Cell(reference_text(row), is_text=True) if row.reference else None,
    "Group": lambda row: Cell(row.letters) if row.letters else None,
    "Noise floor": lambda row: Cell(significant(row.floor.kld.value or 0.0, 2), row.floor.kld.value) if row.floor else None,
    "KLD of weights": lambda row: Cell(estimate_text(row.weights.kld), row.weights.kld.value) if row.weights else None,
}


def _number_cells(row: TableRow) -> list[Cell]:
    s = row.summary
    p999 = s.kld_quantile(0.999).value
    mark = " †" * bool(row.substituted) + " ‡" * bool(row.notes)
    core = "" if row.bpw_core is None else f" / {row.bpw_core:.2f}"
    return [
        Cell(row.tier + mark), Cell(format_bytes(row.size_bytes), row.size_bytes),
        Cell(f"{100 * row.size_vs_base:.1f} %", row.size_vs_base), Cell(f"{row.bpw:.2f}{core}", row.bpw),
        Cell(estimate_text(s.kld), s.kld.value), Cell(significant(p999, 3), p999),
        Cell(estimate_text(s.ppl_drift, percent=True, signed=True), s.ppl_drift.value),
        Cell(estimate_text(s.same_top_p, percent=True), s.same_top_p.value),
    ]


def _table_notes(data: RunData) -> list[Html]:
    lines = ["bpw: tensor bits per weight of the whole file; core: without embedding, output and MTP block."]
    if data.letters:
        lines.append("Group: tiers that share a letter are not told apart by mean KLD. Sharing a letter is not equality.")
    if any(row.floor for row in data.rows):
        lines.append("Noise floor: the KLD of the same file from itself in other arithmetic, the largest that was tried.")
    if any(row.weights for row in data.rows):
        lines.append("KLD of weights: tier and base in the same F32 arithmetic, so that the weights' share alone is seen.")
    if data.base and data.base.memory:
        lines.append(f"Card: the smallest of {', '.join(map(str, CARDS_GIB))} GiB that holds every layer, an F16 KV cache, compute "
                     f"buffers and {format_bytes(RESERVE_BYTES)} for the driver. The file alone is less than that.")
    reason = data.rows[-1].summary.ln_ppl_ratio.reason
    if data.rows[-1].summary.ln_ppl_ratio.se is None and reason:
        lines.append(f"No ± and no interval: {reason}.")
    for row in data.tiers:
        if row.substituted:
            lines.append(f"† {row.tier}: {100 * row.substituted:.1f} % of parameters have another type than was asked for; believe "
                         "its bpw, not its name.")
        if row.notes:
            lines.append(f"‡ {row.tier}: {'; '.join(row.notes)}")
    return [bullets(lines)]


def _protocol_ids(data: RunData) -> Html:
    facts = data.manifest["protocol"]
    return definitions([("name", facts["name"]), *((key, code(facts[key])) for key in
                        ("protocol_id", "eval_id", "plan_id", "imatrix_id", "mtp_id")),
                        ("derived", "; ".join(facts["derived"]) or "no, as published")])


def _evidence(data: RunData) -> Html:
    header, build = data.header, data.manifest["build"]
    return definitions([
        ("result", code(header.result_id)), ("base", f"{base_name(header.base_file)}, {header.base_type}"),
        ("base sha256", code(header.base_sha256)), ("text sha256", code(header.corpus_sha256)),
        *([("calibration", header.calibration)] if header.calibration else []),
        ("tokens sha256", code(header.token_ids_sha256)), ("arithmetic", f"{header.backend}, llama.cpp {header.llama_commit}"),
        ("CPU features", build["system_info"]),
        ("libraries", ", ".join(f"{name} {version}" for name, version in data.manifest["libraries"].items()))])


def _files(data: RunData) -> Html:
    rows = [[Cell(row.tier), Cell(base_name(row.file), is_text=True), Cell(f"{row.size_bytes:,}"),
             Cell(code(row.sha256), is_text=True)] for row in data.rows]
    return table(["Tier", "File", "Bytes", "sha256"], rows)
