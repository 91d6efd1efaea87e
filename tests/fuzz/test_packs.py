"""Damaged reference packs: everything in one has a hash, so any change is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.spec.refpack_file import Refpack
from tests.fuzz.damage import damage_bytes
from tests.fuzz.laws import fuzz, generator, one_sentence
from tests.spec.test_refpack_file import write


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("sound") / "ref.safetensors").read_bytes()


@fuzz(150)
def test_no_damaged_pack_is_opened(sound: bytes, tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    data = damage_bytes(sound, generator(number))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data)
    if data == sound:
        return
    with one_sentence():
        Refpack(path).check_rows()
        pytest.fail("a damaged pack was opened")


def test_the_sound_one_is(sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "ref.safetensors").write_bytes(sound)
    Refpack(tmp_path / "ref.safetensors").check_rows()
