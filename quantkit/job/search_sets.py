"""The chunks of a search: three sets of articles of the evaluation text, and a second text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.engine.pool import WorkerPool
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import Subject, tokenize_corpus
from quantkit.job.refpack_texts import TextPack, check_base, describe_pack, open_packs
from quantkit.job.search_trials import ChunkSet
from quantkit.job.session import Session
from quantkit.measure.articles import assign_chunks, chunk_indices
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


def search_texts(protocol: Protocol, *, quick: bool) -> list[str]:
    """Names of the texts that a search measures on: the first that is evaluated, and the second text where it is verified on."""
    second = protocol.search.second_corpus
    return [protocol.eval.corpora[0], *([second] if second and not quick else [])]


def open_references(refs: Sequence[Path], session: Session, quick: bool) -> list[TextPack]:
    """The packs of the search's texts.

    Raises:
        InputError: see `open_packs`; or their base is another, or ran in other arithmetic: what a single tensor costs is less than
            what two builds differ by, and the sum over all tensors would count that many times.
    """
    if not refs:
        return []
    packs = open_packs(refs, session.protocol, search_texts(session.protocol, quick=quick))
    check_base(packs, session.base.path, session.base.sha256)
    for text in packs:
        there = text.pack.facts.arithmetic
        if not text.same_arithmetic(session.evaluation.build, session.evaluation.offload):
            raise InputError(f"{text.pack.path} holds answers of the base from another build or device than this one "
                             f"({there.backend}, llama-cpp-python {there.llama_cpp_python}): the cost of a single tensor drowns in "
                             "what the two differ by; make the pack here")
        session.progress.note(describe_pack(text))
    return packs


def deal_text(pool: WorkerPool, protocol: Protocol, base: Subject, text: bytes, packs: Sequence[TextPack] = (), *,
              quick: bool) -> TextSets:
    """Deal the evaluation text by article, and read the second text where there is one.

    Args:
        text: the evaluation corpus.
        packs: reference packs of the `search_texts`, or none.
        quick: fewer chunks to search and select on.

    Raises:
        InputError: a set without chunks: too few articles; fewer chunks to report on than the commit rule wants; or a pack that
            lacks one of the chunks.
    """
    spec = protocol.search
    whole = _read(pool, base, text, protocol.corpus(protocol.eval.corpora[0]), protocol.eval.n_ctx)
    dealt = deal_articles(whole.articles, (spec.search_share, spec.select_share, spec.report_share), spec.seed)
    counts = {"search": spec.search_n_chunk, "select": spec.select_n_chunk, "report": spec.report_n_chunk}
    if quick:
        counts |= {"search": spec.quick_n_chunk, "select": spec.quick_n_chunk}
    sets = {}
    for name, own in dealt._asdict().items():
        if not len(own):  # before anything is measured
            raise InputError(f"expected articles for searching, selecting and reporting, found none left for {name}: use a "
                             "text with more articles")
        sets[name] = _chunk_set(name, whole, spread(own, counts[name]) if counts[name] else own, packs[0] if packs else None)
    n_report, least = len(sets["report"].chunks), protocol.gate.min_n_chunk
    if n_report < least and not quick:
        raise InputError(f"expected at least {least} chunks to report on (gate.min_n_chunk), got {n_report}: fewer prove nothing: "
                         "raise search.report_n_chunk (0 is all there are), use a longer text, or screen with --quick")
    second = None
    if spec.second_corpus and not quick:
        other = protocol.corpus(spec.second_corpus)
        its = _read(pool, base, read_corpus(other), other, protocol.eval.n_ctx)
        n_total = len(its.articles)
        chunks = chunk_indices("spread", spec.second_n_chunk, n_total) if spec.second_n_chunk else np.arange(n_total)
        second = _chunk_set("second text", its, chunks.astype(np.int64), packs[1] if packs else None)
    return TextSets(search=sets["search"], select=sets["select"], report=sets["report"], second=second)


def _read(pool: WorkerPool, base: Subject, text: bytes, corpus: Corpus, n_ctx: int) -> _Text:
    _, starts, seen = tokenize_corpus(pool, base, corpus, text)
    n_total = len(seen.ids) // n_ctx
    if n_total < 2:
        raise InputError(f"expected at least two chunks of {n_ctx} tokens in {corpus.name}, got {len(seen.ids)} tokens: use a "
                         "longer text or a smaller n_ctx")
    articles = assign_chunks(starts, seen.ends, n_ctx, np.arange(n_total))
    return _Text(tokens=seen.ids, sha256=hashlib.sha256(seen.ids.astype("<i4").tobytes()).hexdigest(), articles=articles)


def _chunk_set(name: str, text: _Text, chunks: npt.NDArray[np.int64], pack: TextPack | None) -> ChunkSet:
    if pack is not None:
        if pack.pack.facts.token_ids_sha256 != text.sha256:
            raise InputError(f"{pack.pack.path} holds other tokens of {pack.corpus.name} than the base finds there: make it anew")
        pack.places(chunks, f"the search's {name} set")
    return ChunkSet(name=name, tokens=text.tokens, tokens_sha256=text.sha256, chunks=tuple(int(c) for c in chunks),
                    articles=text.articles[chunks], pack=pack.pack.path if pack else None, pack_sha256=pack.sha256 if pack else "")
