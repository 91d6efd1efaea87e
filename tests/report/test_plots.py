"""Pictures: the same bytes every time, no label on another, hostile names, ladders of every shape."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.report import plot_mtp, plot_size, plot_slices
from quantkit.report.plot_labels import Box, place_labels
from quantkit.report.plot_measures import MEASURES
from quantkit.report.plot_mtp import draw_mtp
from quantkit.report.plot_size import Caption, Series, SizePoint, draw_by_size
from quantkit.report.plot_slices import draw_slices
from quantkit.report.plot_style import WIDTH_PX, drawable, finish, pixel_extent, short_names
from quantkit.report.plot_tail import TailCurve, draw_tail
from quantkit.report.plot_types import TypeColumn, draw_types, type_table
from quantkit.spec.plan import Plan
from quantkit.spec.plan_records import PlanRow, tensor_size
from quantkit.spec.records import Estimate
from quantkit.spec.verdict_records import Slice, Slices
from tests.report.test_mtp_report import RESULT, TEACHER

pytestmark = pytest.mark.system

CAPTION = Caption(subtitle="Qwen3.6-27B-BF16.gguf, 50.11 GiB · wiki.test.raw", footer="quantkit · result 69363bc9a00f")
HOSTILE = ["$x^2$ & <b>", "名前 モデル", "a\nb\x1b[31m", "%s {0} \\frac{1}", "Ω-é-ñ", "\u202eevil"]


def ladder(n: int, **other: Any) -> list[SizePoint]:
    points = []
    for i in range(n):
        value = 0.001 * 2.0 ** (12 * i / max(1, n - 1))
        point = SizePoint(label=f"Q{i}_K_M", size_bytes=int((28 - 24 * i / max(1, n - 1)) * 1e9), state="front", on_front=True,
                          estimate=Estimate(value=value, se=0.05 * value, lo=0.9 * value, hi=1.1 * value), n_scored=199_665)
        points.append(dataclasses.replace(point, **other))
    return points


def is_picture(png: bytes, svg: bytes) -> bool:
    return png.startswith(b"\x89PNG") and b"<svg" in svg[:1000]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_every_kind_of_mark_is_drawn(measure: Any) -> None:
    states = ("front", "tied", "dominated", "substituted", "collapsed")
    points = tuple(p for i, state in enumerate(states) for p in ladder(5, state=state, floor=0.0005)[i:i + 1])
    estimates = [Estimate(value=1.0), Estimate(value=0.0), Estimate(value=None), Estimate(value=0.5, lo=0.4, hi=0.6)]
    odd = tuple(SizePoint(label=str(i), size_bytes=10**9, estimate=e, state="front", on_front=False, n_scored=1000)
                for i, e in enumerate(estimates))
    picture = draw_by_size(measure, [Series(name="a", points=points), Series(name="b", points=odd)], CAPTION, noise_floor=0.0004)
    assert is_picture(picture.png, picture.svg)
    assert "9 files" in picture.alt


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_tables_have_pictures_too(n: int) -> None:
    assert is_picture(*draw_by_size(MEASURES[n], [Series(name="a", points=tuple(ladder(n)))], CAPTION)[:2])
    assert is_picture(*draw_tail([TailCurve("a", np.ones(5), np.zeros(5))] * n, CAPTION)[:2])


def test_equal_input_gives_equal_bytes_in_any_locale_and_style(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 30\naxes.formatter.use_locale: True\n")
    code = ("import hashlib, locale, sys\n"
            "for name in ('de_DE.UTF-8', 'C.UTF-8', 'C'):\n"
            "    try:\n        locale.setlocale(locale.LC_ALL, name)\n        break\n    except locale.Error:\n        pass\n"
            "from tests.report.test_plots import CAPTION, MEASURES, Series, draw_by_size, ladder\n"
            "p = draw_by_size(MEASURES[0], [Series(name='a', points=tuple(ladder(7)))], CAPTION)\n"
            "print(hashlib.sha256(p.png).hexdigest(), hashlib.sha256(p.svg).hexdigest())\n")
    root = Path(__file__).parents[2]
    seen = set()
    odd = {"LC_ALL": "C.UTF-8", "MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"}
    for extra in ({"LC_ALL": "C", "MPLBACKEND": "Agg"}, odd):
        env = {**os.environ, **extra, "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1


def test_hostile_names_are_drawn_as_text() -> None:
    points = tuple(SizePoint(label=name, size_bytes=(i + 1) * 10**9, estimate=Estimate(value=0.1), state="front", on_front=True,
                             n_scored=9) for i, name in enumerate(HOSTILE))
    caption = Caption(subtitle=" ".join(HOSTILE) * 9, footer=HOSTILE[2])
    picture = draw_by_size(MEASURES[0], [Series(name=HOSTILE[1], points=points), Series(name="$", points=points[:1])], caption)
    assert b"<script" not in picture.svg
    assert drawable("名a\x1b\u202e") == "□a"


def test_labels_lose_what_they_share_and_keep_their_ends() -> None:
    assert short_names(["Qwen3.6-27B-Q4_K_M", "Qwen3.6-27B-Q8_0"]) == ["Q4_K_M", "Q8_0"]
    assert short_names(["Q4_K_M", "Q4_K_S"]) == ["Q4_K_M", "Q4_K_S"]
    assert short_names(["Q8_0"]) == ["Q8_0"]
    long = "a-name-of-forty-characters-" + "x" * 10 + "-v2"
    assert len(long) == 40
    assert short_names([long, "Q8_0"], 20) == ["a-name-of-f…xxxxx-v2", "Q8_0"]
    assert short_names(["same-name-", "same-name-"]) == ["same-name-", "same-name-"]


def overlap_area(a: Box, b: Box) -> float:
    width, height = min(a.right, b.right) - max(a.left, b.left), min(a.top, b.top) - max(a.bottom, b.bottom)
    return max(0.0, width) * max(0.0, height)


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_fifteen_labels_along_a_ladder_overlap_nothing(seed: int) -> None:
    rng = random.Random(seed)
    points = [(80 + 40 * i + rng.uniform(-12, 12), 60 + 300 * math.exp(-i / 4) + rng.uniform(-8, 8)) for i in range(15)]
    sizes = [(rng.uniform(30, 60), 11.0)] * 14 + [(190.0, 11.0)]
    marks = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    bounds = Box(62, 40, 794, 420)
    boxes = [place.box for place in place_labels(points, sizes, marks, bounds)]
    assert all(overlap_area(a, b) == 0 for a, b in itertools.combinations(boxes, 2))
    assert all(overlap_area(box, mark) == 0 for box in boxes for mark in marks)
    assert all(bounds.left <= box.left and box.right <= bounds.right for box in boxes)


def test_tail_and_slices_with_three_and_fifteen_tiers() -> None:
    shares = np.geomspace(1, 0.001, 20)
    for n in (3, 15):
        curves = [TailCurve(f"Q{i}", shares, 0.001 * (i + 1) / shares) for i in range(n)]
        assert is_picture(*draw_tail(curves, CAPTION)[:2])
        tiers = [Slices(tier=f"Q{i}", rows_sha256="", slices=(_slice("entropy", 0.1), _slice("token", None))) for i in range(n)]
        assert is_picture(*draw_slices(tiers, CAPTION)[:2])


def _slice(kind: str, value: float | None) -> Slice:
    kld = None if value is None else Estimate(value=value, lo=0.9 * value, hi=1.1 * value)
    return Slice(kind=kind, name="a part of the tokens", lo=None, hi=None, n_scored=10, n_article=2, share=0.5, kld_share=0.5,
                 flip_share=None, kld=kld, same_top_p=None)


def row(name: str, type_name: str, role: Any = "trunk", change: Any = "", n: int = 256) -> PlanRow:
    return PlanRow(name=name, shape=(256, n), role=role, source_type="BF16", type=type_name, rule="default", wanted="Q4_K",
                   change=change, quantizable=True, size_bytes=tensor_size((256, n), type_name))


def test_types_by_kind_say_what_the_plan_did() -> None:
    plan = Plan(tier="Q4_K_M", ftype="Q4_K_M", rows=(
        row("blk.0.ffn_down.weight", "Q6_K"), row("blk.1.ffn_down.weight", "Q4_K", n=512), row("output.weight", "Q6_K", "output"),
        row("blk.2.ffn_down.weight", "Q8_0", "mtp"), row("blk.0.attn_q.weight", "Q5_0", change="substituted")))
    column = TypeColumn.of_plan(plan)
    table = type_table([column])
    assert list(table) == ["output", "ffn_down", "attn_q", "MTP block"]
    ffn = table["ffn_down"][0]
    assert ffn is not None
    assert ffn.types == ("Q4_K", "Q6_K")
    assert ffn.bpw == pytest.approx((4.5 * 512 + 6.5625 * 256) / 768)
    assert [cell.is_substituted for (cell,) in table.values() if cell] == [False, False, True, False]
    other = Plan(tier="x" * 40, ftype="Q8_0", rows=(row("token_embd.weight", "Q8_0", "embedding"),))
    columns = [column, TypeColumn.of_plan(other)]
    assert next(iter(type_table(columns))) == "token_embd"
    assert is_picture(*draw_types(columns * 8, CAPTION)[:2])


def test_heads_are_drawn_where_they_were_measured() -> None:
    near = dataclasses.replace(RESULT, tier="x" * 40)
    missing = dataclasses.replace(RESULT, teacher_forced_acceptance=None)
    picture = draw_mtp([RESULT, near, missing] * 5, CAPTION)
    assert picture is not None
    assert is_picture(picture.png, picture.svg)
    assert "10 tiers" in picture.alt
    assert draw_mtp([missing], CAPTION) is None


LONG = "Qwen3.6-27B-Instruct-UD-IQ2_XXS-imatrix2"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, before they become pictures."""
    seen: list[Any] = []

    def keep(figure: Any, alt: str) -> Any:
        seen.append(figure)
        return finish(figure, alt)

    for module in (plot_slices, plot_mtp, plot_size):
        monkeypatch.setattr(module, "finish", keep)
    return seen


