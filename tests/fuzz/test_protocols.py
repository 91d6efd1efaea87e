"""Protocols with other bytes or other values: a valid protocol that writes and reads back, or a sentence with the dotted path."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest

from quantkit.core.errors import QuantkitError
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import resolve_plan
from quantkit.spec.protocol import parse_protocol, write_protocol
from tests.fuzz.damage import damage_bytes
from tests.fuzz.laws import fuzz, generator, one_sentence
from tests.gguf_factory import tiny_model

PROTOCOLS = [path.read_bytes() for path in sorted((Path(__file__).parents[2] / "protocols").glob("*.toml"))]
_LITERAL = re.compile(rb'(?<== )("[^"\n]*"|-?[0-9.]+|true|false)')
_STRANGE = (b"0", b"-1", b"1", b"2", b"7", b"2147483648", b"9223372036854775807", b"1e400", b"nan", b"-inf", b"0.5", b"true", b'""',
            b'"x"', b'"../x"', b'"a/b"', b'"\\u0000"', b'"*"', b'"**"', b'"' + b"*?" * 60 + b'"', b'"["', b"[]", b"{}", b"[[]]",
            b"1979-05-27", b'"' + b"x" * 300 + b'"', b'"\\u202e"', b'"Q9_9"', b'"Q4_K"', b'"first 1/0"', b'"0-99999999999"',
            b'"last 1/8"')


def damage_toml(data: bytes, rng: random.Random) -> bytes:
    """Values changed, lines removed or doubled, or plain bytes."""
    match rng.randrange(5):
        case 0:
            return damage_bytes(data, rng)
        case 1:
            lines = data.splitlines(keepends=True)
            at = rng.randrange(len(lines))
            return b"".join(lines[:at] + rng.choice(([], [lines[at]] * 2, [rng.choice(lines)])) + lines[at + 1:])
        case _:
            places = list(_LITERAL.finditer(data))
            for place in sorted(rng.sample(places, rng.choice((1, 1, 2))), key=lambda m: -m.start()):
                data = data[:place.start()] + rng.choice((*_STRANGE, rng.choice(places)[0])) + data[place.end():]
            return data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return describe_model(read_header(tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", n_embd=256, n_ff=256, n_nextn=1)[0]))


@fuzz(80)
def test_a_damaged_protocol_is_valid_or_refused(model: ModelInfo, number: int) -> None:
    rng = generator(number)
    data = damage_toml(rng.choice(PROTOCOLS), rng)
    with one_sentence():
        protocol = parse_protocol(data)
        again = parse_protocol(write_protocol(protocol))
        assert (again, again.protocol_id) == (protocol, protocol.protocol_id)
        for tier in protocol.plan.tiers[:3]:
            with contextlib.suppress(QuantkitError):
                resolve_plan(model, tier, protocol.plan, None)
