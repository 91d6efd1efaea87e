"""The matrix of trunks and heads: one table, one plot. The speedups name a machine, so all of it is `report/speed.matrix.*`.

Nothing is computed here.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from quantkit.core.files import pretty_json, write_atomic
from quantkit.core.units import format_bytes
from quantkit.job.manifest import refresh_files
from quantkit.job.rundir import RunFolder
from quantkit.report.escape import csv_text, md_text, with_error
from quantkit.report.mtp_report import md_table
from quantkit.report.plot_style import SERIES_COLOURS, Picture, drawing, finish, short_names
from quantkit.spec.json_records import record_to_json
from quantkit.spec.speed_records import MatrixCell

Cell = str | int | float | None

_MARKS = ("o", "s", "^", "D", "v", "P")
_FIELDS = ("tier", "head_type", "trunk_bytes", "head_block_bytes", "head_file_bytes", "n_draft", "n_drafted", "n_accepted",
           "acceptance_rate", "mean_accepted_len", "teacher_forced_acceptance", "teacher_forced_acceptance_se",
           "teacher_forced_acceptance_lo", "teacher_forced_acceptance_hi", "speedup_n_draft", "best_n_draft")
COLUMNS = (*_FIELDS, "speedup", "speedup_lo", "speedup_hi", "problems")


def write_matrix(run: RunFolder, cells: Sequence[MatrixCell]) -> str:
    """Write report/speed.matrix.md, .csv, .json, .png and .svg, and list them; returns the markdown."""
    text = matrix_md(cells)
    write_atomic(run.report / "speed.matrix.md", text.encode())
    write_atomic(run.report / "speed.matrix.csv", matrix_csv(cells).encode())
    write_atomic(run.report / "speed.matrix.json", pretty_json([record_to_json(cell) for cell in cells]))
    picture = plot_matrix(cells)
    write_atomic(run.report / "speed.matrix.png", picture.png)
    write_atomic(run.report / "speed.matrix.svg", picture.svg)
    if run.manifest.exists():
        refresh_files(run)
    return text


def matrix_md(cells: Sequence[MatrixCell]) -> str:
    """The table for people."""
    columns = ("trunk", "trunk size", "head", "head adds", "head file", "accepted of drafted", "teacher-forced", "speedup",
               "best n_draft", "check")
    rows = [[
        md_text(c.tier), format_bytes(c.trunk_bytes), md_text(c.head_type), format_bytes(c.head_block_bytes),
        format_bytes(c.head_file_bytes),
        "" if c.acceptance_rate is None else f"{c.acceptance_rate:.4f} ({c.n_accepted} of {c.n_drafted}, n_draft {c.n_draft})",
        "" if c.teacher_forced_acceptance is None else with_error(c.teacher_forced_acceptance, c.teacher_forced_acceptance_se),
        _speedup(c), "" if c.best_n_draft is None else str(c.best_n_draft), md_text("; ".join(c.problems)) or "passed",
    ] for c in cells]
    return "# Trunks and heads\n\n" + md_table(columns, rows)


def matrix_csv(cells: Sequence[MatrixCell]) -> str:
    """The table for programs: full precision, empty where a number is not defined."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        values: list[Cell] = [getattr(cell, field) for field in _FIELDS]
        values += [cell.speedup.value, cell.speedup.lo, cell.speedup.hi, "; ".join(cell.problems)]
        writer.writerow([csv_text(value) if isinstance(value, str) else value for value in values])
    return out.getvalue()


def plot_matrix(cells: Sequence[MatrixCell]) -> Picture:
    """Teacher-forced acceptance on each trunk, a series a head type, with its interval; the speedup stands beside each point."""
    trunks, heads = list(dict.fromkeys(c.tier for c in cells)), list(dict.fromkeys(c.head_type for c in cells))
    shown = [c for c in cells if c.teacher_forced_acceptance is not None]
    with drawing("MTP heads on their trunks", "first draft equals the trunk's choice, given the true text; × is the speedup here",
                 "intervals: 95 %, by article") as (figure, axes):
        for k, head in enumerate(heads):
            own = [c for c in shown if c.head_type == head]
            shift = (k - (len(heads) - 1) / 2) * 0.8 / len(heads)
            xs = [trunks.index(c.tier) + shift for c in own]
            values = [c.teacher_forced_acceptance or 0.0 for c in own]
            below = [v - (v if c.teacher_forced_acceptance_lo is None else c.teacher_forced_acceptance_lo)
                     for v, c in zip(values, own, strict=True)]
            above = [(v if c.teacher_forced_acceptance_hi is None else c.teacher_forced_acceptance_hi) - v
                     for v, c in zip(values, own, strict=True)]
            axes.errorbar(xs, values, [below, above], fmt=_MARKS[k % len(_MARKS)], capsize=3, label=head,
                          color=SERIES_COLOURS[k % len(SERIES_COLOURS)])
            for x, value, cell in zip(xs, values, own, strict=True):
                if cell.speedup.value is not None:
                    axes.annotate(f"×{cell.speedup.value:.2f}", (x, value), (4, 4), textcoords="offset points", size=7.5)
        axes.set_xticks(range(len(trunks)), short_names(trunks))
        axes.set_ylabel("teacher-forced acceptance")
        if shown:
            axes.legend(title="head")
        return finish(figure, f"teacher-forced acceptance of {len(heads)} head types on {len(trunks)} trunks")


def _speedup(c: MatrixCell) -> str:
    if c.speedup.value is None:
        return ""
    ends = "" if c.speedup.lo is None or c.speedup.hi is None else f" ({c.speedup.lo:.3f} to {c.speedup.hi:.3f})"
    return f"{c.speedup.value:.3f}{ends} at n_draft {c.speedup_n_draft}"
