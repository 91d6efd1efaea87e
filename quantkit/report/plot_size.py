"""Pictures of a number against file size: mean KLD, same top token, drift of perplexity.

Every point has its 95 % interval. The line joins the front: no other file is as small and loses less, by the numbers as they are.
A hollow mark is a file that a smaller one beats beyond the noise, a half-filled one a file that a smaller one equals within it. A
diamond is a tier with substituted types, a cross one that has collapsed; neither is on the line. Axes are logarithmic, so that one
collapsed tier does not flatten the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quantkit.core.units import GIB, MIB
from quantkit.report.plot_labels import Box, draw_labels
from quantkit.report.plot_style import (
    GREY,
    INK,
    LIGHT,
    ORANGE,
    SERIES_COLOURS,
    VERMILION,
    Axes,
    Figure,
    Picture,
    drawing,
    finish,
    name_axis,
    pixel_extent,
    short_names,
)
from quantkit.spec.records import Estimate

#: Mean KLD from which a tier counts as collapsed: by then its text has little to do with the base's.
COLLAPSED_KLD = 1.0

State = Literal["front", "tied", "dominated", "substituted", "collapsed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """One file of one series.

    Attributes:
        estimate: the number of the picture, with its interval.
        on_front: whether the line goes through it.
        floor: the number that the same file has under perturbed kernels, where that was measured.
    """

    label: str
    size_bytes: int
    estimate: Estimate
    state: State
    on_front: bool
    n_scored: int
    floor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The files of one run."""

    name: str
    points: tuple[SizePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """What stands around a picture: of which base, on which text, under which result."""

    subtitle: str
    footer: str


class Measure(NamedTuple):
    """One kind of picture. `to_axis` maps the number, None where it cannot be drawn; `scale` sets the axis up."""

    name: str
    title: str
    label: str
    to_axis: Callable[[float, int], float | None]
    scale: Callable[[Axes, Sequence[float]], None]
    alt: str
    legend: str


class _Look(NamedTuple):
    """How a series is told from the others; one alone needs no colour of its own for the odd kinds of file."""

    colour: str
    shape: str
    is_alone: bool

    @classmethod
    def of(cls, i: int, n: int) -> _Look:
        return cls(SERIES_COLOURS[i % len(SERIES_COLOURS)], _SHAPES[i % len(_SHAPES)], n == 1)

    def style(self, state: State) -> dict[str, Any]:
        """Line2D's arguments for a file of this series in some state."""
        mark = _MARKS[state]
        own = {"substituted": ORANGE, "collapsed": VERMILION}.get(state, self.colour)
        face = own if self.is_alone else self.colour
        marker = self.shape if mark.marker == "o" else mark.marker
        style: dict[str, Any] = {"marker": marker, "fillstyle": mark.fill, "markersize": 7.5, "color": face,
                                 "markerfacecoloralt": "white", "linestyle": "none",
                                 "markeredgecolor": INK if state == "substituted" else face}
        return {**style, "fillstyle": "full", "markerfacecolor": "white"} if mark.fill == "none" else style


class _Drawn(NamedTuple):
    """A file in the picture, in the axes' own coordinates."""

    point: SizePoint
    x: float
    y: float
    colour: str


class _Mark(NamedTuple):
    marker: str
    fill: Literal["full", "none", "left"]
    text: str


_BEYOND_PX = 200  # how far outside of the axes a label could still stand
_FLOOR = "the same of each file"
_BAND: dict[str, Any] = {"facecolor": LIGHT, "edgecolor": GREY, "hatch": "///", "alpha": 0.45, "linewidth": 0}

# Of several runs each has a shape too, which grey print needs; the diamond and the cross are taken.
_SHAPES = ("o", "s", "^", "v", "P", "h")
_MARKS: dict[State, _Mark] = {
    "front": _Mark("o", "full", "a file, with its 95 % interval by article"),
    "tied": _Mark("o", "left", "no better than a smaller file, within the noise"),
    "dominated": _Mark("o", "none", "worse than a smaller file, beyond the noise"),
    "substituted": _Mark("D", "full", "some types substituted: not what its name says"),
    "collapsed": _Mark("X", "full", f"collapsed: mean KLD of {COLLAPSED_KLD:g} nat or more"),
}


def draw_by_size(measure: Measure, series: Sequence[Series], caption: Caption, *, noise_floor: float | None = None) -> Picture:
    """Draw one number against file size.

    Args:
        series: one for each run; with more than one, colours tell them apart.
        noise_floor: what the base itself has under perturbed kernels, drawn as a band; None where it was not measured.
    """
    points = [point for one in series for point in one.points]
    largest = max((point.size_bytes for point in points), default=MIB)
    unit, unit_name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    with drawing(measure.title, caption.subtitle, caption.footer) as (figure, axes):
        drawn: list[_Drawn] = []
        for i, one in enumerate(series):
            drawn += _draw_series(axes, measure, one, unit, _Look.of(i, len(series)))
        axes.set_xlabel(f"File size, {unit_name}")
        name_axis(figure, axes, measure.label)
        measure.scale(axes, [y for _, _, y, _ in drawn])
        axes.margins(x=0.07)
        is_below = _draw_floor(axes, measure, noise_floor, [point for point, *_ in drawn], unit)
        legend_box = _draw_legend(figure, axes, measure, series, [point for point, *_ in drawn], has_floor_below=is_below)
        names = short_names([point.label for point, *_ in drawn])
        obstacles = [*legend_box, *_marks_in_pixels(axes, measure, drawn)]
        draw_labels(axes, [(x, y) for _, x, y, _ in drawn], names, obstacles,
                    colours=[colour if len(series) > 1 else INK for *_, colour in drawn])
        return finish(figure, _alt(measure, points))


def _draw_series(axes: Axes, measure: Measure, series: Series, unit: int, look: _Look) -> list[_Drawn]:
    drawn, front = [], []
    for point in series.points:
        if point.estimate.value is None or (y := measure.to_axis(point.estimate.value, point.n_scored)) is None:
            continue
        x = point.size_bytes / unit
        style = look.style(point.state)
        ends = [measure.to_axis(end, point.n_scored) for end in (point.estimate.lo, point.estimate.hi) if end is not None]
        low, high = (min([y, *filter(None, ends)]), max([y, *filter(None, ends)]))
        axes.errorbar([x], [y], yerr=[[y - low], [high - y]], fmt="none", ecolor=style["color"], elinewidth=1.1, capsize=3,
                      capthick=1.1, zorder=3)
        axes.plot([x], [y], zorder=4, **style)
        drawn.append(_Drawn(point, x, y, look.colour))
        if point.on_front and point.state in {"front", "tied"}:
            front.append((x, y))
    front.sort()
    axes.plot([x for x, _ in front], [y for _, y in front], color=look.colour, linewidth=1.2, alpha=0.45, zorder=2)
    return drawn


def _draw_floor(axes: Axes, measure: Measure, noise_floor: float | None, points: Sequence[SizePoint], unit: int) -> bool:
    """The base's own floor as a band from the bottom, each tier's as a short bar at its size.

    Returns:
        Whether one of them lies below the picture; it is not drawn then, since room for it would press the tiers together.
    """
    bottom, top = axes.get_ylim()
    is_below = False
    if noise_floor is not None and (y := measure.to_axis(noise_floor, 1)) is not None:
        if y > bottom:
            axes.axhspan(bottom, y, zorder=0, **_BAND)
        is_below = y <= bottom
    for point in points:
        if point.floor is not None and (y := measure.to_axis(point.floor, 1)) is not None:
            if y > bottom:
                axes.plot([point.size_bytes / unit], [y], marker="_", markersize=13, color=GREY, markeredgewidth=1.6,
                          linestyle="none", label=_FLOOR)
            is_below = is_below or y <= bottom
    axes.set_ylim(bottom, top)
    return is_below


def _draw_legend(figure: Figure, axes: Axes, measure: Measure, series: Sequence[Series], points: Sequence[SizePoint], *,
                 has_floor_below: bool) -> list[Box]:
    """Only what the picture has, in the corner where that kind of picture is empty."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    states, has_floors = {point.state for point in points}, any(line.get_label() == _FLOOR for line in axes.lines)
    handles: list[Line2D | Patch] = []
    if len(series) > 1:
        names = short_names([one.name for one in series], 40)
        looks = [_Look.of(i, len(series)) for i in range(len(series))]
        handles += [Line2D([], [], marker=look.shape, color=look.colour, linewidth=1.2, label=name)
                    for look, name in zip(looks, names, strict=True)]
    look = _Look.of(0, 1) if len(series) == 1 else _Look(GREY, "o", False)
    handles += [Line2D([], [], **look.style(state), label=mark.text) for state, mark in _MARKS.items() if state in states]
    if axes.patches:
        handles.append(Patch(**_BAND, label="noise floor: the base in other arithmetic"))
    if has_floors:
        handles.append(Line2D([], [], marker="_", markersize=13, markeredgewidth=1.6, color=GREY, linestyle="none",
                              label=_FLOOR))
    if has_floor_below:
        others = "other " if has_floors or axes.patches else ""
        handles.append(Line2D([], [], linestyle="none", label=f"{others}noise floors lie below the picture"))
    if not handles:
        return []
    options: dict[str, Any] = {"loc": measure.legend, "handletextpad": 0.6, "borderaxespad": 0.2, "labelspacing": 0.45}
    return [Box(*pixel_extent(figure, axes.legend(handles=handles, **options)))]


def _marks_in_pixels(axes: Axes, measure: Measure, drawn: Sequence[_Drawn]) -> list[Box]:
    """The marks, their error bars and the line between them, as boxes that labels keep clear of."""
    boxes = []
    to_pixels = axes.transData.transform
    for point, x, y, _ in drawn:
        px, py = (float(v) for v in to_pixels((x, y)))
        boxes.append(Box(px - 6, py - 6, px + 6, py + 6))
        ends = [measure.to_axis(end, point.n_scored) for end in (point.estimate.lo, point.estimate.hi) if end is not None]
        ys = [float(to_pixels((x, end))[1]) for end in ends if end is not None]
        if ys:
            boxes.append(Box(px - 3, min(ys), px + 3, max(ys)))
    left, bottom, right, top = pixel_extent(axes.figure, axes)
    seen = left - _BEYOND_PX, bottom - _BEYOND_PX, right + _BEYOND_PX, top + _BEYOND_PX
    for line in axes.lines:
        path = line.get_path().transformed(axes.transData).cleaned(clip=seen)  # a zero lies far below a logarithmic axis
        for (x0, y0), (x1, y1) in itertools.chain.from_iterable(map(itertools.pairwise, path.to_polygons(closed_only=False))):
            n = max(2, int(math.hypot(x1 - x0, y1 - y0) // 6))
            boxes += [Box(x0 + (x1 - x0) * k / n - 1, y0 + (y1 - y0) * k / n - 1, x0 + (x1 - x0) * k / n + 1,
                          y0 + (y1 - y0) * k / n + 1) for k in range(n + 1)]
    return boxes


def _alt(measure: Measure, points: Sequence[SizePoint]) -> str:
    return f"{measure.alt} of {len(points)} files, from the smallest to the largest; every number is in the table."
