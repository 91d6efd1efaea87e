"""Composed models say what the rewritten file says, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError
from quantkit.engine.lockstep import AuditSession, ChunkRows, open_audit, score
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import quantize
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.trial import Trial, TrialRows, TrialSession, measure_trials, open_trials
from quantkit.engine.worker import WorkerState
from quantkit.job.search_shards import ShardStore
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.plan_records import anchored
from quantkit.spec.tensor_types import TENSOR_TYPES
from tests.engine.fake import OFFLOAD, SETTINGS, install, write_model
from tests.gguf_factory import tiny_model

TYPES = {"blk.0.ffn_down.weight": "Q4_K", "blk.1.attn_q.weight": "Q6_K", "output.weight": "Q8_0"}
REAL = ContextSettings(n_ctx=64, n_batch=64, n_ubatch=64, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                       n_threads=1)


def quantize_to(pool: WorkerPool, base: GgufHeader, target: Path, types: dict[str, str]) -> GgufHeader:
    patterns = dict(anchored(t.name, types.get(t.name, t.type.name)) for t in base.tensors if len(t.shape) > 1)
    pool.call("quantize", quantize, source=base.parts[0], target=target, ftype=15, n_threads=2, imatrix={}, metadata={},
              patterns={pattern: TENSOR_TYPES[name].id for pattern, name in patterns.items()})
    return read_header(target)


@pytest.mark.engine
def test_a_composition_is_the_rewritten_file_bit_for_bit(tmp_path: Path) -> None:
    base = read_header(tiny_model(tmp_path / "base.gguf", n_embd=256, n_ff=256, n_block=2)[0])
    store = ShardStore(tmp_path / "shards", base, {name: [name] for name in TYPES})
    store.write_base()
    n_vocab = next(t.shape[1] for t in base.tensors if t.name == "token_embd.weight")
    tokens = np.random.default_rng(0).integers(3, n_vocab, 256).astype(np.int32)
    common: dict[str, Any] = {"settings": REAL, "offload": Offload(), "tokens": tokens}
    with WorkerPool(1) as pool:
        whole = quantize_to(pool, base, tmp_path / "whole.gguf", TYPES)
        for type_name in set(TYPES.values()):
            everything = quantize_to(pool, base, tmp_path / f"{type_name}.gguf", dict.fromkeys(TYPES, type_name))
            store.cut(everything, type_name)
        trials = (Trial("plan", store.compose(TYPES)), Trial("nothing changed", store.compose({})))
        pool.call("open", open_trials, base=base.path, chunks=(3, 1), folder=tmp_path, **common)
        items: list[TrialRows] = []
        pool.call("measure", measure_trials, on_item=items.append, trials=trials)
        audited: list[ChunkRows] = []
        pool.call("open", open_audit, base=base.path, tiers=(whole.path,), **common)
        pool.call("score", score, on_item=audited.append, chunks=(3, 1))
    found = {item.key: item for item in items}
    expected = np.concatenate([item.tiers[0] for item in audited])
    assert found["plan"].rows.tobytes() == expected.tobytes()
    assert expected["kld"].mean() > 0
    assert not found["nothing changed"].rows["kld"].any()


@pytest.mark.engine
def test_files_in_another_order_are_refused_in_the_librarys_words(tmp_path: Path) -> None:
    base = read_header(tiny_model(tmp_path / "base.gguf", n_embd=256, n_ff=256, n_block=2)[0])
    store = ShardStore(tmp_path / "shards", base, {name: [name] for name in TYPES})
    store.write_base()
    first, *rest = store.compose({})
    with WorkerPool(1) as pool:
        pool.call("open", open_trials, base=base.path, chunks=(0, 1), folder=tmp_path, settings=REAL, offload=Offload(),
                  tokens=np.full(128, 5, np.int32))
        with pytest.raises(EngineError, match="invalid split file idx"):
            pool.call("measure", measure_trials, trials=(Trial("wrong", (first, *rest[::-1])),))


def test_trials_are_scored_as_tiers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    base = write_model(tmp_path / "base")
    noisy = [write_model(tmp_path / name, noise=noise) for name, noise in (("a", 0.1), ("b", 0.5))]
    tokens = np.arange(64, dtype=np.int32) % 32
    session = TrialSession(base, SETTINGS, OFFLOAD, tokens, (2, 0), tmp_path)
    found = list(session.measure([Trial(path.name, (path,)) for path in noisy]))
    session.close()
    audit = AuditSession(base, noisy, SETTINGS, OFFLOAD, tokens)
    expected = [np.concatenate(rows) for rows in zip(*(audit.score(chunk).tiers for chunk in (2, 0)), strict=True)]
    assert [item.key for item in found] == ["a", "b"]
    assert all(np.array_equal(item.rows, rows) for item, rows in zip(found, expected, strict=True))


def test_a_trial_that_is_not_finite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    state = WorkerState()
    open_trials(state, base=write_model(tmp_path / "base"), settings=SETTINGS, offload=OFFLOAD,
                tokens=np.arange(64, dtype=np.int32) % 32, chunks=(1,), folder=tmp_path)
    bad = write_model(tmp_path / "bad", nan_at=9)
    with pytest.raises(EngineError, match="ffn_down Q2_K, chunk 1, position 9"):
        list(measure_trials(state, trials=(Trial("ffn_down Q2_K", (bad,)),)))
