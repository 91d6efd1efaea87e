"""How every picture looks, and how it becomes the same bytes every time.

800 px wide on a card, drawn at twice that. Colours are Okabe and Ito's, told apart by colour-blind readers, and each kind of mark
has a shape of its own, so that grey print tells them apart too. No user's matplotlibrc, locale, font or date has a part in it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from quantkit.report.escape import plain_line

# matplotlib.axes.Axes, .figure.Figure, .lines.Line2D and .text.Text: loaded in the functions that draw, never on import.
Axes: TypeAlias = Any
Figure: TypeAlias = Any
Line: TypeAlias = Any
Text: TypeAlias = Any

WIDTH_PX, HEIGHT_PX, CSS_DPI = 800, 500, 100

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9"
INK, GREY, LIGHT, PAPER = "#1a1a1a", "#666666", "#d9d9d9", "#ffffff"
#: One colour for each series of a comparison; the order goes from dark to light for grey readers.
SERIES_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "text.parse_math": False, "text.color": INK, "axes.edgecolor": GREY,
    "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.formatter.use_locale": False, "axes.unicode_minus": True, "axes.grid": True, "grid.color": LIGHT, "grid.linewidth": 0.6,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "axes.labelsize": 9.5, "legend.frameon": True, "legend.edgecolor": PAPER, "legend.framealpha": 0.85,
    "legend.fontsize": 8.5, "figure.facecolor": PAPER,
    "axes.facecolor": PAPER, "savefig.facecolor": PAPER, "svg.hashsalt": "quantkit", "svg.fonttype": "path", "figure.dpi": CSS_DPI,
    "lines.solid_capstyle": "round", "hatch.linewidth": 0.5, "path.simplify": True,
}


class Picture(NamedTuple):
    """One picture in both forms, and what it shows in words."""

    png: bytes
    svg: bytes
    alt: str


@contextmanager
def drawing(title: str, subtitle: str, footer: str, *, height_px: int = HEIGHT_PX) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one set of axes between its title and its footer, in our style and no other."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH_PX / CSS_DPI, height_px / CSS_DPI))
        axes = figure.add_axes((76 / WIDTH_PX, 74 / height_px, (WIDTH_PX - 76 - 24) / WIDTH_PX, (height_px - 74 - 84) / height_px))
        for text, up_px, size, colour, weight in ((title, 22, 12.5, INK, "bold"), (subtitle, 44, 9, GREY, "normal")):
            figure.text(16 / WIDTH_PX, 1 - up_px / height_px, fitting(text, size), size=size, color=colour, weight=weight,
                        va="center")
        figure.text(16 / WIDTH_PX, 13 / height_px, fitting(footer, 7.5), size=7.5, color=GREY, va="center")
        yield figure, axes


def line_look(i: int, n: int) -> dict[str, Any]:
    """Colour and dashes of the i-th of n lines: cividis without its palest end, dark to pale in grey print too."""
    import matplotlib
    from matplotlib.colors import to_hex

    shade = 0.0 if n < 2 else 0.78 * i / (n - 1)
    return {"color": to_hex(matplotlib.colormaps["cividis"](shade)), "linestyle": _DASHES[i % len(_DASHES)]}


def name_axis(figure: Figure, axes: Axes, text: str, *, above_px: int = 10) -> None:
    """What the vertical axis shows, written level above it: easier to read than on its side."""
    figure.text(16 / WIDTH_PX, axes.get_position().y1 + above_px / (figure.get_figheight() * CSS_DPI), text, size=9.5, color=INK)


def pixel_extent(figure: Figure, artist: Any) -> tuple[float, float, float, float]:
    """Left, bottom, right and top of something drawn, in pixels of the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    extent = artist.get_window_extent(canvas.get_renderer())
    return float(extent.x0), float(extent.y0), float(extent.x1), float(extent.y1)


def finish(figure: Figure, alt: str) -> Picture:
    """The figure as PNG at twice its size, and as SVG with its text as outlines."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=2 * CSS_DPI)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Picture(png.getvalue(), svg.getvalue(), alt)


def fitting(text: str, size: float, width_px: int = WIDTH_PX - 32) -> str:
    """One line that the font can draw and the picture can hold; what is too long loses its end."""
    line = drawable(text)
    n_max = int(width_px / (size * CSS_DPI / 72 * 0.56))
    return line if len(line) <= n_max else line[: n_max - 1] + "…"


def drawable(text: str) -> str:
    """One line of what the font has glyphs for; others become □."""
    from matplotlib import font_manager

    has = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_char_index
    return "".join(c if has(ord(c)) else "□" for c in plain_line(text))


def short_names(names: list[str], n_max: int = 26) -> list[str]:
    """Names as labels: without what they all begin with, and without their middle where they are still too long."""
    prefix = _common_prefix(names)
    return [_without_middle(drawable(name[len(prefix):]), n_max) for name in names]


def _common_prefix(names: list[str]) -> str:
    """What all names begin with, up to a separator; nothing where that would leave one of them empty or one is alone."""
    if len(set(names)) < 2:
        return ""
    first, last = min(names), max(names)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    cut = max(first[:n].rfind(c) for c in "-._ ") + 1
    return first[:cut] if cut >= 6 and all(len(name) > cut for name in names) else ""


def _without_middle(name: str, n_max: int) -> str:
    if len(name) <= n_max:
        return name
    head = (n_max - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (n_max - 1 - head):]}"
