"""Which reference pack stands for which text of a protocol, and whether it holds the chunks that are wanted.

A pack serves a protocol where the text, n_ctx and the whole arithmetic of the evaluation agree, which is what their `eval_id`s say.
Chunks may be fewer than the pack has: one of all chunks serves every choice of them, by their numbers. The other texts of the
protocol do not matter either, since each has a pack of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file
from quantkit.engine.library import BuildFacts
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import Evaluation, context_settings
from quantkit.job.foreign import open_refpack
from quantkit.measure.articles import chunk_indices
from quantkit.spec.protocol import Corpus, Protocol
from quantkit.spec.refpack_file import Refpack

_ALL = "`quantkit refpack make` with --set eval.chunks=all --set eval.n_chunk=0"


class TextPack(NamedTuple):
    """A pack and the text of the protocol that it is of."""

    pack: Refpack
    corpus: Corpus
    sha256: str

    def places(self, chunks: npt.NDArray[np.int64], what: str) -> npt.NDArray[np.int64]:
        """Where some chunks lie in the pack's arrays.

        Raises:
            InputError: the pack does not hold one; names the first, and what it is wanted for.
        """
        held, facts = self.pack.content.chunks, self.pack.facts
        lacking = chunks[~np.isin(chunks, held)]
        if len(lacking):
            raise InputError(f"{self.pack.path} does not hold chunk {lacking[0]} of {self.corpus.name}, which {what} needs: it has "
                             f"{len(held)} of {facts.n_chunk_total} chunks: make one of all chunks, {_ALL}")
        return np.searchsorted(held, chunks)

    def same_arithmetic(self, build: BuildFacts, offload: Offload) -> bool:
        """Whether the pack's base ran on this build and on devices used in this way."""
        return dataclasses.asdict(self.pack.facts.arithmetic) == dataclasses.asdict(build) | dataclasses.asdict(offload)


def of_text(protocol: Protocol, name: str) -> Protocol:
    """The protocol that a pack of one of its texts is made with: itself, or one that evaluates what a search takes of its second.

    Raises:
        InputError: no text of that name that a pack could stand for.
    """
    if name in protocol.eval.corpora:
        return protocol
    if name and name == protocol.search.second_corpus:
        n = protocol.search.second_n_chunk
        return dataclasses.replace(protocol, eval=dataclasses.replace(protocol.eval, corpora=(name,), n_chunk=n,
                                                                      chunks="spread" if n else "all"))
    known = dict.fromkeys([*protocol.eval.corpora, *([protocol.search.second_corpus] if protocol.search.second_corpus else [])])
    raise InputError(f"expected a text that protocol {protocol.name} measures on ({', '.join(known)}), got {name!r}: name one of "
                     "them")


def open_packs(paths: Sequence[Path], protocol: Protocol, names: Sequence[str]) -> list[TextPack]:
    """Open packs for some texts of a protocol, one for each.

    Args:
        names: of the texts that need a pack.

    Returns:
        In the order of the names.

    Raises:
        InputError: a pack is damaged, of another text or another evaluation; a text has none, or two.
    """
    found: dict[str, TextPack] = {}
    corpora = {protocol.corpus(name).sha256: protocol.corpus(name) for name in names}
    for path in paths:
        pack = open_refpack(path)
        facts = pack.facts
        corpus = corpora.get(facts.corpus_sha256)
        if corpus is None:
            wanted = ", ".join(f"{c.name} {c.sha256}" for c in corpora.values())
            raise InputError(f"{path} is a reference pack of another text: expected {wanted}, found {facts.corpus_name} "
                             f"{facts.corpus_sha256}; give the pack of this text")
        if corpus.name in found:
            raise InputError(f"expected one reference pack of {corpus.name}, got {found[corpus.name].pack.path} and {path}: leave "
                             "one away")
        if facts.eval_id not in _serving(protocol, corpus.name):
            raise InputError(f"{path} is a reference pack of another evaluation: expected eval_id {protocol.eval_id} of protocol "
                             f"{protocol.name}, found {facts.eval_id} of {facts.protocol_name}: use the protocol that it was made "
                             f"with, or make one of all chunks, which serves every choice of them, {_ALL}")
        found[corpus.name] = TextPack(pack, corpus, sha256_file(path))
    lacking = [name for name in names if name not in found]
    if lacking:
        raise InputError(f"expected a reference pack of each text that protocol {protocol.name} measures on ({', '.join(names)}), "
                         f"got none of {lacking[0]}: make it with `quantkit refpack make --text {lacking[0]}`, and give each with "
                         "a --ref of its own")
    return [found[name] for name in names]


