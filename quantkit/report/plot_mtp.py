"""`mtp_matrix`: what each tier's own MTP head and the base's unquantized head are worth on that tier's trunk.

Teacher-forced acceptance: how often the head's first choice is the trunk's, given the true text. The dashed line is what always
guessing the trunk's most frequent choice would reach. Other head types on these trunks are in report/speed.matrix.*, beside their
speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import BLUE, GREY, ORANGE, Axes, Picture, drawing, finish, name_axis, short_names
from quantkit.spec.mtp_records import MtpResult, TeacherForced


def draw_mtp(results: Sequence[MtpResult], caption: Caption) -> Picture | None:
    """Draw the heads that were measured, in the order given; None where there is none."""
    shown = [(r, r.teacher_forced_acceptance) for r in results if r.teacher_forced_acceptance is not None]
    if not shown:
        return None
    title = "MTP heads: how often the first draft is what the trunk chooses"
    with drawing(title, caption.subtitle, caption.footer) as (figure, axes):
        _draw(axes, [(i - 0.08, own) for i, (_, own) in enumerate(shown)], "o", BLUE, "the tier's own head, with its 95 % interval")
        _draw(axes, [(i + 0.08, r.reference.teacher_forced_acceptance) for i, (r, _) in enumerate(shown) if r.reference], "s",
              ORANGE, "the base's unquantized head on the same trunk")
        chance = max(own.chance for _, own in shown)
        axes.axhline(chance, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="guessing", zorder=1)
        names, word = short_names([r.tier for r, _ in shown], 10 if len(shown) < 9 else 7), "head " if len(shown) < 9 else ""
        ticks = [f"{name}\n{word}{r.head.type if r.head else ''}" for name, (r, _) in zip(names, shown, strict=True)]
        longest = max(len(line) for tick in ticks for line in tick.split("\n"))
        axes.set_xticks(range(len(shown)), ticks, size=min(9.0, 690 / len(shown) / (0.9 * longest)))
        axes.margins(x=0.05, y=0.1)
        axes.set_ylim(bottom=0)
        name_axis(figure, axes, "Teacher-forced acceptance, a share of positions")
        axes.legend(loc="lower left", borderaxespad=0.4)
        return finish(figure, f"Teacher-forced acceptance of {len(shown)} tiers' MTP heads; every number is in the table.")


def _draw(axes: Axes, points: Sequence[tuple[float, TeacherForced]], marker: str, colour: str, label: str) -> None:
    xs, values = [x for x, _ in points], [t.value for _, t in points]
    below = [t.value - (t.value if t.lo is None else t.lo) for _, t in points]
    above = [(t.value if t.hi is None else t.hi) - t.value for _, t in points]
    axes.errorbar(xs, values, yerr=[below, above], fmt=marker, color=colour, markersize=6.5, capsize=3, elinewidth=1.1, label=label,
                  zorder=3)
