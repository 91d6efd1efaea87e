"""Labels that overlap nothing: each goes to the free place nearest to its point, and far ones get a line to it.

Places are tried around the point in rings. All is in pixels, from the renderer that draws the picture, so that equal input gives
equal places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quantkit.report.plot_style import Axes, Text, pixel_extent

Point = tuple[float, float]

_RINGS_PX = (9, 16, 26, 40, 58, 80, 108)
# Right and left read best, then above and below, then the corners.
_ANGLES = (0, 180, 90, 270, 30, 150, 330, 210, 60, 120, 300, 240)
_GAP_PX = 2.0
_LINE_FROM_PX = 17
_N_SWEEPS = 3


class Box(NamedTuple):
    """A rectangle in pixels, y upward."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Shared area in square pixels, with a gap of two pixels around counted in."""
        width = min(self.right, other.right) - max(self.left, other.left) + _GAP_PX
        height = min(self.top, other.top) - max(self.bottom, other.bottom) + _GAP_PX
        return width * height if width > 0 and height > 0 else 0.0


    def nearest(self, point: Point) -> Point:
        """The spot of the box that is nearest to a point."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.bottom), self.top)

    def distance(self, point: Point) -> float:
        """How far a point is from the box; 0 inside."""
        return math.dist(point, self.nearest(point))


class Place(NamedTuple):
    """Where a label goes: its box, and how far its nearest side is from the point."""

    box: Box
    distance: float
    rank: int


def place_labels(points: Sequence[Point], sizes: Sequence[Point], obstacles: Sequence[Box], bounds: Box) -> list[Place]:
    """A place for each label; the best of what there is where nothing is free.

    Args:
        points: (x, y) of each point. sizes: (width, height) of each label.
        obstacles: what must not be covered. bounds: what labels must not leave.
    """
    options = [_options(point, size) for point, size in zip(points, sizes, strict=True)]
    fixed = []
    for i, places in enumerate(options):
        near = _reachable(places, obstacles)
        fixed.append([_fixed_cost(place, i, points, near, bounds) for place in places])
    chosen: dict[int, int] = {}
    for _ in range(_N_SWEEPS):  # a label placed early may move once the others stand
        for i, places in enumerate(options):
            others = [(options[j][chosen[j]], points[j]) for j in chosen if j != i]
            costs = [cost + _mutual_cost(place, points[i], others) for place, cost in zip(places, fixed[i], strict=True)]
            chosen[i] = costs.index(min(costs))
    return [options[i][chosen[i]] for i in range(len(options))]


def _reachable(places: Sequence[Place], obstacles: Sequence[Box]) -> list[Box]:
    """The obstacles that one of the places at least can touch: few of many, and nothing else is to be asked about."""
    reach = Box(min(p.box.left for p in places), min(p.box.bottom for p in places), max(p.box.right for p in places),
                max(p.box.top for p in places))
    return [obstacle for obstacle in obstacles if reach.overlap(obstacle) > 0]


def needs_line(place: Place) -> bool:
    """Whether a label is so far from its point that a line must join them."""
    return place.distance > _LINE_FROM_PX


def _options(point: Point, size: tuple[float, float]) -> list[Place]:
    places = []
    for ring in _RINGS_PX:
        for rank, angle in enumerate(_ANGLES):
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            x, y = point[0] + ring * dx, point[1] + ring * dy
            left = x if dx > 0.3 else x - size[0] if dx < -0.3 else x - size[0] / 2
            bottom = y if dy > 0.6 else y - size[1] if dy < -0.6 else y - size[1] / 2
            places.append(Place(Box(left, bottom, left + size[0], bottom + size[1]), ring, rank))
    return places


def _fixed_cost(place: Place, i: int, points: Sequence[Point], obstacles: Sequence[Box], bounds: Box) -> float:
    """What a place costs whatever the other labels do: far, outside, on top of a mark, or nearer to another point than its own."""
    box, own = place.box, points[i]
    outside = (max(0.0, bounds.left - box.left) + max(0.0, box.right - bounds.right) + max(0.0, bounds.bottom - box.bottom)
               + max(0.0, box.top - bounds.top))
    others = [point for j, point in enumerate(points) if j != i and point != own]
    mistaken = sum(box.distance(point) < 1.4 * box.distance(own) for point in others)
    crossed = sum(_crosses(place, own, Box(x - 6, y - 6, x + 6, y + 6)) for x, y in others) if needs_line(place) else 0
    return (place.distance * 1.5 + place.rank + 500 * outside + 20 * sum(box.overlap(other) for other in obstacles)
            + (8 if needs_line(place) else 45) * mistaken + 40 * crossed)


def _mutual_cost(place: Place, point: Point, others: Sequence[tuple[Place, Point]]) -> float:
    """Overlap of labels, and lines through labels."""
    cost = 0.0
    for other, other_point in others:
        cost += 50 * place.box.overlap(other.box)
        cost += 40 * (needs_line(place) and _crosses(place, point, other.box))
        cost += 40 * (needs_line(other) and _crosses(other, other_point, place.box))
    return cost


def _crosses(place: Place, point: Point, box: Box) -> bool:
    """Whether the line from a point to its label runs through a box (clipped side by side, after Liang and Barsky 1984)."""
    x1, y1 = place.box.nearest(point)
    dx, dy = x1 - point[0], y1 - point[1]
    start, end = 0.0, 1.0
    for step, low, high in ((dx, box.left - point[0], box.right - point[0]), (dy, box.bottom - point[1], box.top - point[1])):
        if abs(step) < 1e-9:
            if not low < 0 < high:
                return False
            continue
        near, far = sorted((low / step, high / step))
        start, end = max(start, near), min(end, far)
    return start < end


def draw_labels(axes: Axes, points: Sequence[Point], labels: Sequence[str], obstacles: Sequence[Box], *,
                size: float = 9, colours: Sequence[str]) -> list[Text]:
    """Write a label beside each point, which is given in the axes' own coordinates; obstacles are in pixels."""
    figure = axes.figure
    texts = [axes.text(0, 0, label, size=size, color=colour, zorder=6) for label, colour in zip(labels, colours, strict=True)]
    extents = [Box(*pixel_extent(figure, text)) for text in texts]
    sizes = [(extent.right - extent.left, extent.top - extent.bottom) for extent in extents]
    frame = Box(*pixel_extent(figure, axes))
    bounds = Box(frame.left + 2, frame.bottom + 2, figure.bbox.x1 - 6, frame.top + 4)
    to_pixels = axes.transData.transform
    pixels = [(float(x), float(y)) for x, y in (to_pixels(point) for point in points)]
    for text, point, place in zip(texts, pixels, place_labels(pixels, sizes, obstacles, bounds), strict=True):
        text.set_verticalalignment("bottom")
        text.set_transform(figure.dpi_scale_trans)  # inches, so that the place holds at any resolution
        text.set_position((place.box.left / figure.dpi, place.box.bottom / figure.dpi))
        if needs_line(place):
            _draw_line(axes, point, place.box)
    return texts


def _draw_line(axes: Axes, point: Point, box: Box) -> None:
    """A thin line from the point to the nearest spot of the label's box."""
    from matplotlib.lines import Line2D

    x, y = box.nearest(point)
    dpi = axes.figure.dpi
    axes.figure.add_artist(Line2D([point[0] / dpi, x / dpi], [point[1] / dpi, y / dpi], color="#999999", linewidth=0.6, zorder=1,
                                  transform=axes.figure.dpi_scale_trans))
