"""`by_slice`: where a tier differs, for tokens cut by what the base knew, where they stand and what they are.

One panel for each way of cutting; a point is the mean KLD of the tokens of one slice with its 95 % interval, a line joins a tier's.
Lines are told apart by shade, dashes and shape of the points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import (
    GREY,
    INK,
    WIDTH_PX,
    Axes,
    Figure,
    Line,
    Picture,
    drawable,
    drawing,
    finish,
    line_look,
    pixel_extent,
    short_names,
)
from quantkit.spec.verdict_records import Slice, Slices

_PANEL_PX, _TOP_PX, _BOTTOM_PX = 236, 62, 40
_SHAPES = ("o", "s", "^", "D", "v")  # beside four kinds of dashes: 20 lines that grey print tells apart
_TITLES = {"entropy": "By entropy of the base, nats", "margin": "By margin of the base's first choice, nats",
           "position": "By position in the chunk", "token": "By kind of token"}


def draw_slices(tiers: Sequence[Slices], caption: Caption) -> Picture:
    """Draw mean KLD by slice, the largest file first in the list and darkest in the picture."""
    kinds = list(dict.fromkeys(s.kind for one in tiers for s in one.slices))
    n_row = -(-len(kinds) // 2)
    height = _TOP_PX + _BOTTOM_PX + _PANEL_PX * max(1, n_row)
    with drawing("Where the tiers differ: mean KLD by slice (log scale)", caption.subtitle, caption.footer, height_px=height) as (
            figure, whole):
        whole.remove()
        for i, kind in enumerate(kinds):
            axes = _panel(figure, i, height)
            axes.set_title(_TITLES.get(kind, kind), loc="left", size=9.5, color=INK)
            _draw_kind(axes, {one.tier: [s for s in one.slices if s.kind == kind] for one in tiers})
        limits = [axes.get_ylim() for axes in figure.axes]
        for axes in figure.axes:  # one scale for all panels, so that they can be compared
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if figure.axes:
            _draw_legend(figure, [one.tier for one in tiers], height)
        return finish(figure, f"Mean KLD of {len(tiers)} tiers by slice of the tokens; every number is in audit/*/slices.json.")


def _draw_legend(figure: Figure, tiers: list[str], height: int) -> None:
    """Right of the panels, in the order of the lines from top to bottom: the tier that lost the most stands first."""
    lines = [line for line in figure.axes[0].lines if line.get_label() in tiers]
    order = sorted(range(len(lines)), key=lambda i: -_level(lines[i]))
    for n_max, size in ((14, 8.5), (14, 7.5), (10, 7.5), (7, 7.0)):
        names = short_names(tiers, n_max)
        legend = figure.legend([lines[i] for i in order], [names[i] for i in order], loc="upper left", borderaxespad=0,
                               bbox_to_anchor=(1 - 132 / WIDTH_PX, 1 - 76 / height), handlelength=2.6, fontsize=size)
        _, bottom, right, _ = pixel_extent(figure, legend)
        if (right <= WIDTH_PX - 4 and bottom >= 0) or n_max == 7:
            return
        legend.remove()


def _level(line: Line) -> float:
    """Where a line is on the whole; below all others where it has no point."""
    ys = [float(y) for y in line.get_ydata()]
    return sum(map(math.log, ys)) / len(ys) if ys else -math.inf


def _panel(figure: Figure, i: int, height: int) -> Axes:
    """The i-th of two columns, left of the legend."""
    width = (WIDTH_PX - 60 - 150) / 2
    left = 60 + (i % 2) * (width + 36)
    bottom = height - _TOP_PX - _PANEL_PX * (i // 2 + 1) + 66
    return figure.add_axes((left / WIDTH_PX, bottom / height, (width - 18) / WIDTH_PX, (_PANEL_PX - 92) / height))


def _draw_kind(axes: Axes, tiers: Mapping[str, Sequence[Slice]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    labels = [_label(s) for s in max(tiers.values(), key=len, default=[])]
    for i, (tier, slices) in enumerate(tiers.items()):
        seen = [(x, s.kld, s.kld.value) for x, s in enumerate(slices) if s.kld is not None and s.kld.value]
        xs, ys = [x for x, *_ in seen], [y for *_, y in seen]
        ends = [(y if kld.lo is None else kld.lo, y if kld.hi is None else kld.hi) for _, kld, y in seen]
        spread: Any = [[y - lo for (lo, _), y in zip(ends, ys, strict=True)], [hi - y for (_, hi), y in zip(ends, ys, strict=True)]]
        look = line_look(i, len(tiers))
        axes.plot(xs, ys, marker=_SHAPES[i % len(_SHAPES)], markersize=3.6, linewidth=1.3, label=tier, **look)
        axes.errorbar(xs, ys, yerr=spread, fmt="none", ecolor=look["color"], elinewidth=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.6f}".rstrip("0").rstrip(".") if y >= 1e-6 else f"{y:.0e}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(labels)), labels, rotation=28, ha="right", rotation_mode="anchor", size=7.5)
    axes.tick_params(axis="y", labelsize=7.5)
    axes.tick_params(axis="x", length=2, color=GREY)
    axes.margins(x=0.06, y=0.08)


def _label(one: Slice) -> str:
    name = drawable(one.name).replace(" nats", "")  # the panel's title says so
    return name if len(name) <= 18 else name[:17] + "…"


