"""Damaged rows.parquet: the decoder may say what it likes, die or unpack without end; this process gets rows or one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from quantkit.job.parts import read_parquet, write_parquet
from quantkit.spec.records import ROW_DTYPE
from tests.fuzz.damage import damage_bytes, flip_bits
from tests.fuzz.laws import fuzz, generator, one_sentence
from tests.measure.synthetic import make_rows

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A canonical file, and one as another writer would make it: pages of its own, a dictionary, snappy."""
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("sound")
    write_parquet(folder / "rows.parquet", make_rows(n_article=2, n_chunk=1), {"audit_id": "0" * 64})
    pq.write_table(pq.read_table(folder / "rows.parquet"), folder / "other.parquet", compression="snappy", use_dictionary=True)
    return [(folder / name).read_bytes() for name in ("rows.parquet", "other.parquet")]


def damage_parquet(data: bytes, rng: random.Random) -> bytes:
    """Mostly the footer, which says how to read the rest."""
    footer = int.from_bytes(data[-8:-4], "little") + 8
    if rng.random() < 0.6:
        return flip_bits(data, rng, len(data) - footer, len(data), rng.choice((1, 2, 8)))
    return damage_bytes(data, rng)


@fuzz(40)
def test_damaged_rows_are_rows_or_a_sentence(sound: list[bytes], tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    rng = generator(number)
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    path.write_bytes(damage_parquet(rng.choice(sound), rng))
    with one_sentence():
        rows, metadata = read_parquet(path)
        assert rows.dtype == ROW_DTYPE
        assert isinstance(rows, np.ndarray)
        assert all(isinstance(text, str) for pair in metadata.items() for text in pair)


def test_sound_rows_of_any_writer_are_read(sound: list[bytes], tmp_path: Path) -> None:
    for data in sound:
        (tmp_path / "rows.parquet").write_bytes(data)
        np.testing.assert_array_equal(read_parquet(tmp_path / "rows.parquet")[0], make_rows(n_article=2, n_chunk=1))
