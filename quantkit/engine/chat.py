"""Given texts as a chat model sees them: its own template, its own special tokens. Worker processes only: a template is a program.

The template runs in jinja2's sandbox and within limits of time, memory and length. Its clock stands still, so that a prompt is the
same on every day.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.library import load_library
from quantkit.engine.model import Model, Tokens
from quantkit.engine.template_limits import check_template, join_text, limits
from quantkit.engine.worker import WorkerState

_TODAY = date(2026, 1, 1)


class ChatPrompt(NamedTuple):
    """A prompt ready to decode; `templated` is False where the model has no template and the text stands as it is."""

    tokens: Tokens
    templated: bool


def chat_prompts(state: WorkerState, *, path: Path, texts: tuple[str, ...]) -> list[ChatPrompt]:
    """Command: each text as one user turn, with the start of the answer.

    Raises:
        InputError: the model's template fails; holds its words.
    """
    model = Model(path, vocab_only=True)
    try:
        return [_prompt(model, text) for text in texts]
    finally:
        model.close()


def _prompt(model: Model, text: str) -> ChatPrompt:
    lib = load_library()
    template = lib.llama_model_chat_template(model.handle, None)
    if not template:
        return ChatPrompt(model.tokenize(text.encode()), False)
    vocab = lib.llama_model_get_vocab(model.handle)
    bos, eos = marker_texts(model)
    try:
        rendered = render(template.decode(), text, bos, eos)
    except Exception as error:  # a template may raise anything
        raise InputError(f"the chat template of {model.path.name} fails: {error}; take the texts out of mtp.prompts") from error
    return ChatPrompt(_tokenize_special(lib, vocab, rendered, add_special=not (bos and rendered.startswith(bos))), True)


def render(template: str, text: str, bos: str, eos: str) -> str:
    """One user turn and the start of the answer, as a template writes them."""
    return render_messages(template, [{"role": "user", "content": text}], bos, eos, add_generation_prompt=True)


def render_messages(template: str, messages: Sequence[Mapping[str, Any]], bos: str, eos: str, *,
                    add_generation_prompt: bool) -> str:
    """A conversation as a template writes it.

    Raises:
        Exception: of any kind that a template can raise; BeyondLimits, where it takes too much.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    check_template(template)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_TODAY.strftime)
    with limits():
        return join_text(environment.from_string(template).generate(
            messages=messages, add_generation_prompt=add_generation_prompt, bos_token=bos, eos_token=eos))


def marker_texts(model: Model) -> tuple[str, str]:
    """The texts of a vocabulary's first and last token of a sequence, which templates write; "" where it has none."""
    lib = load_library()
    vocab = lib.llama_model_get_vocab(model.handle)
    return _piece(lib, vocab, int(lib.llama_vocab_bos(vocab))), _piece(lib, vocab, int(lib.llama_vocab_eos(vocab)))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """JSON as templates expect it, without the escapes for html that jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise InputError(message)


def _piece(lib: Any, vocab: Any, token: int) -> str:
    if token < 0:
        return ""
    buffer = ctypes.create_string_buffer(256)
    n = lib.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[: max(0, n)].decode(errors="replace")


def _tokenize_special(lib: Any, vocab: Any, text: str, *, add_special: bool) -> Tokens:
    """Token ids with the specials that stand in the text read as such."""
    raw = text.encode()
    ids = np.empty(len(raw) + 8, np.int32)
    n = lib.llama_tokenize(vocab, raw, len(raw), ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(ids), add_special, True)
    if n < 0:
        raise EngineError(f"llama.cpp cannot tokenize a prompt of {len(raw)} bytes: shorten it")
    return ids[:n].copy()
