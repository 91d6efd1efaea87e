"""The tables of `quantkit imatrix show`: Markdown for people, all numbers of every entry as JSON and CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quantkit.cli.output import Cell, csv_table, json_text, md_table, md_text
from quantkit.cli.show import block_ranges
from quantkit.job.imatrix_report import BaseCoverage, ImatrixReport
from quantkit.measure.importance import FEW_ROWS, TensorImportance

_COLUMNS = tuple(field.name for field in dataclasses.fields(TensorImportance))
_N_EXTREME = 8
_N_NAMED = 20
_MISSING = ("tensor", "fewest rows", "experts with few", "without any", "of", "zero columns", "not finite")


def as_json(report: ImatrixReport) -> str:
    """Everything."""
    return json_text(dataclasses.asdict(report))


def as_csv(report: ImatrixReport) -> str:
    """One line an entry."""
    return csv_table(_COLUMNS, [_cells(tensor) for tensor in report.tensors])


def as_markdown(report: ImatrixReport) -> str:
    """What a person wants to know: origin, coverage, what is wrong, extremes."""
    sound = [t for t in report.tensors if t.mean_square is not None]
    ranked = sorted(sound, key=lambda t: (-(t.mean_square or 0), t.name))
    sections = [md_table(["", "value"], _facts(report)), _roles(report.tensors), _problems(report.tensors)]
    if report.coverage is not None:
        sections.append(_coverage(report.coverage))
    if len(ranked) > 2 * _N_EXTREME:
        sections += ["Most important, by mean squared input:\n\n" + _importances(ranked[:_N_EXTREME]),
                     "Least important:\n\n" + _importances(ranked[:-_N_EXTREME - 1:-1])]
    else:
        sections.append("By mean squared input:\n\n" + _importances(ranked))
    return "\n".join(sections)


def _facts(report: ImatrixReport) -> list[tuple[str, Cell]]:
    tensors = report.tensors
    return [
        ("file", report.file), ("sha256", report.sha256), ("format", "legacy .dat" if report.legacy else "GGUF"),
        ("calibration text", ", ".join(report.datasets) or "not said"), ("chunks", report.chunk_count),
        ("tokens a chunk", report.chunk_size or "not said"), ("entries", len(tensors)),
        ("experts without rows", sum(t.n_missing for t in tensors)), ("columns of zeros", sum(t.n_zero for t in tensors)),
        ("values that are not finite", sum(t.n_not_finite for t in tensors)),
    ]


def _roles(tensors: Sequence[TensorImportance]) -> str:
    rows: list[list[Cell]] = []
    for role in dict.fromkeys(t.role for t in tensors):
        own = [t for t in tensors if t.role == role]
        layers = block_ranges(tuple(t.layer for t in own if t.layer is not None)) or "outside the blocks"
        rows.append([role, len(own), layers, f"{min(t.n_row_min for t in own):.0f}", f"{max(t.n_row_max for t in own):.0f}"])
    return md_table(["role", "entries", "layers", "fewest rows", "most rows"], rows)


def _problems(tensors: Sequence[TensorImportance]) -> str:
    bad = [t for t in tensors if not t.is_sound]
    if not bad:
        return "Every entry has rows everywhere, no zeros, and finite values.\n"
    shown: list[list[Cell]] = [[t.name, f"{t.n_row_min:.0f}", t.n_few, t.n_missing, t.n_expert, t.n_zero, t.n_not_finite]
                               for t in bad[:_N_NAMED]]
    more = f"\nand {len(bad) - _N_NAMED} more\n" if len(bad) > _N_NAMED else ""
    return (f"Entries with something missing (few: below {FEW_ROWS} rows):\n\n"
            + md_table(_MISSING, shown) + more)


def _coverage(coverage: BaseCoverage) -> str:
    lines = [f"{coverage.n_matched} of the {coverage.n_matrix} matrices of {md_text(coverage.base)} that can be quantized have an "
             "entry"]
    for what, names in (("Without an entry", coverage.without_entry), ("Not applicable, rows are looked up", coverage.lookups),
                        ("Entries that the base does not know", coverage.unknown), ("Of another length", coverage.wrong_length)):
        if names:
            more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
            lines.append(f"{what}: {len(names)}: {', '.join(md_text(name) for name in names[:_N_NAMED])}{more}")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _importances(tensors: Sequence[TensorImportance]) -> str:
    return md_table(["tensor", "mean square", "peak / mean", "columns with half of it"],
                    [[t.name, _short(t.mean_square, ".4g"), _short(t.peak, ".3g"), _short(t.share_half, ".1%")] for t in tensors])


def _short(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _cells(tensor: TensorImportance) -> list[Cell]:
    return [getattr(tensor, column) for column in _COLUMNS]
