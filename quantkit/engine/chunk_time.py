"""How long a model takes for one chunk of a text, for an estimate before any work. Worker processes only."""

from __future__ import annotations

from pathlib import Path
from time import monotonic as read_clock
from typing import NamedTuple

from quantkit.engine.lockstep import Seat, blocks_of
from quantkit.engine.model import Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState

_ENOUGH_S = 20.0  # a first pass that took so long is not repeated


class ChunkTime(NamedTuple):
    """Seconds, as the clock on the wall tells them.

    load_s: to open the file. first_s: of the first pass, in which the weights are read from disk. decode_s: of the second pass; of
    the first one, where a second would take too long.
    """

    load_s: float
    first_s: float
    decode_s: float


def time_chunk(state: WorkerState, *, path: Path, settings: ContextSettings, offload: Offload, tokens: Tokens) -> ChunkTime:
    """Command: decode one chunk as an audit would, twice, and tell the time.

    Args:
        tokens: (n_ctx,) int32, the chunk.

    Raises:
        EngineError: the library refused the file, or a decode failed.
    """
    state.close()
    blocks = blocks_of(settings.n_ctx, min(settings.n_batch, settings.n_ctx))
    started = read_clock()
    seat = Seat(path, settings, offload, max(1, max(block.last - block.first for block in blocks)))
    try:
        load_s = read_clock() - started
        passes: list[float] = []
        while len(passes) < 2 and sum(passes) < _ENOUGH_S:
            started = read_clock()
            for block in blocks:
                seat.decode(tokens, block)
            passes.append(read_clock() - started)
    finally:
        seat.close()
    return ChunkTime(load_s=load_s, first_s=passes[0], decode_s=passes[-1])
