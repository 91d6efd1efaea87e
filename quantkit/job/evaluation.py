"""What all rows of an audit have in common: the files by their bytes, the text as base sees it, its chunks and articles."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file, sha256_json
from quantkit.engine.chat_text import render_chat
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import Tokenized, read_build, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.answers import check_tokens
from quantkit.measure.articles import assign_chunks, chunk_indices, find_articles
from quantkit.measure.slices import token_class
from quantkit.spec.gguf_header import read_header
from quantkit.spec.gguf_raw import read_pairs
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.protocol import ContextSpec, Corpus, Protocol
from quantkit.spec.refpack_records import PackArithmetic

ROWS_VERSION = 1  # raised when the meaning of a row changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A file that takes part: base or a tier, known by its bytes.

    Attributes:
        settings: its arithmetic where that is not the evaluation's, for noise floors.
    """

    name: str
    model: ModelInfo
    sha256: str
    settings: ContextSettings | None = None

    @property
    def path(self) -> Path:
        return self.model.header.parts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The text as base sees it, cut into chunks: what every row of the audit has in common.

    Attributes:
        text: the corpus; of conversations, what base's chat template writes.
        articles: (n_chunk,) the article of each chunk, or its conversation.
    """

    eval_id: str
    corpus: Corpus
    text: bytes
    settings: ContextSettings
    offload: Offload
    tokens: npt.NDArray[np.int32]
    token_ids_sha256: str
    add_bos: bool
    n_chunk_total: int
    chunks: npt.NDArray[np.int64]
    articles: npt.NDArray[np.int32]
    build: BuildFacts
    token_classes: Mapping[int, str] = field(default_factory=dict)

    def audit_id(self, base_sha256: str, q_sha256: str, ref_sha256: str | None = None) -> str:
        """Of everything that the rows of one tier depend on; `ref_sha256` is the reference pack's, where there was one."""
        return sha256_json({
            "rows": ROWS_VERSION, "eval_id": self.eval_id, "base": base_sha256, "q": q_sha256, "tokens": self.token_ids_sha256,
            "build": dataclasses.asdict(self.build), "offload": dataclasses.asdict(self.offload),
            **({"ref": ref_sha256} if ref_sha256 else {}),
        })


def context_settings(spec: ContextSpec) -> ContextSettings:
    """A context as a part of the protocol describes it."""
    return ContextSettings(n_ctx=spec.n_ctx, n_batch=spec.n_batch, n_ubatch=spec.n_ubatch, type_k=spec.type_k,
                           type_v=spec.type_v, flash_attn=spec.flash_attn == "on", use_extra_bufts=spec.use_extra_bufts,
                           n_threads=spec.n_threads or n_cores())


def choose_offload(protocol: Protocol, asked: Offload) -> Offload:
    """What the protocol fixes, or else what was asked for."""
    fixed = protocol.eval.offload
    if not fixed.fixed:
        return asked
    return Offload(n_gpu_layers=fixed.n_gpu_layers, main_gpu=fixed.main_gpu, tensor_split=fixed.tensor_split)


