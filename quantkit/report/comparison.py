"""Several publishers' or several versions' files of one base on one table and one set of pictures.

Files of one name and other bytes stand apart, each with its run's name; a file that was measured in two runs with the same rows
stands once. Every pair of files is tested, whoever made them: the family is the whole table.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quantkit.core.errors import InputError
from quantkit.core.files import pretty_json
from quantkit.core.units import format_bytes
from quantkit.job.compare_runs import check_comparable, compare_files
from quantkit.report.cells import estimate_text
from quantkit.report.escape import base_name, csv_text, md_text, significant
from quantkit.report.pictures import caption_of, draw_sizes
from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import Picture
from quantkit.report.run_data import RunData, read_run
from quantkit.report.table import COLUMNS, TableRow
from quantkit.spec.json_records import record_to_json
from quantkit.spec.verdict_records import Verdicts


class ComparedFile(NamedTuple):
    """A row of the table, the runs that measured it, and its rows; `row.tier` is unique in the table, `tier` its name alone."""

    runs: tuple[str, ...]
    tier: str
    row: TableRow
    rows: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs on one base. `base` is the row of the base, `files` the others by size, largest first."""

    runs: Mapping[str, RunData]
    base: TableRow
    files: tuple[ComparedFile, ...]
    verdicts: Verdicts


def compare_run_folders(paths: Sequence[Path]) -> Comparison:
    """Read runs and test all their files against each other.

    Raises:
        InputError: fewer than two runs, a run twice, or runs of another base, text or evaluation.
    """
    if len({path.resolve() for path in paths}) < 2:
        raise InputError("expected two different run directories or more to compare, got fewer: name them all")
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    check_comparable({name: {"base sha256": data.header.base_sha256, "token ids sha256": data.header.token_ids_sha256,
                             "eval_id": data.header.eval_id} for name, data in runs.items()})
    files = _files(runs)
    first = next(iter(runs.values()))
    verdicts = compare_files({file.row.tier: file.rows for file in files}, first.protocol,
                             {file.row.tier: file.row.reference for file in files})
    letters = verdicts.comparison("kld").letters  # of this table, not of the runs'
    lettered = [file._replace(row=dataclasses.replace(file.row, letters=letters[file.row.tier])) for file in files]
    return Comparison(runs=runs, base=first.rows[0], files=tuple(lettered), verdicts=verdicts)


def draw_comparison(comparison: Comparison) -> dict[str, Picture]:
    """The pictures against file size, one series a run."""
    first = caption_of(next(iter(comparison.runs.values())))
    ids = ", ".join(f"{name} {data.header.result_id[:8]}" for name, data in comparison.runs.items())
    caption = Caption(subtitle=first.subtitle, footer=f"quantkit · results {ids} · {_arithmetic(comparison)}")
    runs = [(name, [file.row for file in comparison.files if file.runs[0] == name]) for name in comparison.runs]
    return draw_sizes([(name, rows) for name, rows in runs if rows], comparison.verdicts, caption,
                      labels={file.row.tier: file.tier for file in comparison.files})


