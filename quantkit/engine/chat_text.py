"""Conversations as an evaluation text: each through the base's own chat template, one after another. Worker processes only.

A corpus of format "chat" is JSON lines: one conversation a line, {"messages": [{"role": "user", "content": "..."}, ...]}, or the
list alone. A conversation is a document: errors are clustered by it as by an article. Tiers are tokenized from the same written
text, so a tier whose file carries another template is still paired token by token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.engine.chat import marker_texts, render_messages
from quantkit.engine.library import load_library
from quantkit.engine.model import Model
from quantkit.engine.worker import WorkerState


class RenderedChat(NamedTuple):
    """All conversations as one text, and the byte offsets where each starts."""

    text: bytes
    starts: npt.NDArray[np.int64]


def render_chat(state: WorkerState, *, path: Path, text: bytes) -> RenderedChat:
    """Command: write conversations with a model's own template.

    Raises:
        InputError: not JSON lines of conversations, no template in the model, or one that fails; names the line.
    """
    model = Model(path, vocab_only=True)
    try:
        template = load_library().llama_model_chat_template(model.handle, None)
        if not template:
            raise InputError(f"expected a chat template in {path.name} for a corpus of format chat, found none: "
                             "evaluate a plain text")
        bos, eos = marker_texts(model)
        return write_conversations(read_conversations(text), template.decode(), bos, eos)
    finally:
        model.close()


def read_conversations(text: bytes) -> list[Sequence[Mapping[str, Any]]]:
    """The conversations of a corpus.

    Raises:
        InputError: a line that is none; names it.
    """
    found: list[Sequence[Mapping[str, Any]]] = []
    for i, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"expected one conversation in JSON in line {i} of the chat corpus, got: {error}; correct the "
                             "line") from error
        messages = value.get("messages") if isinstance(value, dict) else value
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            raise InputError(f'expected {{"messages": [{{"role": "user", "content": "..."}}, ...]}} in line {i} of the chat '
                             "corpus, got something else: correct the line")
        found.append(messages)
    if not found:
        raise InputError("expected conversations in the chat corpus, found none: write one a line")
    return found


def write_conversations(conversations: Sequence[Sequence[Mapping[str, Any]]], template: str, bos: str, eos: str) -> RenderedChat:
    """Conversations as a template writes them, end to end.

    Raises:
        InputError: the template fails; names the conversation.
    """
    written = []
    for i, messages in enumerate(conversations, 1):
        try:
            written.append(render_messages(template, messages, bos, eos, add_generation_prompt=False).encode())
        except Exception as error:  # a template may raise anything
            raise InputError(f"the chat template fails on conversation {i}: {error}; take it out of the corpus") from error
    starts = np.cumsum([0, *(len(text) for text in written[:-1])], dtype=np.int64)
    return RenderedChat(b"".join(written), starts)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
