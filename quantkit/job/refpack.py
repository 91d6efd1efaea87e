"""Make a reference pack: base over the protocol's chunks, encoded by workers, in one file that does not depend on how."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from quantkit.core.files import atomic_path, refuse_overwrite, require_space, sha256_json
from quantkit.core.units import format_bytes
from quantkit.engine.pool import WorkerPool
from quantkit.engine.refpack import encode, open_pack
from quantkit.engine.settings import Offload
from quantkit.job.answers import check_encoded
from quantkit.job.corpus import read_corpus
from quantkit.job.deal import deal
from quantkit.job.evaluation import (
    Evaluation,
    Subject,
    arithmetic_of,
    choose_offload,
    context_settings,
    default_workers,
    prepare_evaluation,
    read_subject,
)
from quantkit.job.foreign import open_refpack
from quantkit.job.imatrix_state import state_beside
from quantkit.job.manifest import base_facts
from quantkit.job.memory import bound_of_one
from quantkit.job.progress import Progress
from quantkit.job.refpack_parts import SUFFIX, ChunkFolder
from quantkit.job.refpack_texts import of_text
from quantkit.measure.refpack import HeadRule
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Protocol
from quantkit.spec.refpack_file import ChunkBytes, PackContent, Refpack, write_refpack
from quantkit.spec.refpack_records import (
    FORMAT,
    PACK_ROW_DTYPE,
    REFPACK_VERSION,
    PackBase,
    PackFacts,
)

_BYTES_AN_ID = 24  # of a chunk's heads while they are encoded
_N_PARTS = 3  # numbers, heads, tails


def make_refpack(base_path: Path, protocol: Protocol, target: Path, progress: Progress, *, corpus: Path | None = None,
                 n_workers: int = 0, offload: Offload = Offload(), force: bool = False,  # noqa: B008 - frozen
                 name: str = "") -> Refpack:
    """Write a reference pack; a hidden folder beside the target lets a killed run go on, and goes when it is done.

    Args:
        name: of the protocol's text that the pack is of; "" is the first. Of the search's second text all chunks are packed.

    Raises:
        InputError, GgufError, CorpusError: an input is not what it must be, or the target may not be written.
        EngineError, EngineCrash: base cannot be run; what is done stays done.
        RunLocked: another process makes the same pack.
    """
    protocol = of_text(protocol, name or protocol.eval.corpora[0])
    text_spec = protocol.corpus(name or protocol.eval.corpora[0])
    refuse_overwrite(target, [*read_header(base_path).parts, *([corpus] if corpus else [])], force=force)
    describe_model(read_header(base_path))  # before any hashing
    text = read_corpus(text_spec, corpus)
    offload = choose_offload(protocol, offload)
    n_workers = n_workers or default_workers(context_settings(protocol.eval), offload)
    with state_beside(target, SUFFIX) as folder, WorkerPool(n_workers, folder / "logs") as pool:
        base = read_subject(base_path, "base")
        evaluation = prepare_evaluation(pool, protocol, base, text, offload, text_spec)
        parts = ChunkFolder(folder / _work_id(protocol, base, evaluation), _N_PARTS)
        n_vocab = _encode_missing(pool, protocol, base, evaluation, parts, progress)
        _assemble(target, protocol, base, evaluation, n_vocab, parts)
    pack = open_refpack(target)
    progress.note(f"reference pack: {describe_size(pack)}")
    return pack


def describe_size(pack: Refpack) -> str:
    """A pack's size in words, beside that of the base file that llama-perplexity writes of the same rows."""
    size, n_rows = pack.path.stat().st_size, pack.content.rows.size
    plain = 2 * pack.facts.n_vocab * n_rows
    return (f"{format_bytes(size)}, {size / n_rows:,.0f} bytes a row, 1/{plain / size:.1f} of llama-perplexity's base file "
            f"({format_bytes(plain)})")


def head_rule(protocol: Protocol) -> HeadRule:
    """What the protocol keeps of a row."""
    spec = protocol.refpack
    return HeadRule(mass=spec.mass, max_ids=spec.max_ids, full_every=spec.full_every)


def _work_id(protocol: Protocol, base: Subject, evaluation: Evaluation) -> str:
    """Of everything that the bytes of a chunk depend on."""
    return sha256_json({
        "version": REFPACK_VERSION, "base": base.sha256, "eval_id": protocol.eval_id,
        "text": evaluation.corpus.sha256, "tokens": evaluation.token_ids_sha256,
        "refpack": dataclasses.asdict(protocol.refpack), "build": dataclasses.asdict(evaluation.build),
        "offload": dataclasses.asdict(evaluation.offload),
    })


