"""`mtp_matrix`: what each tier's own MTP head and the base's unquantized head are worth on that tier's trunk.

Teacher-forced acceptance: how often the head's first choice is the trunk's, given the true text. The dashed line is what always
guessing the trunk's most frequent choice would reach. Other head types on these trunks are in report/speed.matrix.*, beside their
speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import (
    BLUE,
    GREY,
    HEIGHT_PX,
    ORANGE,
    WIDTH_PX,
    Axes,
    Picture,
    drawing,
    finish,
    name_axis,
    short_names,
)
from quantkit.spec.mtp_records import MtpResult, TeacherForced

_ROOM_PX = 690  # for the names below the axis
_APART_PX = 6  # of a tier's two marks from its place


def draw_mtp(results: Sequence[MtpResult], caption: Caption) -> Picture | None:
    """Draw the heads that were measured, in the order given; None where there is none."""
    shown = [(r, r.teacher_forced_acceptance) for r in results if r.teacher_forced_acceptance is not None]
    if not shown:
        return None
    title = "MTP heads: how often the first draft is what the trunk chooses"
    many = len(shown) > 8  # their names do not fit side by side
    height = HEIGHT_PX + (50 if many else 0)
    with drawing(title, caption.subtitle, caption.footer, height_px=height) as (figure, axes):
        bottom_px, top_px = (138, 106) if many else (74, 106)
        place = axes.get_position()
        axes.set_position((place.x0, bottom_px / height, place.width, 1 - (bottom_px + top_px) / height))
        apart = _APART_PX * len(shown) / (place.width * WIDTH_PX)
        _draw(axes, [(i - apart, own) for i, (_, own) in enumerate(shown)], "o", BLUE,
              "the tier's own head, with its 95 % interval")
        _draw(axes, [(i + apart, r.reference.teacher_forced_acceptance) for i, (r, _) in enumerate(shown) if r.reference], "s",
              ORANGE, "the base's unquantized head on the same trunk")
        chance = max(own.chance for _, own in shown)
        axes.axhline(chance, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="guessing", zorder=1)
        _name_tiers(axes, [r for r, _ in shown], many=many)
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        name_axis(figure, axes, "Teacher-forced acceptance, a share of positions", above_px=34)
        axes.legend(loc="lower left", bbox_to_anchor=(-60 / (place.width * WIDTH_PX), 1.0), ncols=3, borderaxespad=0.3, borderpad=0,
                    columnspacing=1.6)
        return finish(figure, f"Teacher-forced acceptance of {len(shown)} tiers' MTP heads; every number is in the table.")


def _name_tiers(axes: Axes, results: Sequence[MtpResult], *, many: bool) -> None:
    """Each tier with the type of its head: below it, or aslant where there are many."""
    names = short_names([r.tier for r in results], 16 if many else max(8, int(_ROOM_PX / len(results) / 7)))
    types = [r.head.type if r.head else "" for r in results]
    if many:
        labels = [f"{name}, {kind}" for name, kind in zip(names, types, strict=True)]
        axes.set_xticks(range(len(names)), labels, rotation=40, ha="right", rotation_mode="anchor", size=8)
    else:
        axes.set_xticks(range(len(names)), [f"{name}\nhead {kind}" for name, kind in zip(names, types, strict=True)], size=9)


def _draw(axes: Axes, points: Sequence[tuple[float, TeacherForced]], marker: str, colour: str, label: str) -> None:
    xs, values = [x for x, _ in points], [t.value for _, t in points]
    below = [t.value - (t.value if t.lo is None else t.lo) for _, t in points]
    above = [(t.value if t.hi is None else t.hi) - t.value for _, t in points]
    axes.errorbar(xs, values, yerr=[below, above], fmt=marker, color=colour, markersize=6.5, capsize=3, elinewidth=1.1, label=label,
                  zorder=3)
