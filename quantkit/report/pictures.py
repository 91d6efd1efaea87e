"""The pictures of a run, or of several on one base, from their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quantkit.core.units import format_bytes
from quantkit.job.parts import read_parquet
from quantkit.measure.pareto import Choice, find_standings, is_below
from quantkit.measure.tail import tail_shares, upper_quantiles
from quantkit.report.escape import base_name
from quantkit.report.plot_measures import MEASURES
from quantkit.report.plot_mtp import draw_mtp
from quantkit.report.plot_size import COLLAPSED_KLD, Caption, Series, SizePoint, State, draw_by_size
from quantkit.report.plot_slices import draw_slices
from quantkit.report.plot_style import Picture
from quantkit.report.plot_tail import TailCurve, draw_tail
from quantkit.report.plot_types import TypeColumn, draw_types
from quantkit.report.run_data import RunData
from quantkit.report.table import TableRow
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Verdicts

#: Every picture that a run can have, in the order in which a report shows them.
NAMES = (*(measure.name for measure in MEASURES), "kld_by_text", "kld_tail", "by_slice", "by_layer_types",
         "mtp_matrix")

# name of the measure: statistic of the verdicts, its estimate, and the loss that a point of the front must not exceed
_STATISTICS: dict[str, tuple[str, Callable[[TableRow], Estimate], Callable[[float], float]]] = {
    "kld_vs_size": ("kld", lambda row: row.summary.kld, lambda value: value),
    "same_top_p_vs_size": ("same_top_p", lambda row: row.summary.same_top_p, lambda value: -value),
    "ppl_vs_size": ("ln_ppl_ratio", lambda row: row.summary.ppl_drift, abs),  # as near as can be, from either side
}


def draw_run(data: RunData) -> dict[str, Picture]:
    """All pictures that the records of a run give, by name."""
    caption = caption_of(data)
    out = draw_sizes([(data.header.protocol_name, data.tiers)], data.verdicts, caption, floors=_floors(data))
    curves = []
    for row in data.tiers:
        rows, _ = read_parquet(data.run.rows(row.tier))
        shares = tail_shares(len(rows))
        curves.append(TailCurve(row.tier, shares, upper_quantiles(rows["kld"], shares)))
    out["kld_tail"] = draw_tail(curves, caption)
    if data.slices:
        out["by_slice"] = draw_slices(data.slices, caption)
    if columns := [column for row in data.tiers if (column := _type_column(row, data)) is not None]:
        out["by_layer_types"] = draw_types(columns, caption)
    if (heads := draw_mtp(data.mtp, caption)) is not None:
        out["mtp_matrix"] = heads
    return out


def _type_column(row: TableRow, data: RunData) -> TypeColumn | None:
    """What is known of a tier's types: its plan, or what lies in the file."""
    if (plan := data.plans.get(row.tier)) is not None:
        return TypeColumn.of_plan(plan)
    return None if row.source is None else TypeColumn.of_source(row.tier, row.bpw, row.source)


def draw_texts(texts: Sequence[RunData]) -> Picture:
    """Mean KLD against file size on each text: one series a text, never a mean over them."""
    first = caption_of(texts[0])
    caption = Caption(subtitle=first.subtitle.split(" · ")[0] + " · on " + ", ".join(t.header.corpus_name for t in texts),
                      footer=first.footer)
    series = [Series(name=t.header.corpus_name, points=_points("kld_vs_size", t.tiers, _states("kld_vs_size", t.tiers, t.verdicts),
                                                               {}, {})) for t in texts]
    return draw_by_size(MEASURES[0], series, caption)


def draw_sizes(runs: Sequence[tuple[str, Sequence[TableRow]]], verdicts: Verdicts | None, caption: Caption, *,
               floors: Mapping[str, float] | None = None, labels: Mapping[str, str] | None = None) -> dict[str, Picture]:
    """The pictures against file size, for one run or several.

    Args:
        runs: name and tiers of each; the names of all tiers are different.
        verdicts: of all pairs of these tiers; None: intervals that lie apart stand in for tests.
        floors: noise floor of a file's mean KLD by its sha256, that of the base under "base".
        labels: what is written beside a tier's point instead of its name.
    """
    out = {}
    for measure in MEASURES:
        known = (floors or {}) if measure.name == "kld_vs_size" else {}
        states = _states(measure.name, [row for _, tiers in runs for row in tiers], verdicts)
        series = [Series(name=name, points=_points(measure.name, tiers, states, known, labels or {})) for name, tiers in runs]
        out[measure.name] = draw_by_size(measure, series, caption, noise_floor=known.get("base"))
    return out