def _encode_missing(pool: WorkerPool, protocol: Protocol, base: Subject, evaluation: Evaluation, parts: ChunkFolder,
                    progress: Progress) -> int:
    """Encode the chunks that are not there yet; returns the vocabulary's size as the library tells it."""
    chunks = [int(chunk) for chunk in evaluation.chunks]
    missing = parts.missing(chunks)
    n_workers, n_kept = len(pool.workers), min(protocol.refpack.max_ids, base.model.n_vocab or protocol.refpack.max_ids)
    bound = bound_of_one(base.model, evaluation.settings, n_workers=n_workers)
    bound += n_workers * evaluation.settings.n_ctx // 2 * n_kept * _BYTES_AN_ID
    progress.note(f"{n_workers} workers, memory at most {format_bytes(bound)}")
    progress.start("reference pack", len(chunks))
    progress.advance(len(chunks) - len(missing))
    opened = pool.broadcast("load reference pack", open_pack, path=base.path, settings=evaluation.settings,
                            offload=evaluation.offload, tokens=evaluation.tokens, rule=head_rule(protocol))
    tasks = [{"chunks": task} for task in deal(missing, n_workers)]
    n_scored = evaluation.settings.n_ctx - 1 - evaluation.settings.n_ctx // 2
    for item in pool.stream("reference pack", encode, tasks):
        check_encoded("reference pack", item.chunk, item.numbers, missing, n_scored)
        parts.save(item.chunk, (item.numbers.tobytes(), *item.data))
        progress.advance()
    progress.finish()
    return int(opened[0])


def _assemble(target: Path, protocol: Protocol, base: Subject, evaluation: Evaluation, n_vocab: int, parts: ChunkFolder) -> None:
    """Write the file from the chunks, one chunk in memory at a time."""
    chunks = [int(chunk) for chunk in evaluation.chunks]
    n_scored = evaluation.settings.n_ctx - 1 - evaluation.settings.n_ctx // 2
    rows = np.empty((len(chunks), n_scored), PACK_ROW_DTYPE)
    sizes, hashes = np.zeros((len(chunks), 2), np.int64), np.empty((len(chunks), 32), np.uint8)
    for i, (numbers, data) in enumerate(_load(parts, chunks)):
        rows[i] = np.frombuffer(numbers, PACK_ROW_DTYPE)
        sizes[i] = [len(part) for part in data]
        hashes[i] = np.frombuffer(hashlib.sha256(b"".join(data)).digest(), np.uint8)
    content = PackContent(
        tokens=evaluation.tokens.astype("<i4"), chunks=evaluation.chunks.astype("<i4"), articles=evaluation.articles.astype("<i4"),
        rows=rows, offsets=np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(sizes, axis=0)]).astype("<i8"), sha256=hashes)
    require_space(target.parent, int(sizes.sum()) + rows.nbytes, "the reference pack")
    with atomic_path(target) as temp, temp.open("w+b") as file:
        write_refpack(file, _facts(protocol, base, evaluation, n_vocab), content,
                      (data for _, data in _load(parts, chunks)))


def _load(parts: ChunkFolder, chunks: Sequence[int]) -> Iterator[tuple[bytes, ChunkBytes]]:
    for chunk in chunks:
        held = parts.load(chunk)
        assert held is not None, "written a moment ago"
        yield held[0], ChunkBytes(held[1], held[2])


def _facts(protocol: Protocol, base: Subject, evaluation: Evaluation, n_vocab: int) -> PackFacts:
    rule = head_rule(protocol)
    return PackFacts(
        format=FORMAT, version=REFPACK_VERSION, protocol_name=protocol.name, eval_id=protocol.eval_id,
        base=PackBase(**base_facts(base)), corpus_name=evaluation.corpus.name, corpus_sha256=evaluation.corpus.sha256,
        token_ids_sha256=evaluation.token_ids_sha256, n_vocab=n_vocab, add_bos=evaluation.add_bos,
        n_ctx=evaluation.settings.n_ctx, n_chunk_total=evaluation.n_chunk_total, mass=rule.mass, max_ids=rule.max_ids,
        full_every=rule.full_every, content_sha256="",
        arithmetic=arithmetic_of(evaluation.build, evaluation.offload))
