"""`kld_tail`: which share of the tokens has a KLD above a value, one curve for each tier.

A mean hides whether a tier is a little off everywhere or far off in a few places; two tiers with one mean can differ here. Curves
end where fewer than 16 tokens are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.report.plot_labels import Box, draw_labels
from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import INK, Axes, Picture, drawing, finish, line_look, name_axis, short_names

_SMALLEST_KLD = 1e-7  # below it float32 logits have nothing to say
_MAX_LABELLED = 8


class TailCurve(NamedTuple):
    """One tier: `kld[i]` nats are exceeded by the share `shares[i]` of its tokens."""

    label: str
    shares: npt.NDArray[np.float64]
    kld: npt.NDArray[np.float64]


def draw_tail(curves: Sequence[TailCurve], caption: Caption) -> Picture:
    """Draw the curves, the largest file first in the list and darkest in the picture."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    title = "The tail: how many tokens are how far off (further left is better)"
    with drawing(title, caption.subtitle, caption.footer) as (figure, axes):
        ends = []
        for i, curve in enumerate(curves):
            seen = curve.kld > _SMALLEST_KLD
            if not seen.any():
                continue
            x, y = curve.kld[seen], curve.shares[seen]
            axes.plot(x, y, linewidth=1.5, zorder=3, **line_look(i, len(curves)))
            ends.append((curve.label, (float(x[-1]), float(y[-1]))))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("KLD of a token, nats (log scale)")
        name_axis(figure, axes, "Share of tokens with a larger KLD (log scale)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.6f}".rstrip("0").rstrip(".") + " %"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x >= 1e-4 else f"{x:.0e}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        _limit(axes, curves)
        names = short_names([label for label, _ in ends], 18)
        if len(ends) <= _MAX_LABELLED:
            draw_labels(axes, [end for _, end in ends], names, _curves_in_pixels(axes), colours=[INK] * len(ends), size=8.5)
        elif ends:  # their ends lie too close
            left, bottom, width, height = axes.get_position().bounds
            axes.set_position((left, bottom, width - 0.2, height))
            axes.legend(axes.lines, names, loc="upper left", bbox_to_anchor=(1.01, 1.02), handlelength=2.6, borderaxespad=0)
        return finish(figure, f"Share of tokens above each KLD, for {len(curves)} tiers; quantiles are in the table.")


def _limit(axes: Axes, curves: Sequence[TailCurve]) -> None:
    """Half of the tokens fill the left of the picture; the nearly exact ones beyond are of no interest."""
    medians = [float(np.interp(0.5, curve.shares[::-1], curve.kld[::-1])) for curve in curves]
    largest = max((float(curve.kld[-1]) for curve in curves), default=1.0)
    low = max(_SMALLEST_KLD, min((m for m in medians if m > _SMALLEST_KLD), default=1e-4) / 3)
    axes.set_xlim(low, max(largest, low * 10) * 2.2)
    axes.set_ylim(min((float(curve.shares[-1]) for curve in curves), default=1e-4) / 2.0, 1.15)


def _curves_in_pixels(axes: Axes) -> list[Box]:
    boxes = []
    for line in axes.lines:
        pixels = axes.transData.transform(line.get_xydata())
        boxes += [Box(float(x) - 1.5, float(y) - 1.5, float(x) + 1.5, float(y) + 1.5) for x, y in pixels]
    return boxes
