"""`by_layer_types`: what each tier's plan, or whoever made a foreign file, did to each kind of tensor, as a table of types.

A row is one kind of matrix over all trunk blocks (`ffn_down`), the embedding, the output, or the whole MTP block. A cell names the
type of most of its parameters, and the next one below it where there are several. Darker is more bits. What no plan ever touches
(norms and other vectors) is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quantkit.report.plot_size import Caption
from quantkit.report.plot_style import INK, ORANGE, PAPER, Axes, Picture, drawing, finish, fitting, short_names
from quantkit.spec.blocks import kind_of
from quantkit.spec.plan_records import Plan
from quantkit.spec.source_facts import FileSource

_ROW_PX = 27
_LEFT_PX, _HEAD_PX = 118, 40
_LIGHTEST, _DARKEST = 1.5, 16.0  # bits per weight
_FIRST = ("token_embd", "output")


class TypeCell(NamedTuple):
    """One kind of tensor in one tier."""

    types: tuple[str, ...]
    bpw: float
    is_substituted: bool


class TypePart(NamedTuple):
    """Some tensors of one kind that have one type."""

    kind: str
    type: str
    n_params: int
    size_bytes: int
    is_substituted: bool


class TypeColumn(NamedTuple):
    """A tier as the picture takes it: what its plan gives each matrix, or what lies in a file that came from elsewhere."""

    tier: str
    bpw: float
    parts: tuple[TypePart, ...]

    @classmethod
    def of_plan(cls, plan: Plan) -> TypeColumn:
        """Matrices alone: what no plan ever touches is left out."""
        return cls(plan.tier, plan.bpw, tuple(TypePart(kind_of(row.name, row.role), row.type, row.n_elements, row.size_bytes,
                                                       bool(row.change))
                                              for row in plan.rows if len(row.shape) > 1 and row.quantizable))

    @classmethod
    def of_source(cls, tier: str, bpw: float, source: FileSource) -> TypeColumn:
        """The same of a file without a plan; nothing is known to be substituted in it."""
        return cls(tier, bpw, tuple(TypePart(c.kind, c.type, c.n_params, c.size_bytes, False)
                                    for c in source.kinds if c.n_params > 0))


def type_table(columns: Sequence[TypeColumn]) -> dict[str, list[TypeCell | None]]:
    """Kind of tensor to its cell in each tier; embedding and output first, the MTP block last."""
    kinds: dict[str, list[list[TypePart]]] = {}
    for i, column in enumerate(columns):
        for part in column.parts:
            kinds.setdefault(part.kind, [[] for _ in columns])[i].append(part)
    order = sorted(kinds, key=lambda kind: (kind == "MTP block", _FIRST.index(kind) if kind in _FIRST else len(_FIRST)))
    return {kind: [_cell(parts) for parts in kinds[kind]] for kind in order}


def _cell(parts: Sequence[TypePart]) -> TypeCell | None:
    if not parts:
        return None
    n_params = Counter[str]()
    for part in parts:
        n_params[part.type] += part.n_params
    bpw = 8 * sum(part.size_bytes for part in parts) / sum(part.n_params for part in parts)
    types = tuple(name for name, _ in sorted(n_params.items(), key=lambda item: (-item[1], item[0])))
    return TypeCell(types, bpw, any(part.is_substituted for part in parts))


def draw_types(columns: Sequence[TypeColumn], caption: Caption) -> Picture:
    """Draw the table of types, one column for each tier."""
    table = type_table(columns)
    height = 74 + 84 + _HEAD_PX + _ROW_PX * max(1, len(table)) - 66
    title = "Tensor types by kind of tensor and tier (darker: more bits per weight)"
    with drawing(title, caption.subtitle, caption.footer, height_px=height) as (figure, axes):
        axes.set_position((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, 800)
        axes.set_ylim(height, 0)
        width = (800 - _LEFT_PX - 16) / max(1, len(columns))
        top = 62 + _HEAD_PX
        names = short_names([column.tier for column in columns], max(6, int(width / 6.4)))
        size = min((_fit(name, 9.0, width * 0.88) for name in names), default=9.0)
        for i, (column, name) in enumerate(zip(columns, names, strict=True)):
            x = _LEFT_PX + width * (i + 0.5)
            axes.text(x, top - 24, name, ha="center", va="center", size=size, weight="bold")
            unit = " bpw" if width > 52 else ""
            axes.text(x, top - 9, f"{column.bpw:.2f}{unit}", ha="center", va="center", size=7.5)
        for j, (kind, cells) in enumerate(table.items()):
            y = top + _ROW_PX * j
            axes.text(_LEFT_PX - 8, y + _ROW_PX / 2, fitting(kind, 8.5, _LEFT_PX - 16), ha="right", va="center", size=8.5)
            for i, cell in enumerate(cells):
                if cell is not None:
                    _draw_cell(axes, cell, _LEFT_PX + width * i, y, width)
        if any(cell is not None and cell.is_substituted for cells in table.values() for cell in cells):
            axes.text(784, height - 13, "◆ not the type that was asked for", ha="right", va="center", size=7.5, color=INK)
        return finish(figure, f"Tensor types of {len(columns)} tiers by kind of tensor; every tensor's type is in the plans.")


def _draw_cell(axes: Axes, cell: TypeCell, x: float, y: float, width: float) -> None:
    import matplotlib
    from matplotlib.patches import Rectangle

    shade = math.log(min(max(cell.bpw, _LIGHTEST), _DARKEST) / _LIGHTEST) / math.log(_DARKEST / _LIGHTEST)
    colour = matplotlib.colormaps["Blues"](0.06 + 0.8 * shade)
    axes.add_patch(Rectangle((x + 1, y + 1), width - 2, _ROW_PX - 2, facecolor=colour, edgecolor="none"))
    ink = PAPER if shade > 0.85 else INK
    first, *rest = cell.types
    middle = y + _ROW_PX / 2
    axes.text(x + width / 2, middle - (5.5 if rest else 0), first, ha="center", va="center", size=_fit(first, 8.5, width),
              color=ink)
    if rest:
        second = rest[0] + (" …" if len(rest) > 1 else "")
        axes.text(x + width / 2, middle + 6.5, second, ha="center", va="center", size=_fit(second, 7.0, width), color=ink)
    if cell.is_substituted:
        axes.text(x + 3, y + 7, "◆", ha="left", va="center", size=7, color=ORANGE if ink == PAPER else "#9c5700")


def _fit(text: str, size: float, width: float) -> float:
    """The size at which a text fits a column, down from the one wished for."""
    return min(size, (width - 4) / (len(text) * 0.62) * 72 / 100)
