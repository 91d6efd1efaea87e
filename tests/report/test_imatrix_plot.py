from __future__ import annotations

import numpy as np
import pytest

from quantkit.measure.importance import TensorImportance, describe_importances
from quantkit.report.imatrix_plot import draw_importances
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry

pytestmark = pytest.mark.system


def tensors(*names: str) -> tuple[TensorImportance, ...]:
    entries = {name: ImatrixEntry(in_sum2=np.full((1, 4), 100 * (i + 1), np.float32), counts=np.array([100], np.float32))
               for i, name in enumerate(names)}
    return describe_importances(Imatrix(entries=entries, datasets=(), chunk_count=1, chunk_size=512, legacy=False))


def test_equal_matrices_give_equal_bytes_and_words() -> None:
    names = ("blk.0.attn_q.weight", "blk.2.attn_q.weight", "blk.2.ffn_up.weight", "output.weight")
    first, second = (draw_importances(tensors(*names), "Importances in x.gguf", "calibration.txt") for _ in range(2))
    assert first == second
    assert first.png.startswith(b"\x89PNG")
    assert first.alt == ("Importances in x.gguf: mean squared inputs of 2 kinds of matrices in 2 layers, from 1 (attn_q, layer 0) "
                         "to 3 (ffn_up, layer 2)")


def test_nothing_to_draw_is_said() -> None:
    assert draw_importances(tensors("output.weight"), "t", "f").alt == "t: no tensor in a block has an importance"
    assert draw_importances((), "t", "f").png.startswith(b"\x89PNG")


def test_names_of_strangers_and_numbers_without_end_are_drawn() -> None:
    names = ["blk.4294967295.$x^2$.weight", "blk.0.\x1b[31m\u202e.weight", *(f"blk.{i}.role{i % 60}.weight" for i in range(300))]
    picture = draw_importances(tensors(*names), "a\nb", "名前")
    assert picture.png.startswith(b"\x89PNG")