def comparison_md(comparison: Comparison) -> str:
    """The table as markdown."""
    header = next(iter(comparison.runs.values())).header
    columns = ["File", "Run", "Size", "bpw", "Mean KLD", "99.9 % KLD", "PPL drift", "Same top token", "Group"]
    rows = [columns, [":---", ":---", *["---:"] * (len(columns) - 2)]]
    rows += [_md_row(file.row, ", ".join(file.runs)) for file in comparison.files]
    lines = [f"# Files of {md_text(base_name(header.base_file))}", "",
             f"- Base: {md_text(base_name(header.base_file))}, {md_text(header.base_type)}, sha256 `{header.base_sha256}`",
             f"- Text: {md_text(header.corpus_name)}, {header.n_scored:,} tokens of {header.n_article} articles; tokens sha256 "
             f"`{header.token_ids_sha256}`; eval_id `{header.eval_id}`",
             f"- Arithmetic: {md_text(_arithmetic(comparison))}"]
    lines += [f"- Run {md_text(name)}: protocol {md_text(data.header.protocol_name)}"
              f"{', derived: ' + md_text(data.header.derived) if data.header.derived else ''}, result `{data.header.result_id}`"
              for name, data in comparison.runs.items()]
    lines += ["", *("| " + " | ".join(cells) + " |" for cells in rows), "",
              "± is one standard error over articles. Files that share a letter are not told apart by mean KLD in paired tests "
              "over all pairs of this table (Holm); sharing a letter is not equality."]
    for file in comparison.files:
        if file.row.substituted:
            lines += ["", f"† {md_text(file.row.tier)}: {100 * file.row.substituted:.1f} % of parameters have another type than "
                          "was asked for; believe its bpw, not its name."]
        if file.row.notes:
            lines += ["", f"‡ {md_text(file.row.tier)}: {'; '.join(md_text(note) for note in file.row.notes)}"]
    return "\n".join(lines) + "\n"


def comparison_csv(comparison: Comparison) -> str:
    """The columns of retention.csv with the runs in front; letters are those of this table."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *COLUMNS])
    lines: list[tuple[tuple[str, ...], TableRow]] = [((), comparison.base), *((f.runs, f.row) for f in comparison.files)]
    for runs, row in lines:
        cells = [read(row) for read in COLUMNS.values()]
        writer.writerow([csv_text(", ".join(runs)),
                         *("" if c is None else csv_text(c) if isinstance(c, str) else repr(c) for c in cells)])
    return out.getvalue()


def comparison_json(comparison: Comparison) -> str:
    """Runs, files with whole summaries, and the verdicts of all pairs."""
    runs = [{"run": name, **dataclasses.asdict(data.header)} for name, data in comparison.runs.items()]
    files = []
    for file in comparison.files:
        files.append({"runs": list(file.runs), **record_to_json(file.row), "file": base_name(file.row.file),
                      "summary": file.row.summary.to_json()})
    return pretty_json({"schema": 1, "runs": runs, "files": files, "verdicts": record_to_json(comparison.verdicts)}).decode()


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; as much of the path as tells equal ones apart."""
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _files(runs: Mapping[str, RunData]) -> list[ComparedFile]:
    found: dict[tuple[str, str], ComparedFile] = {}
    for name, data in runs.items():
        for row in data.tiers:
            key = (row.sha256, data.manifest["tiers"][row.tier]["rows_sha256"])
            held = found.get(key)  # the same bytes with the same rows are one file, however often it was measured
            found[key] = (ComparedFile((name,), row.tier, row, data.run.rows(row.tier)) if held is None
                          else held._replace(runs=(*held.runs, name)))
    count = Counter(file.tier for file in found.values())
    named = [file if count[file.tier] == 1 else
             file._replace(row=dataclasses.replace(file.row, tier=f"{file.tier} ({file.runs[0]})")) for file in found.values()]
    return sorted(named, key=lambda file: (-file.row.size_bytes, file.row.tier, file.row.sha256))


def _md_row(row: TableRow, run: str) -> list[str]:
    s = row.summary
    mark = " †" * bool(row.substituted) + " ‡" * bool(row.notes)
    return [md_text(row.tier) + mark, md_text(run), format_bytes(row.size_bytes), f"{row.bpw:.2f}", estimate_text(s.kld),
            significant(s.kld_quantile(0.999).value, 3), estimate_text(s.ppl_drift, percent=True, signed=True),
            estimate_text(s.same_top_p, percent=True), md_text(row.letters)]


def _arithmetic(comparison: Comparison) -> str:
    """One for all, or each run's own: a KLD belongs to the file and its arithmetic."""
    each = {name: f"{d.header.backend}, llama.cpp {d.header.llama_commit}" for name, d in comparison.runs.items()}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return "differs, and KLD with it: " + "; ".join(f"{name}: {where}" for name, where in each.items())
