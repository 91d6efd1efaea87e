"""Damaged importance matrices of both formats: numbers that are safe to hand over, or a sentence."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from quantkit.core.errors import ImatrixError
from quantkit.job.foreign import read_imatrix as read_foreign
from quantkit.measure.importance import describe_importances
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, floored, read_imatrix, write_imatrix
from tests.fuzz.damage import damage_bytes, damage_gguf
from tests.fuzz.laws import fuzz, generator, one_sentence


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    values = np.arange(1, 33, dtype=np.float32)
    entries = {"blk.0.ffn_down.weight": ImatrixEntry(in_sum2=values[None], counts=np.full(1, 4, np.float32)),
               "blk.0.ffn_up_exps.weight": ImatrixEntry(in_sum2=values.reshape(4, 8), counts=np.arange(4, dtype=np.float32))}
    write_imatrix(path, Imatrix(entries=entries, datasets=("text",), chunk_count=3, chunk_size=512, legacy=False))
    return [path.read_bytes(), legacy()]


def legacy() -> bytes:
    out = struct.pack("<i", 2)
    for name in (b"blk.0.ffn_down.weight", b"blk.0.ffn_up.weight"):
        out += struct.pack("<i", len(name)) + name + struct.pack("<ii8f", 3, 8, *range(1, 9))
    return out + struct.pack("<ii", 3, 4) + b"text"


@fuzz(80)
def test_a_damaged_matrix_is_sound_or_refused(sources: list[bytes], tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    rng = generator(number)
    data = rng.choice(sources)
    path = tmp_path_factory.getbasetemp() / "damaged.imatrix"
    path.write_bytes(damage_gguf(data, rng).data if data[:4] == b"GGUF" and rng.random() < 0.7 else damage_bytes(data, rng))
    with one_sentence(), np.errstate(all="raise", over="ignore", invalid="ignore", under="ignore", divide="raise"):
        matrix = read_imatrix(path)
        describe_importances(matrix)
        for entry in matrix.entries.values():
            if np.isfinite(entry.in_sum2).all():
                assert (floored(entry, 1e-3).values > 0).all()


@fuzz(10)
@pytest.mark.system
def test_the_child_says_what_the_reader_says(sources: list[bytes], tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.imatrix"
    path.write_bytes(damage_bytes(sources[number % 2], generator(number)))
    answers = []
    for read in (read_imatrix, read_foreign):
        try:
            answers.append(sorted(read(path).entries))
        except ImatrixError as error:
            answers.append([str(error)])
    assert answers[0] == answers[1]