def caption_of(data: RunData) -> Caption:
    """What stands around every picture of a run."""
    header, build = data.header, data.manifest["build"]
    n_article = f"{header.n_article} article{'' if header.n_article == 1 else 's'}"
    return Caption(
        subtitle=f"{base_name(header.base_file)}, {format_bytes(data.rows[0].size_bytes)} · {header.corpus_name}, "
                 f"{header.n_scored:,} tokens of {n_article}",
        footer=f"quantkit {data.manifest['quantkit']} · {header.protocol_name}{' (derived)' if header.derived else ''} · result "
               f"{header.result_id[:12]} · {header.backend}, llama.cpp {build['llama_cpp_commit']}")


def _floors(data: RunData) -> dict[str, float]:
    """The largest mean KLD of each file against itself in other arithmetic."""
    out = {}
    for row in data.rows:
        floor = data.floors.get(row.sha256)
        largest = floor.largest() if floor else None
        if largest is not None and largest.kld.value is not None:
            out["base" if row.is_base else row.sha256] = largest.kld.value
    return out


def _states(name: str, tiers: Sequence[TableRow], verdicts: Verdicts | None) -> dict[str, State]:
    """What is to be said of each file among all of the picture, by its name."""
    statistic, read, loss = _STATISTICS[name]
    shown = [(row, read(row), value) for row in tiers if (value := read(row).value) is not None]
    better = _better_pairs(verdicts, statistic)

    def is_better(i: int, j: int) -> bool:
        if better is not None:
            return (shown[i][0].tier, shown[j][0].tier) in better
        low, high = (shown[j][1], shown[i][1]) if statistic == "same_top_p" else (shown[i][1], shown[j][1])
        return is_below(low, high)

    has_errors = all(estimate.lo is not None for _, estimate, _ in shown)
    states: dict[str, State] = {}
    standings = find_standings([Choice(row.size_bytes, loss(value)) for row, _, value in shown], is_better)
    for (row, _, _), standing in zip(shown, standings, strict=True):
        state: State = "front"
        if (row.summary.kld.value or 0.0) >= COLLAPSED_KLD:
            state = "collapsed"
        elif row.substituted:
            state = "substituted"
        elif has_errors:  # without errors nobody can say what lies within them
            state = "dominated" if standing.dominated_by else "tied" if standing.tied_with else "front"
        states[row.tier] = state
    return states


def _points(name: str, tiers: Sequence[TableRow], states: Mapping[str, State], floors: Mapping[str, float],
            labels: Mapping[str, str]) -> tuple[SizePoint, ...]:
    """The files of one run; the front is the run's own."""
    _, read, loss = _STATISTICS[name]
    shown = [(row, read(row), value) for row in tiers if (value := read(row).value) is not None]
    standings = find_standings([Choice(row.size_bytes, loss(value)) for row, _, value in shown], lambda i, j: False)
    return tuple(SizePoint(label=labels.get(row.tier, row.tier), size_bytes=row.size_bytes, estimate=estimate,
                           state=states[row.tier], on_front=standing.on_front, n_scored=row.summary.n_scored,
                           floor=floors.get(row.sha256))
                 for (row, estimate, _), standing in zip(shown, standings, strict=True))


def _better_pairs(verdicts: Verdicts | None, statistic: str) -> set[tuple[str, str]] | None:
    """(better, worse) of every pair that was told apart; None where no pair was tested."""
    if verdicts is None or statistic not in {c.statistic for c in verdicts.comparisons}:
        return None
    pairs = verdicts.comparison(statistic).pairs
    return ({(p.a, p.b) for p in pairs if p.verdict.startswith("better")}
            | {(p.b, p.a) for p in pairs if p.verdict.startswith("worse")})
