"""Does a file answer? A fixed prompt at temperature 0, through llama-cpp-python as a user runs it. Worker processes only.

`answer_prompt` uses the in-process API and keeps token ids and raw bytes: the server's text has lost what was not UTF-8.
`serve_prompt` asks the OpenAI-compatible server on a port of this machine, with the model loaded inside the worker as well, so that
a native abort ends the worker and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import EngineError
from quantkit.engine.library import load_library
from quantkit.engine.template_limits import check_template, limits
from quantkit.engine.vetted import native_path
from quantkit.engine.worker import WorkerState

_N_CTX = 512
_N_BATCH = 64  # the API holds n_batch rows of n_vocab
_SERVER_MODULES = ("fastapi", "pydantic_settings", "sse_starlette", "starlette_context", "uvicorn")
_START_S, _ANSWER_S = 600, 3600
_MODEL = "smoke"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said: token ids without the one that ends the text, their bytes, and whether it ended by itself."""

    token_ids: tuple[int, ...]
    text: bytes
    n_prompt_tokens: int
    ended: bool
    template_applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """What the server said about the same prompt."""

    text: str
    n_tokens: int
    finish_reason: str


def has_server() -> bool:
    """Whether the server extra of llama-cpp-python is installed."""
    return all(importlib.util.find_spec(name) for name in _SERVER_MODULES)


def answer_prompt(state: WorkerState, *, path: Path, prompt: str, n_predict: int, n_threads: int) -> Answer:
    """Command: the greedy continuation of a prompt, as a chat message where the file has a chat template.

    Raises:
        EngineError: the file cannot be loaded or its template not be applied.
    """
    lib = load_library()
    with closing(_load(lib, path, n_threads)) as model:
        template = model.metadata.get("tokenizer.chat_template")
        if template is None:
            tokens = model.tokenize(prompt.encode(), add_bos=True, special=False)
        else:
            tokens = model.tokenize(_as_chat(lib, model, template, prompt).encode(), add_bos=False, special=True)
        vocab = lib.llama_model_get_vocab(model.model)
        ids: list[int] = []
        ended = False
        for token in model.generate(tokens, temp=0.0):
            ended = bool(lib.llama_vocab_is_eog(vocab, token))
            if ended:
                break
            ids.append(int(token))
            if len(ids) >= n_predict:
                break
        return Answer(token_ids=tuple(ids), text=model.detokenize(ids), n_prompt_tokens=len(tokens), ended=ended,
                      template_applied=template is not None)


def serve_prompt(state: WorkerState, *, path: Path, prompt: str, n_predict: int, n_threads: int, chat: bool) -> ServedAnswer:
    """Command: the same through the server, on a port of the loopback device that the system chooses.

    Raises:
        EngineError: the server does not start, or answers with an error.
    """
    load_library()
    from llama_cpp.server.app import create_app
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    uvicorn: Any = importlib.import_module("uvicorn")  # of the server extra, which most installations lack
    settings = ModelSettings(model=os.fsdecode(native_path(path)), model_alias=_MODEL, n_ctx=_N_CTX, n_batch=_N_BATCH,
                             n_threads=n_threads, n_threads_batch=n_threads, seed=0, verbose=False)
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        app = create_app(server_settings=ServerSettings(host="127.0.0.1", port=port), model_settings=[settings])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            _wait_for(server, thread)
            return _ask(f"http://127.0.0.1:{port}/v1", prompt, n_predict, chat=chat)
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def _load(lib: Any, path: Path, n_threads: int) -> Any:
    try:
        return lib.Llama(os.fsdecode(native_path(path)), n_ctx=_N_CTX, n_batch=_N_BATCH, n_threads=n_threads,
                         n_threads_batch=n_threads, seed=0, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"llama-cpp-python cannot load {path.name}: {error}; make the file again") from error


def _as_chat(lib: Any, model: Any, template: str, prompt: str) -> str:
    """The prompt as one user message. The template is a stranger's: llama-cpp-python renders it in a sandbox, within our limits."""
    vocab = lib.llama_model_get_vocab(model.model)
    texts = [lib.llama_vocab_get_text(vocab, token).decode(errors="replace") if token >= 0 else ""
             for token in (model.token_eos(), model.token_bos())]
    try:
        check_template(template)
        with limits():
            formatter = lib.llama_chat_format.Jinja2ChatFormatter(template=template, eos_token=texts[0], bos_token=texts[1])
            return str(formatter(messages=[{"role": "user", "content": prompt}]).prompt)
    except Exception as error:  # whatever a template can raise
        raise EngineError(f"the chat template of the file cannot be applied: {type(error).__name__}: {error}; correct "
                          "tokenizer.chat_template") from error


def _wait_for(server: Any, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise EngineError("the server of llama-cpp-python did not start: read the step's log")
        time.sleep(0.05)


def _ask(base_url: str, prompt: str, n_predict: int, *, chat: bool) -> ServedAnswer:
    body: dict[str, Any] = {"model": _MODEL, "max_tokens": n_predict, "temperature": 0,
                            "repeat_penalty": 1.0}  # the server has its own idea of it
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    request = urllib.request.Request(f"{base_url}/{'chat/' if chat else ''}completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine is reached without a proxy
    try:
        with opener.open(request, timeout=_ANSWER_S) as response:
            value = json.load(response)
        choice = value["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return ServedAnswer(text=str(text), n_tokens=int(value["usage"]["completion_tokens"]),
                            finish_reason=str(choice["finish_reason"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the server of llama-cpp-python gave no answer: {type(error).__name__}: {error}; read the "
                          "step's log") from error