def _serving(protocol: Protocol, name: str) -> set[str]:
    """The eval_ids of packs that hold a text's rows: its own, of the text alone, of all chunks, and a search's."""
    ids = {of_text(protocol, name).eval_id}
    for corpora in (protocol.eval.corpora, (name,)):
        if name in corpora:
            own = dataclasses.replace(protocol.eval, corpora=corpora)
            ids |= {dataclasses.replace(protocol, eval=spec).eval_id
                    for spec in (own, dataclasses.replace(own, chunks="all", n_chunk=0))}
    return ids


def evaluated_chunks(text: TextPack, protocol: Protocol) -> npt.NDArray[np.int64]:
    """The chunks that the protocol evaluates of a pack's text.

    Raises:
        InputError: the pack does not hold them all, or has another n_ctx.
    """
    facts = text.pack.facts
    chunks = chunk_indices(protocol.eval.chunks, protocol.eval.n_chunk, facts.n_chunk_total).astype(np.int64)
    if facts.n_ctx != protocol.eval.n_ctx or not np.isin(chunks, text.pack.content.chunks).all():
        raise InputError(f"{text.pack.path} does not hold the chunks that protocol {protocol.name} names, though it says so: make "
                         "it anew")
    return chunks


def evaluation_of(text: TextPack, protocol: Protocol, data: bytes, offload: Offload, build: BuildFacts,
                  chunks: npt.NDArray[np.int64]) -> Evaluation:
    """A text as the pack's base saw it, for tiers that run here.

    Args:
        data: the text's bytes.

    Raises:
        InputError: the pack was made of another text.
    """
    facts, content = text.pack.facts, text.pack.content
    if facts.corpus_sha256 != hashlib.sha256(data).hexdigest():
        raise InputError(f"{text.pack.path} is a reference pack of another text: expected sha256 {text.corpus.sha256} "
                         f"({text.corpus.name}), found {facts.corpus_sha256} ({facts.corpus_name}); give the pack of this text")
    return Evaluation(
        eval_id=protocol.eval_id, corpus=text.corpus, text=data, settings=context_settings(protocol.eval), offload=offload,
        tokens=content.tokens, token_ids_sha256=facts.token_ids_sha256, add_bos=facts.add_bos, n_chunk_total=facts.n_chunk_total,
        chunks=chunks, articles=content.articles[text.places(chunks, "the evaluation")], build=build)


def check_base(texts: Sequence[TextPack], path: Path, sha256: str) -> None:
    """Refuse packs of another base than the file, or the bundle, that is at hand.

    Raises:
        InputError: names the pack and both hashes.
    """
    for text in texts:
        facts = text.pack.facts
        if facts.base.sha256 != sha256:
            raise InputError(f"{text.pack.path} is the reference pack of another base: expected sha256 {sha256} for {path}, found "
                             f"{facts.base.sha256} ({facts.base.file}): use the pack of this base")


def check_one_base(texts: Sequence[TextPack]) -> None:
    """Refuse packs of different bases.

    Raises:
        InputError: names two packs.
    """
    for text in texts[1:]:
        if text.pack.facts.base.sha256 != texts[0].pack.facts.base.sha256:
            raise InputError(f"expected reference packs of one base, got {texts[0].pack.path} of {texts[0].pack.facts.base.file}, "
                             f"and {text.pack.path} of {text.pack.facts.base.file}: leave one away")


def describe_pack(text: TextPack) -> str:
    """One line for people."""
    facts = text.pack.facts
    return f"{text.corpus.name}: base's answers come from {text.pack.path.name}, mass {facts.mass:g}; KLD is a lower bound"
