"""Damage to files, drawn from a generator: bytes that change, and fields that lie.

    cut       the file ends early, at any byte
    flip      a few bits of the header change
    field     a length, count, type, dimension or offset says something else: an extreme, a neighbour, another field's value
    splice    a piece is removed, doubled, zeroed, or moved
    value     a metadata value of a model becomes another of its type
    data      bytes of tensor data change, and the header is as it was

The same generator state gives the same damage.
"""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's number types
_STRING, _ARRAY = 8, 9
_EXTREMES = (0, 1, 2, 7, 8, 31, 32, 33, 63, 64, 127, 128, 255, 256, 511, 512, 4095, 4096, 1 << 15, 1 << 16, 1 << 20, (1 << 31) - 1,
             1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)


class Field(NamedTuple):
    """A number of a header: where it lies, how wide it is, and whether it is a value rather than part of the form."""

    at: int
    width: int
    is_value: bool


class Damage(NamedTuple):
    """A damaged file, and how it was damaged."""

    kind: str
    data: bytes


class Map(NamedTuple):
    """What a sound GGUF holds where: its numbers, and where its tensor data begin and end."""

    fields: tuple[Field, ...]
    data_start: int
    data_stop: int


def map_gguf(data: bytes) -> Map:
    """Walk a little-endian GGUF that is sound."""
    fields = [Field(4, 4, False), Field(8, 8, False), Field(16, 8, False)]
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at = 24

    def number(width: int, *, is_value: bool = False) -> int:
        nonlocal at
        fields.append(Field(at, width, is_value))
        at += width
        return int.from_bytes(data[at - width:at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        at += length

    def value(kind: int) -> None:
        if kind == _STRING:
            text()
        else:
            number(_WIDTHS[kind], is_value=True)

    for _ in range(n_keys):
        text()
        kind = number(4)
        if kind == _ARRAY:
            element, n = number(4), number(8)
            for _ in range(n):
                value(element)
        else:
            value(kind)
    ends = [0]
    for _ in range(n_tensors):
        text()
        n_elements = 1
        for _ in range(number(4)):
            n_elements *= number(8)
        number(4)
        ends.append(number(8))
    start = at + -at % 32
    return Map(tuple(fields), start, len(data))


def damage_gguf(data: bytes, rng: random.Random, kind: str = "") -> Damage:
    """Damage a sound GGUF.

    Args:
        kind: which kind; drawn if none is given.
    """
    kind = kind or rng.choice(("cut", "flip", "field", "field", "field", "value", "value", "splice", "data", "data"))
    where = map_gguf(data)
    if kind == "field":
        return Damage(kind, _lie(data, rng, [f for f in where.fields if not f.is_value]))
    if kind == "value":
        return Damage(kind, _lie(data, rng, [f for f in where.fields if f.is_value]))
    if kind == "data":
        return Damage(kind, flip_bits(data, rng, where.data_start, where.data_stop, rng.choice((1, 1, 4, 64))))
    if kind == "flip":
        return Damage(kind, flip_bits(data, rng, 0, where.data_start, rng.choice((1, 2, 8))))
    return Damage(kind, cut(data, rng) if kind == "cut" else splice(data, rng))


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Damage to any file, blind to what it means."""
    kind = rng.randrange(3)
    if kind == 0:
        return cut(data, rng)
    if kind == 1:
        return splice(data, rng)
    return flip_bits(data, rng, 0, len(data), rng.choice((1, 1, 2, 8)))


def cut(data: bytes, rng: random.Random) -> bytes:
    """The file ends early."""
    return data[:rng.choice((rng.randrange(len(data)), len(data) - 1 - rng.randrange(min(64, len(data)))))]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A piece is removed, doubled, zeroed, filled or moved."""
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 4, 8, 32, 1000)))
    piece, other = data[start:stop], rng.randrange(len(data))
    return rng.choice((data[:start] + data[stop:], data[:stop] + piece + data[stop:],
                       data[:start] + bytes(len(piece)) + data[stop:], data[:start] + b"\xff" * len(piece) + data[stop:],
                       data[:other] + piece + data[other + len(piece):]))


def flip_bits(data: bytes, rng: random.Random, start: int, stop: int, n: int) -> bytes:
    """n bits between two bytes change."""
    out = bytearray(data)
    for at in rng.sample(range(start, stop), min(n, stop - start)):
        out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def _lie(data: bytes, rng: random.Random, fields: list[Field]) -> bytes:
    out = bytearray(data)
    for field in rng.sample(fields, min(len(fields), rng.choice((1, 1, 1, 2)))):
        held = int.from_bytes(data[field.at:field.at + field.width], "little")
        other = rng.choice(fields)
        value = rng.choice((rng.choice(_EXTREMES), held + rng.choice((-8, -2, -1, 1, 2, 8)), rng.getrandbits(8 * field.width),
                            int.from_bytes(data[other.at:other.at + other.width], "little")))
        out[field.at:field.at + field.width] = (value % (1 << (8 * field.width))).to_bytes(field.width, "little")
    return bytes(out)
