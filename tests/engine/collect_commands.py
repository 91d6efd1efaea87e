"""Collections that take no short cut, for workers to run."""

from __future__ import annotations

from pathlib import Path

from quantkit.engine.collect import CollectSession, GraphPass, Sums
from quantkit.engine.model import Tokens
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState


def collect_whole(state: WorkerState, *, path: Path, settings: ContextSettings, trunk: frozenset[str], mtp: frozenset[str],
                  tokens: Tokens, chunks: tuple[int, ...], may_stop: bool) -> list[dict[str, Sums]]:
    """Chunk by chunk, in one session; without `may_stop` every graph runs to its end."""
    session = CollectSession(path, settings, Offload(), trunk, mtp)
    if not may_stop:
        session._trunk_pass, session._head_pass = GraphPass(trunk, may_stop=False), GraphPass(mtp, may_stop=False)
    try:
        return [session.collect(tokens, chunk) for chunk in chunks]
    finally:
        session.close()


def stops(state: WorkerState, *, path: Path, settings: ContextSettings, trunk: frozenset[str], mtp: frozenset[str],
          tokens: Tokens) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Where trunk and head end, and the matrix that their last multiplication is by."""
    session = CollectSession(path, settings, Offload(), trunk, mtp)
    try:
        session.collect(tokens, 0)
        return ((session._trunk_pass.stop, session._trunk_pass.last), (session._head_pass.stop, session._head_pass.last))
    finally:
        session.close()
