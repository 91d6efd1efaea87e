"""The sets of chunks that a search deals: conversations are read as the audit reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from quantkit.engine.chat_text import RenderedChat, render_chat
from quantkit.engine.lockstep import Tokenized
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject, tokenize_corpus
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Corpus
from tests.gguf_factory import tiny_model

WRITTEN, STARTS = b"<user>one<user>two<user>three", np.array([0, 9, 18])


class Pool:
    """Answers the two questions that a corpus needs, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def call(self, step: str, command: Any, **arguments: Any) -> Any:
        self.asked.append((command, arguments))
        if command is render_chat:
            return RenderedChat(WRITTEN, STARTS)
        n = len(arguments["text"])
        return Tokenized(np.frombuffer(arguments["text"], np.uint8).astype(np.int32), np.arange(1, n + 1), 256, False, {})


def read(tmp_path: Path, kind: Literal["text", "chat"], text: bytes) -> tuple[Pool, Any]:
    base = Subject(name="base", model=describe_model(read_header(tiny_model(tmp_path / "m.gguf")[0])), sha256="0" * 64)
    corpus = Corpus(name="text", file="text", sha256="0" * 64, size_bytes=len(text), documents="none", format=kind,
                    hub_dataset="", hub_config="", hub_split="")
    pool = Pool()
    return pool, tokenize_corpus(cast(WorkerPool, pool), base, corpus, text)


def test_conversations_go_through_the_template_and_each_is_an_article(tmp_path: Path) -> None:
    pool, found = read(tmp_path, "chat", b'{"messages": []}')
    assert pool.asked[0][0] is render_chat
    assert pool.asked[1][1]["chat"] is True
    assert found.text == WRITTEN
    assert found.starts.tolist() == STARTS.tolist()


def test_plain_text_stays_as_it_is(tmp_path: Path) -> None:
    pool, found = read(tmp_path, "text", b"plain words")
    assert [arguments["chat"] for _, arguments in pool.asked] == [False]
    assert found.text == b"plain words"
