"""One picture of an importance matrix: how strong the input of each kind of matrix is, layer by layer.

A cell is one tensor, its shade the logarithm of its mean squared input; what stands outside the blocks (the output) is named in
the subtitle. Rows are kinds of matrices, columns the layers that have any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quantkit.measure.importance import TensorImportance, mean_square_by_role
from quantkit.report.plot_style import INK, LIGHT, PAPER, Picture, drawing, finish, fitting

_ROW_PX = 24
_N_ROLES = 40
_N_TICKS = 16


def draw_importances(tensors: tuple[TensorImportance, ...], title: str, footer: str) -> Picture:
    """Draw mean squared inputs by layer and role.

    Args:
        tensors: from `describe_importances`.
        title: what is shown, such as the file's name.
        footer: where it comes from: text, chunks, hash.
    """
    table = mean_square_by_role(tensors)
    roles = sorted(table)[:_N_ROLES]
    layers = sorted({layer for role in roles for layer in table[role]})
    outside = [f"{t.name} {t.mean_square:.3g}" for t in tensors if t.layer is None and t.mean_square]
    subtitle = "mean squared input, darker is stronger" + (f"; outside the blocks: {', '.join(outside)}" if outside else "")
    with drawing(title, subtitle, footer, height_px=74 + 84 + _ROW_PX * max(2, len(roles))) as (figure, axes):
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((left + 0.11, bottom, width - 0.19, height))
        axes.grid(visible=False)
        if not roles:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "no tensor in a block has an importance", ha="center", va="center", color=INK)
            return finish(figure, f"{title}: no tensor in a block has an importance")
        values = [[math.log10(table[role][layer]) if layer in table[role] else math.nan for layer in layers] for role in roles]
        axes.set_facecolor(PAPER)
        image = axes.imshow(values, aspect="auto", cmap="cividis_r", interpolation="nearest")
        axes.set_yticks(range(len(roles)), [fitting(role, 9, 120) for role in roles])
        step = -(-len(layers) // _N_TICKS)
        axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set_xlabel("layer")
        axes.tick_params(length=0)
        for edge in axes.spines.values():
            edge.set_color(LIGHT)
        bar = figure.colorbar(image, cax=figure.add_axes((left + width - 0.055, bottom, 0.015, height)), format="%.3g")
        bar.set_label("log10 of the mean square", color=INK)
        bar.outline.set_visible(False)
        return finish(figure, _alt(title, roles, layers, table))


def _alt(title: str, roles: Sequence[str], layers: Sequence[int], table: Mapping[str, Mapping[int, float]]) -> str:
    cells = [(table[role][layer], role, layer) for role in roles for layer in table[role]]
    (least, low_role, low), (most, high_role, high) = min(cells), max(cells)
    return (f"{title}: mean squared inputs of {len(roles)} kinds of matrices in {len(layers)} layers, from {least:.3g} "
            f"({low_role}, layer {low}) to {most:.3g} ({high_role}, layer {high})")
