"""Whole numbers as few bits: the coding of a reference pack's token ids and weights. Arrays in, bytes out, and back.

A stream of n numbers v >= 0 is split as floating point is: the class k of each is its bit length (0 for 0), and below its leading
one it has k − 1 bits.

    u32 little-endian     length of the next part
    classes               n bytes, one class each, in raw DEFLATE with Huffman codes only
    bits                  for k = 2, 3, … the k − 1 low bits of every number of that class, in order, filled up to a byte

The low bits of gaps and of weights are noise, which no coder makes smaller; the classes are skewed, which is what Huffman codes
are for. It takes about 0.15 bit a number more than the entropy, and any language's zlib reads it.

Token ids, rising within a row, are coded as differences, the first one from −1.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError

Numbers = npt.NDArray[np.uint32]
Ids = npt.NDArray[np.int32]

_SLICE = 1 << 17  # numbers; a multiple of 8, so that every slice ends on a byte
_WIDEST = 32


class Decoded(NamedTuple):
    """Numbers of a stream, and where it ended."""

    numbers: Numbers
    stop: int


def encode_numbers(numbers: Numbers) -> bytes:
    """The stream of some numbers below 2^32; equal numbers give equal bytes with one version of zlib."""
    classes = np.frexp(numbers.astype(np.float64))[1].astype(np.uint8)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    head = coder.compress(classes.tobytes()) + coder.flush()
    parts = [len(head).to_bytes(4, "little"), head]
    for width in range(1, _WIDEST):
        own = numbers[classes == width + 1]
        parts += [_pack(own[i:i + _SLICE], width) for i in range(0, len(own), _SLICE)]
    return b"".join(parts)


def decode_numbers(data: bytes, start: int, n: int) -> Decoded:
    """The n numbers of the stream that begins at `start`.

    Raises:
        InputError: the bytes are no stream of n numbers.
    """
    first = start + 4
    stop = first + int.from_bytes(data[start:first], "little")
    coder = zlib.decompressobj(-15)
    try:
        raw = coder.decompress(data[first:stop], n + 1)
    except zlib.error as error:
        raise _odd(f"bytes that zlib cannot read ({error})") from error
    classes = np.frombuffer(raw, np.uint8)
    if len(classes) != n or stop > len(data) or (n and int(classes.max()) > _WIDEST):
        raise _odd(f"{len(classes)} of them or a class beyond {_WIDEST}")
    numbers = (classes > 0).astype(np.uint32)
    for width in range(1, _WIDEST):
        places = np.flatnonzero(classes == width + 1)
        for i in range(0, len(places), _SLICE):
            own = places[i:i + _SLICE]
            size = -(-len(own) * width // 8)
            if stop + size > len(data):
                raise _odd("an early end")
            numbers[own] = _unpack(data[stop:stop + size], len(own), width)
            stop += size
    return Decoded(numbers, stop)


def id_gaps(ids: Ids) -> Numbers:
    """Differences of the rising ids of one row, the first from −1: all at least 1."""
    return np.diff(ids, prepend=np.int32(-1)).astype(np.uint32)


def ids_of_gaps(gaps: Numbers, n_head: npt.NDArray[np.int64], n_vocab: int) -> Ids:
    """The ids of some rows from their gaps, one row behind the other.

    Args:
        n_head: (n_row,) how many gaps each row has, at least 1.

    Raises:
        InputError: ids that do not rise, or reach beyond the vocabulary.
    """
    reached = np.cumsum(gaps.astype(np.int64))
    starts = np.cumsum(n_head) - n_head
    before = reached[starts] - gaps[starts].astype(np.int64)
    ids = (reached - np.repeat(before, n_head) - 1).astype(np.int64)
    if len(ids) and (int(gaps.min()) < 1 or int(ids.max()) >= n_vocab):
        raise _odd(f"token ids that do not rise or reach beyond {n_vocab - 1}")
    return np.asarray(ids, np.int32)


def _pack(numbers: Numbers, width: int) -> bytes:
    """The low bits of some numbers, most significant first."""
    bits = np.unpackbits(numbers.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)
    return np.packbits(bits[:, _WIDEST - width:]).tobytes()


def _unpack(data: bytes, n: int, width: int) -> Numbers:
    """Numbers from their low bits, with the leading one put back."""
    bits = np.zeros((n, _WIDEST), np.uint8)
    bits[:, _WIDEST - width:] = np.unpackbits(np.frombuffer(data, np.uint8), count=n * width).reshape(n, width)
    bits[:, _WIDEST - width - 1] = 1
    return np.packbits(bits, axis=1).view(">u4").reshape(n).astype(np.uint32)


def _odd(found: str) -> InputError:
    return InputError(f"expected the coded numbers of a reference pack, found {found}: fetch the pack again, or make it anew")
