"""Limits for chat templates: jinja2's sandbox keeps a template from reaching anything, and not from going on without end.

Inside `limits()` a template may take 10 s of this process's CPU time and 1 GiB of memory beyond what the process has; its own text
and the one that it writes end at a bound. Main thread of a worker only: the clock is a signal.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from quantkit.core.units import GIB, MIB, format_bytes

CPU_S = 10.0
MEMORY_BYTES = GIB
MAX_TEMPLATE_CHARACTERS = MIB
MAX_TEXT_CHARACTERS = 16 * MIB


class BeyondLimits(Exception):
    """A template that took more than it may."""


class _Stop(BaseException):
    """No Exception: jinja2 takes every one of those while it folds constants for a constant that cannot be folded."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Let what runs inside end by itself, or by an error.

    Raises:
        BeyondLimits: time or memory ran out.
    """
    old = signal.signal(signal.SIGVTALRM, _stop)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory(memory)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S, CPU_S)  # again and again, should the first be lost
    try:
        yield
    except _Stop:
        raise BeyondLimits(f"it does not end within {CPU_S:g} s") from None
    except MemoryError:
        raise BeyondLimits(f"it takes more than {format_bytes(MEMORY_BYTES)} of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGVTALRM, old)


def check_template(template: str) -> None:
    """Raises BeyondLimits for a template too long to compile in bounded time, which no signal could stop."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BeyondLimits(f"it has {len(template)} characters, more than {MAX_TEMPLATE_CHARACTERS}")


def join_text(pieces: Iterable[str]) -> str:
    """The text that a template writes piece by piece.

    Raises:
        BeyondLimits: more than any prompt has.
    """
    kept, n = [], 0
    for piece in pieces:
        n += len(piece)
        if n > MAX_TEXT_CHARACTERS:
            raise BeyondLimits(f"it writes more than {MAX_TEXT_CHARACTERS} characters")
        kept.append(piece)
    return "".join(kept)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


def _limit_memory(held: tuple[int, int]) -> None:
    """Address space of what the process has and some more; where the system does not tell that, there is no limit."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (OSError, ValueError):
        return
    wanted = pages * resource.getpagesize() + MEMORY_BYTES
    bounds = [limit for limit in (wanted, *held) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), held[1]))
