"""The time of a chunk over the fake engine: what is decoded, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quantkit.engine import chunk_time
from quantkit.engine.chunk_time import ChunkTime, time_chunk
from quantkit.engine.worker import WorkerState
from tests.engine import fake

TOKENS = np.arange(16, dtype=np.int32)


@pytest.mark.parametrize(("clock", "expected"), [
    ([0.0, 1.5, 2.0, 7.0, 7.0, 9.0], ChunkTime(load_s=1.5, first_s=5.0, decode_s=2.0)),
    ([0.0, 1.5, 2.0, 32.0], ChunkTime(load_s=1.5, first_s=30.0, decode_s=30.0)),  # one pass is enough
])
def test_a_second_pass_tells_unless_the_first_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Sequence[float],
                                                         expected: ChunkTime) -> None:
    fake.install(monkeypatch)
    ticks = itertools.chain(clock)
    monkeypatch.setattr(chunk_time, "read_clock", lambda: next(ticks))
    path = fake.write_model(tmp_path / "m.gguf", add_bos=True)
    assert time_chunk(WorkerState(), path=path, settings=fake.SETTINGS, offload=fake.OFFLOAD, tokens=TOKENS) == expected
    assert fake.FakeContext.inputs == [[1, *range(1, 16)]] * (len(clock) // 2 - 1)
