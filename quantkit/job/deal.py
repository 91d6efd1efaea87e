"""Chunks dealt into tasks for workers that take the next one when they are free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MOST = 4  # a task's start and answer cost a chunk of a tiny model


def deal(chunks: Sequence[int], n_workers: int) -> Iterator[tuple[int, ...]]:
    """Tasks of up to four chunks, in order, and of fewer towards the end, so that no worker waits for another's whole task.

    A task takes at most half of a worker's share of what is left (guided self-scheduling, Polychronopoulos and Kuck 1987).
    """
    at = 0
    while at < len(chunks):
        n = max(1, min(_MOST, (len(chunks) - at) // (2 * n_workers)))
        yield tuple(chunks[at:at + n])
        at += n
