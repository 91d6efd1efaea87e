"""What a model and a context are opened with, by what reaches the library; tokens and rows, on a real one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError, InputError
from quantkit.engine import model as module
from quantkit.engine.model import Context, Model
from quantkit.engine.settings import Offload
from tests.engine.commands import SETTINGS
from tests.gguf_factory import tiny_gguf, tiny_model


class FakeLibrary:
    """Keeps the parameters that it was called with; two devices."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_max_devices(self) -> int:
        return 2

    def llama_model_load_from_file(self, path: bytes, params: SimpleNamespace) -> None:
        self.loaded = params


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary()
    monkeypatch.setattr(module, "load_library", lambda: library)
    return library


def test_offload_reaches_the_library(fake: FakeLibrary, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {"a": ((32,), "F32")})[0]
    with pytest.raises(EngineError, match=r"cannot load .*m\.gguf"):
        Model(path, offload=Offload(n_gpu_layers=33, main_gpu=1, tensor_split=(3.0, 1.0)), use_extra_bufts=False)
    assert (fake.loaded.n_gpu_layers, fake.loaded.main_gpu, list(fake.loaded.tensor_split)) == (33, 1, [3.0, 1.0])
    assert fake.loaded.use_extra_bufts is False
    assert fake.loaded.load_mtp is False


def test_more_shares_than_devices_are_refused(fake: FakeLibrary) -> None:
    with pytest.raises(InputError, match=r"at most 2 shares in tensor_split .*, got 3"):
        Model(Path("m.gguf"), offload=Offload(tensor_split=(1.0, 1.0, 1.0)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("with a space") / "mödel.gguf", add_bos=True)[0]


@pytest.mark.engine
def test_special_tokens_in_the_text_stay_text(path: Path) -> None:
    real = Model(path, vocab_only=True)
    assert real.add_bos
    ids = real.tokenize(b"<s>a")
    assert ids[0] == real.bos
    assert real.bos not in ids[1:]
    assert real.token_ends(ids)[-1] == len(b"<s>a")
    real.close()


@pytest.mark.engine
def test_a_text_that_is_not_utf8_is_refused(path: Path) -> None:
    real = Model(path, vocab_only=True)
    with pytest.raises(InputError, match="found byte 0xff at offset 2"):
        real.tokenize(b"ab\xff")
    real.close()


@pytest.mark.engine
def test_only_flagged_rows_come_back_and_they_are_those_of_their_positions(path: Path) -> None:
    real = Model(path)
    tokens = np.arange(5, 45, dtype=np.int32)
    whole = Context(real, SETTINGS, n_outputs_max=40)
    expected = whole.decode(tokens, 0, slice(0, 40)).copy()
    part = Context(real, SETTINGS, n_outputs_max=20)
    actual = part.decode(tokens, 0, slice(20, 40))
    assert actual.shape == (20, real.n_vocab)
    assert np.array_equal(actual, expected[20:])
    for context in (whole, part):
        context.close()
    real.close()


@pytest.mark.engine
def test_a_chunk_after_clear_is_as_if_alone_and_without_it_is_not(path: Path) -> None:
    real = Model(path)
    tokens = np.arange(5, 25, dtype=np.int32)
    context = Context(real, SETTINGS, n_outputs_max=20)
    alone = context.decode(tokens, 0, slice(10, 20)).copy()
    context.clear()
    assert np.array_equal(context.decode(tokens, 0, slice(10, 20)), alone)
    assert not np.array_equal(context.decode(tokens, 20, slice(10, 20)), alone)
    context.close()
    real.close()


@pytest.mark.engine
def test_blocks_of_64_give_the_bits_of_the_whole_chunk(path: Path) -> None:
    real = Model(path)
    tokens = np.arange(5, 133, dtype=np.int32)
    settings = dataclasses.replace(SETTINGS, n_ctx=128, n_batch=128, n_ubatch=128)
    whole = Context(real, settings, n_outputs_max=64)
    blocked = Context(real, dataclasses.replace(settings, n_batch=64, n_ubatch=64), n_outputs_max=64)
    expected = whole.decode(tokens, 0, slice(64, 127)).copy()
    blocked.decode(tokens[:64], 0, slice(0, 0))
    assert np.array_equal(blocked.decode(tokens[64:], 64, slice(0, 63)), expected)
    for context in (whole, blocked):
        context.close()
    real.close()


@pytest.mark.engine
def test_a_file_that_the_library_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    tiny_gguf(broken, {"a": ((32,), "F32")})
    with pytest.raises(EngineError, match=r"cannot load .*broken\.gguf: .+"):
        Model(broken)