@pytest.mark.parametrize("n", [3, 7, 15])
def test_the_legend_of_slices_fits_and_has_the_order_of_the_lines(figures: list[Any], n: int) -> None:
    names = [LONG if i == 1 else "W" * 40 if i == 2 else f"Q{i}" for i in range(n)]
    tiers = [Slices(tier=name, rows_sha256="", slices=(_slice("entropy", 0.001 * 2**i), _slice("token", 0.001))) for i, name
             in enumerate(names)]
    draw_slices(tiers, CAPTION)
    (figure,) = figures
    (legend,) = figure.legends
    _, bottom, right, _ = pixel_extent(figure, legend)
    assert (right < WIDTH_PX, bottom > 0) == (True, True)
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[0] == ("WWW…WWW" if n == 3 else f"Q{n - 1}")
    assert shown[-1] == "Q0"
    looks = {(line.get_marker(), repr(line._dash_pattern)) for line in figure.axes[0].lines}
    assert len(looks) == n  # told apart without their colours


@pytest.mark.parametrize("n", [1, 3, 7, 15])
def test_nothing_covers_the_marks_or_names_of_heads(figures: list[Any], n: int) -> None:
    low = dataclasses.replace(TEACHER, value=0.01, lo=0.0, hi=0.02)
    results = [dataclasses.replace(RESULT, tier=LONG if i == 1 else f"Q{i}_K_M",
                                   teacher_forced_acceptance=low if i == 0 else TEACHER) for i in range(n)]
    draw_mtp(results, CAPTION)
    (figure,) = figures
    (axes,) = figure.axes
    legend = Box(*pixel_extent(figure, axes.get_legend()))
    assert legend.right <= WIDTH_PX
    assert legend.bottom >= pixel_extent(figure, axes.patch)[3] - 1
    names = [Box(*pixel_extent(figure, label)) for label in axes.get_xticklabels()]
    assert min(box.left for box in names) >= 0
    assert min(box.bottom for box in names) > 18  # above the footer
    if n <= 8:
        assert all(a.right < b.left for a, b in itertools.pairwise(names))


@pytest.mark.parametrize(("floor", "shown"), [
    (None, []), (0.0005, ["noise floor: the base in other arithmetic", "the same of each file"]),
    (1e-9, ["noise floors lie below the picture"]),
])
def test_the_legend_has_the_floors_that_are_drawn(figures: list[Any], floor: float | None, shown: list[str]) -> None:
    draw_by_size(MEASURES[0], [Series(name="a", points=tuple(ladder(5, floor=floor)))], CAPTION, noise_floor=floor)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()][1:] == shown


def test_obstacles_out_of_reach_move_no_label() -> None:
    points, sizes, bounds = [(100.0, 100.0), (130.0, 105.0)], [(60.0, 12.0)] * 2, Box(0, 0, 5000, 5000)
    near = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    far = [Box(2000 + 10 * i, 2000, 2005 + 10 * i, 2010) for i in range(50)]
    assert place_labels(points, sizes, near + far, bounds) == place_labels(points, sizes, near, bounds)
