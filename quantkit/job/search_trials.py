"""Trials of a search: measured once, kept by content, spread over the workers.

The key of a trial is the hash of everything that its rows depend on: base, tensors and their types, importances, tokens, chunks,
context, build. What is kept are three means a chunk, one line each in an append-only file; a line that a kill cut off is measured
again. Rows do not depend on which trials share a worker, so a resumed search sees the same numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantkit.core.files import sha256_json
from quantkit.core.stats import Floats
from quantkit.core.units import MIB
from quantkit.engine.lockstep import Rows, close_group
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.trial import Trial, measure_trials, open_trials
from quantkit.job.answers import check_trial
from quantkit.job.evaluation import Subject
from quantkit.job.memory import free_memory_bytes
from quantkit.job.progress import Progress
from quantkit.job.search_shards import ShardStore
from quantkit.measure.numbers import flips, kld, nll_difference

_TRIALS_A_TASK = 4
_TRIALS_VERSION = 1


class Means(NamedTuple):
    """Of each chunk: mean kld and nll_q − nll_base in nats, share of flips. (n_chunk,) float64."""

    kld: Floats
    flips: Floats
    nll_difference: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSet:
    """Chunks of one text, with the article of each and the text's tokens.

    Attributes:
        pack: a reference pack that has base's answers to them, and its hash; None where base itself is decoded.
    """

    name: str
    tokens: Any
    tokens_sha256: str
    chunks: tuple[int, ...]
    articles: Any
    pack: Path | None = None
    pack_sha256: str = ""


class TrialRunner:
    """Measures composed models over chunk sets; a worker holds base's logits of one set at a time, or a reference pack open.

    Args:
        store: where the files of the compositions are.
        key: of base, importances and build, whatever all trials share.
        folder: of the cache.
    """

    def __init__(self, pool: WorkerPool, base: Subject, store: ShardStore, settings: ContextSettings, offload: Offload,
                 key: Mapping[str, Any], folder: Path, progress: Progress) -> None:
        self._pool, self._base, self._store, self._settings, self._offload = pool, base, store, settings, offload
        self._key, self._folder, self._progress = dict(key), folder, progress
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "trials.jsonl"
        self._cache = _read_cache(self._path)
        self._open = ""
        self.n_measured = 0

    def means(self, chunks: ChunkSet, trials: Mapping[str, Mapping[str, str]], step: str) -> dict[str, Means]:
        """The means of some compositions, from the cache where they are there.

        Args:
            trials: name of each trial to its kinds, as `ShardStore.compose` takes them.
        """
        keys = {name: self.content_key(chunks, kinds) for name, kinds in trials.items()}
        missing = {name: trials[name] for name in trials if keys[name] not in self._cache}
        if missing:
            with self._path.open("ab") as file:
                for name, rows in self.rows(chunks, missing, step):
                    self._cache[keys[name]] = means = _means_of(rows, len(chunks.chunks))
                    line = {"key": keys[name], **{field: values.tolist() for field, values in means._asdict().items()}}
                    file.write(json.dumps(line).encode() + b"\n")
                    file.flush()
                os.fsync(file.fileno())
            self.n_measured += len(missing)
        return {name: self._cache[keys[name]] for name in trials}

    def rows(self, chunks: ChunkSet, trials: Mapping[str, Mapping[str, str]], step: str) -> Iterator[tuple[str, Rows]]:
        """The rows of some compositions in the order in which they are done, their articles filled in."""
        self._open_set(chunks)
        size = self._batch_size(len(trials))
        todo = [Trial(name, self._store.compose(kinds)) for name, kinds in trials.items()]
        tasks = [{"trials": tuple(todo[i:i + size])} for i in range(0, len(todo), size)]
        self._progress.start(step, len(todo))
        for done in self._pool.stream(step, measure_trials, tasks):
            rows = done.rows
            check_trial(step, rows, chunks.chunks)
            rows["article"] = np.repeat(chunks.articles, len(rows) // len(chunks.chunks))
            self._progress.advance()
            yield done.key, rows
        self._progress.finish()

    def time_base(self, chunks: ChunkSet) -> float | None:
        """Decode base over a set in every worker; returns the seconds of a chunk, loading included, None with a pack."""
        if chunks.pack is not None:
            return None
        start = time.monotonic()
        self._open_set(chunks)
        return (time.monotonic() - start) / len(chunks.chunks)

    def close(self) -> None:
        """Free what the workers hold."""
        if self._open:
            self._pool.broadcast("close", close_group)
            self._open = ""

    def _open_set(self, chunks: ChunkSet) -> None:
        name = sha256_json([chunks.tokens_sha256, list(chunks.chunks), chunks.pack_sha256])
        if self._open == name:
            return
        self._pool.broadcast(f"base rows {chunks.name}", open_trials, base=self._base.path, settings=self._settings,
                             offload=self._offload, tokens=chunks.tokens, chunks=chunks.chunks, folder=self._folder,
                             pack=chunks.pack)
        self._open = name

    def _batch_size(self, n: int) -> int:
        """Trials that share a pass: what memory allows, and no more than keep every worker busy."""
        model, settings = self._base.model, self._settings
        n_vocab, n_embd = model.n_vocab or 0, model.n_embd or 0
        one = n_vocab * settings.n_ctx * 2 + settings.n_ubatch * (n_vocab + 16 * n_embd) * 4 + 64 * MIB
        n_workers = len(self._pool.workers)
        fits = int(free_memory_bytes() * 0.5) // (one * n_workers)
        return max(1, min(_TRIALS_A_TASK, fits, -(-n // n_workers)))

    def content_key(self, chunks: ChunkSet, kinds: Mapping[str, str]) -> str:
        """The hash of everything that the rows of a composition over a chunk set depend on."""
        changed = {group: [self._store.groups[group], kind] for group, kind in sorted(kinds.items()) if kind != "base"}
        return sha256_json({**self._key, "version": _TRIALS_VERSION, "tokens": chunks.tokens_sha256, "chunks": list(chunks.chunks),
                            "changed": changed, **({"ref": chunks.pack_sha256} if chunks.pack else {})})


def _means_of(rows: Rows, n_chunk: int) -> Means:
    return Means(*(np.asarray(observe(rows).reshape(n_chunk, -1).mean(axis=1)) for observe in (kld, flips, nll_difference)))


def _read_cache(path: Path) -> dict[str, Means]:
    """Every whole line; one that a kill cut off is dropped from the file too."""
    found: dict[str, Means] = {}
    if not path.exists():
        return found
    data = path.read_bytes()
    whole = data[:data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
            found[entry["key"]] = Means(*(np.array(entry[name], np.float64) for name in Means._fields))
        except (ValueError, KeyError, TypeError):
            continue
    return found