def arithmetic_of(build: BuildFacts, offload: Offload) -> PackArithmetic:
    """The build and the devices, as records name them."""
    return PackArithmetic(backend=build.backend, llama_cpp_python=build.llama_cpp_python, llama_cpp_commit=build.llama_cpp_commit,
                          system_info=build.system_info, n_gpu_layers=offload.n_gpu_layers, main_gpu=offload.main_gpu,
                          tensor_split=offload.tensor_split)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(settings: ContextSettings, offload: Offload) -> int:
    """As many workers as cores allow with the protocol's threads each; one where layers are offloaded."""
    return 1 if offload.n_gpu_layers else max(1, n_cores() // settings.n_threads)


class CorpusTokens(NamedTuple):
    """A corpus as one model reads it: its text (of conversations, what the chat template writes), where articles start, tokens."""

    text: bytes
    starts: npt.NDArray[np.int64]
    seen: Tokenized


def tokenize_corpus(pool: WorkerPool, base: Subject, corpus: Corpus, text: bytes) -> CorpusTokens:
    """Read a corpus with base's vocabulary, conversations through its chat template."""
    starts = None
    if corpus.format == "chat":
        text, starts = pool.call("chat template", render_chat, path=base.path, text=text)
    seen: Tokenized = pool.call("tokenize", tokenize, path=base.path, text=text, chat=starts is not None)
    check_tokens("tokenize", seen)
    return CorpusTokens(text, find_articles(text, corpus.documents) if starts is None else starts, seen)


def prepare_evaluation(pool: WorkerPool, protocol: Protocol, base: Subject, text: bytes, offload: Offload,
                       corpus: Corpus | None = None) -> Evaluation:
    """Tokenize with base, choose the chunks, find each chunk's article.

    Args:
        corpus: which of the protocol's evaluation texts it is; the first by default.

    Raises:
        InputError: the text has fewer than two chunks, or fewer than the protocol asks for.
    """
    spec = protocol.eval
    corpus = corpus or protocol.corpus(spec.corpora[0])
    text, starts, seen = tokenize_corpus(pool, base, corpus, text)
    n_total = len(seen.ids) // spec.n_ctx
    if n_total < 2:
        raise InputError(f"expected at least two chunks of {spec.n_ctx} tokens, got {len(seen.ids)} tokens from {corpus.name}: "
                         "use a longer text or a smaller n_ctx")
    chunks = chunk_indices(spec.chunks, spec.n_chunk, n_total)
    return Evaluation(
        eval_id=protocol.eval_id, corpus=corpus, text=text, settings=context_settings(spec), offload=offload, tokens=seen.ids,
        token_ids_sha256=hashlib.sha256(seen.ids.astype("<i4").tobytes()).hexdigest(), add_bos=seen.add_bos,
        n_chunk_total=n_total, chunks=chunks, articles=assign_chunks(starts, seen.ends, spec.n_ctx, chunks),
        build=pool.call("build", read_build, n_gpu_layers=offload.n_gpu_layers),
        token_classes={i: token_class(piece) for i, piece in (seen.pieces or {}).items()})


def read_subject(path: Path, name: str) -> Subject:
    """A file with its header and the hash of its bytes; of a split one, the hash of the parts' hashes.

    Raises:
        GgufError: the header is not sound.
        InputError: the file's name is not UTF-8, so that no record could hold it.
    """
    require_utf8(path)
    model = describe_model(read_header(path))
    return Subject(name=name, model=model, sha256=join_hashes([sha256_file(part) for part in model.header.parts]))


def join_hashes(parts: Sequence[str]) -> str:
    """What a model file is known by: its sha256; of a split one, the sha256 of its parts' in a row."""
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def require_utf8(path: Path) -> None:
    """Refuse a name that Python could only hold as surrogates: no JSON and no table takes those."""
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"expected a file name in UTF-8, got {path.name!a}: rename the file, for results are named after "
                         "it") from error


def check_same_text(pool: WorkerPool, evaluation: Evaluation, base: Subject | None, tier: Subject) -> None:
    """Tokenize the text with a tier's own vocabulary and compare: rows of different tokens are never paired.

    A tier whose tokenizer is the base's, byte for byte, needs no comparison; without the base's file (None) each is compared.

    Raises:
        InputError: the tier's tokens differ; says where.
    """
    if base is not None and _tokenizer(tier) == _tokenizer(base):
        return
    seen: Tokenized = pool.call(f"tokenize {tier.name}", tokenize, path=tier.path, text=evaluation.text,
                                chat=evaluation.corpus.format == "chat")
    if np.array_equal(seen.ids, evaluation.tokens):
        return
    n = min(len(seen.ids), len(evaluation.tokens))
    differ = np.flatnonzero(seen.ids[:n] != evaluation.tokens[:n])
    where = f"token {differ[0]}" if len(differ) else f"their number, {len(evaluation.tokens)} and {len(seen.ids)}"
    raise InputError(f"{tier.path.name} is not a tier of this base: expected the base's tokens of {evaluation.corpus.name}, found "
                     f"others (first difference: {where}); it has another tokenizer or another conversion of it; make it of "
                     "this base")


def _tokenizer(subject: Subject) -> dict[str, bytes]:
    """The raw metadata that tokens depend on."""
    return {pair.key: pair.data for pair in read_pairs(subject.model.header)
            if pair.key.startswith("tokenizer.") and not pair.key.startswith("tokenizer.chat_template")}
