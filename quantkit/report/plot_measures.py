"""The three numbers that are drawn against file size, each with an axis on which small and large losses are both seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.report.plot_size import Measure
from quantkit.report.plot_style import Axes

_SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999)
_DRIFT_LINEAR = 0.001  # ± 0.1 % is linear, above it the axis is logarithmic


def _kld_to_axis(value: float, n_scored: int) -> float | None:
    return value if value > 0 else None


def _scale_kld(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    if not values:
        return
    low, high = axes.get_ylim()
    if high / low < 30:  # a decade alone would have one labelled tick
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.10f}".rstrip("0").rstrip(".") if y >= 1e-5 else f"{y:.0e}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)


def _share_to_axis(value: float, n_scored: int) -> float | None:
    """−log10 of the share that flips; of N tokens without a flip, of 3/N."""
    return -math.log10(max(1 - value, 3 / n_scored if value >= 1 else 0.0))


def _scale_share(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    if not values:
        return
    axes.margins(y=0.14)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    low = max(low, -0.02)
    shown = [share for share in _SHARES if low <= -math.log10(1 - share) <= high]
    axes.yaxis.set_major_locator(FixedLocator([-math.log10(1 - share) for share in shown]))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{100 * share:.5g} %" for share in shown]))
    axes.set_ylim(low, high)


def _drift_to_axis(value: float, n_scored: int) -> float | None:
    """Linear within ± 0.1 %, then the logarithm, joined smoothly."""
    return math.asinh(value / _DRIFT_LINEAR)


def _scale_drift(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.margins(y=0.12)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    low, high = min(low, -0.8), max(high, 0.8)
    steps = [sign * step * 10.0**power for sign in (-1, 1) for power in range(-4, 4) for step in (1, 3)]
    shown = [v for v in (*sorted(steps), 0.0) if low <= math.asinh(v / _DRIFT_LINEAR) <= high and (v == 0 or abs(v) >= 0.001)]
    if high - low > 9:
        shown = [v for v in shown if not f"{abs(v):e}".startswith("3")]
    axes.yaxis.set_major_locator(FixedLocator([math.asinh(v / _DRIFT_LINEAR) for v in shown]))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{100 * v:+.5g} %".replace("-", "−") if v else "base" for v in shown]))
    axes.axhline(0, color="#666666", linewidth=0.9, zorder=1)
    axes.set_ylim(low, high)


MEASURES = (
    Measure("kld_vs_size", "Mean KLD by file size: lower keeps more", "Mean KLD from the base, nats per token (log scale)",
            _kld_to_axis, _scale_kld, "Mean KLD against file size", "upper right"),
    Measure("same_top_p_vs_size", "Same top token by file size: higher keeps more",
            "Same most likely token as the base (log scale)", _share_to_axis, _scale_share,
            "Share of tokens with the same most likely successor against file size", "lower right"),
    Measure("ppl_vs_size", "Change of perplexity by file size: nearer to the base keeps more",
            "Change of perplexity (log scale beyond ±0.1 %)", _drift_to_axis, _scale_drift,
            "Change of perplexity against file size", "upper right"),
)
