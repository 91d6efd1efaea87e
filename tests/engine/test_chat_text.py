"""Conversations as a text: read from JSON lines, written by the template, tokenized with their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import InputError
from quantkit.engine.chat_text import read_conversations, render_chat, write_conversations
from quantkit.engine.lockstep import tokenize
from quantkit.engine.pool import WorkerPool

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TALK = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "3 m"}]


def lines(*values: object) -> bytes:
    return b"\n".join(json.dumps(value).encode() for value in values) + b"\n"


def test_a_line_is_a_conversation() -> None:
    assert read_conversations(lines({"messages": TALK}, TALK[:1]) + b"\n") == [TALK, TALK[:1]]


@pytest.mark.parametrize(("text", "error"), [
    (b"", "found none"), (b"not json\n", "in line 1"), (lines(TALK) + b"{}\n", "in line 2"), (lines([]), "in line 1"),
    (lines([{"role": "user"}]), "in line 1"), (lines([{"role": "user", "content": 3}]), "in line 1"),
    (b"[" * 100_000, "in line 1"),
])  # fmt: skip
def test_what_is_no_conversation_is_refused_by_line(text: bytes, error: str) -> None:
    with pytest.raises(InputError, match=error):
        read_conversations(text)


def test_conversations_are_written_end_to_end_and_start_at_their_bytes() -> None:
    got = write_conversations([TALK, TALK[:1]], TEMPLATE, "<s>", "</s>")
    first = "<|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n3 m<|im_end|>\n".encode()
    assert got.text == first + "<|im_start|>user\nGröße?<|im_end|>\n".encode()
    assert got.starts.tolist() == [0, len(first)]


def test_a_template_that_fails_names_the_conversation() -> None:
    with pytest.raises(InputError, match="fails on conversation 2: no answer"):
        write_conversations([TALK, TALK[:1]], "{% if messages|length == 1 %}{{ raise_exception('no answer') }}{% endif %}x", "", "")


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(InputError, match="fails on conversation 1"):
        write_conversations([TALK], "{{ messages.__class__.__mro__[1].__subclasses__() }}", "", "")


@pytest.mark.engine
def test_special_tokens_of_the_written_text_are_tokens(tiny_model: Path) -> None:
    with WorkerPool(1) as pool:
        text, starts = pool.call("chat", render_chat, path=tiny_model, text=lines({"messages": TALK}, {"messages": TALK}))
        as_chat = pool.call("tokens", tokenize, path=tiny_model, text=text, chat=True)
        as_text = pool.call("tokens", tokenize, path=tiny_model, text=text)
    assert len(as_chat.ids) < len(as_text.ids)
    assert as_chat.ends[-1] == len(text)
    assert np.all(np.diff(as_chat.ends) >= 0)
    assert len(starts) == 2
    specials = {piece.text for piece in as_chat.pieces.values() if piece.special}
    assert specials != set()
    assert {piece.text for piece in as_text.pieces.values() if piece.special} == set()
