"""The chunks of a search: three sets of articles of the evaluation text, and a second text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.engine.lockstep import Tokenized, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import Subject
from quantkit.job.search_trials import ChunkSet
from quantkit.measure.articles import assign_chunks, chunk_indices, find_articles
from quantkit.measure.search_stats import deal_articles, spread
from quantkit.spec.protocol import Corpus, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSets:
    """Chunks to search on, to select on and to report on, and those of a second text."""

    search: ChunkSet
    select: ChunkSet
    report: ChunkSet
    second: ChunkSet | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A text with all its chunks' articles."""

    tokens: npt.NDArray[np.int32]
    sha256: str
    articles: npt.NDArray[np.int32]


def deal_text(pool: WorkerPool, protocol: Protocol, base: Subject, text: bytes, *, quick: bool) -> TextSets:
    """Deal the evaluation text by article, and read the second text where there is one.

    Args:
        text: the evaluation corpus.
        quick: fewer chunks to search and select on.

    Raises:
        InputError: a set without chunks: too few articles.
    """
    spec = protocol.search
    whole = _read(pool, base, text, protocol.corpus(protocol.eval.corpora[0]), protocol.eval.n_ctx)
    dealt = deal_articles(whole.articles, (spec.search_share, spec.select_share, spec.report_share), spec.seed)
    counts = {"search": spec.search_n_chunk, "select": spec.select_n_chunk, "report": spec.report_n_chunk}
    if quick:
        counts |= {"search": spec.quick_n_chunk, "select": spec.quick_n_chunk}
    sets = {}
    for name, own in dealt._asdict().items():
        if not len(own):
            raise InputError(f"expected articles for searching, selecting and reporting, found none left for {name}: use a "
                             "text with more articles")
        sets[name] = _chunk_set(name, whole, spread(own, counts[name]))
    second = None
    if spec.second_corpus and not quick:
        other = protocol.corpus(spec.second_corpus)
        its = _read(pool, base, read_corpus(other), other, protocol.eval.n_ctx)
        n_total = len(its.articles)
        chunks = chunk_indices("spread", spec.second_n_chunk, n_total) if spec.second_n_chunk else np.arange(n_total)
        second = _chunk_set("second text", its, chunks.astype(np.int64))
    return TextSets(search=sets["search"], select=sets["select"], report=sets["report"], second=second)


def _read(pool: WorkerPool, base: Subject, text: bytes, corpus: Corpus, n_ctx: int) -> _Text:
    seen: Tokenized = pool.call(f"tokenize {corpus.name}", tokenize, path=base.path, text=text)
    n_total = len(seen.ids) // n_ctx
    if n_total < 2:
        raise InputError(f"expected at least two chunks of {n_ctx} tokens in {corpus.name}, got {len(seen.ids)} tokens")
    articles = assign_chunks(find_articles(text, corpus.documents), seen.ends, n_ctx, np.arange(n_total))
    return _Text(tokens=seen.ids, sha256=hashlib.sha256(seen.ids.astype("<i4").tobytes()).hexdigest(), articles=articles)


def _chunk_set(name: str, text: _Text, chunks: npt.NDArray[np.int64]) -> ChunkSet:
    return ChunkSet(name=name, tokens=text.tokens, tokens_sha256=text.sha256, chunks=tuple(int(c) for c in chunks),
                    articles=text.articles[chunks])
