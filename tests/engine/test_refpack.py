"""Packs over a fake engine: base's rows in, a tier's rows out, the same as in an audit but for the tail of the KLD."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.lockstep import AuditSession
from quantkit.engine.refpack import EncodedChunk, PackAuditSession, PackSession
from quantkit.engine.trial import Trial, TrialSession
from quantkit.measure.refpack import HeadRule
from quantkit.spec.refpack_file import PackContent, write_refpack
from quantkit.spec.refpack_records import FORMAT, PackArithmetic, PackBase, PackFacts
from tests.engine import fake

TOKENS = (np.arange(64, dtype=np.int32) * 5) % 32
CHUNKS = (0, 1, 3)
RULE = HeadRule(mass=0.9, max_ids=20, full_every=3)


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return fake.write_model(tmp_path / "base.gguf")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return fake.write_model(tmp_path / "tier.gguf", noise=0.3)


def encode(base: Path, n_batch: int = 16) -> list[EncodedChunk]:
    session = PackSession(base, dataclasses.replace(fake.SETTINGS, n_batch=n_batch), fake.OFFLOAD, TOKENS, RULE)
    return [session.encode(chunk) for chunk in CHUNKS]


@pytest.fixture
def pack(base: Path, tmp_path: Path) -> Path:
    chunks = encode(base)
    sizes = [[0, 0], *([len(part) for part in chunk.data] for chunk in chunks)]
    content = PackContent(
        TOKENS.astype("<i4"), np.array(CHUNKS, "<i4"), np.zeros(len(CHUNKS), "<i4"), np.stack([chunk.numbers for chunk in chunks]),
        np.cumsum(sizes, axis=0).astype("<i8"),
        np.stack([np.frombuffer(hashlib.sha256(b"".join(chunk.data)).digest(), np.uint8) for chunk in chunks]))
    facts = PackFacts(
        format=FORMAT, version=1, protocol_name="p", eval_id="e",
        base=PackBase(file="b", sha256="b", size_bytes=1, type="BF16", architecture="x", n_params=1, bpw=16.0, bpw_core=None),
        corpus_name="t", corpus_sha256="t", token_ids_sha256=hashlib.sha256(TOKENS.tobytes()).hexdigest(), n_vocab=32,
        add_bos=False, n_ctx=16, n_chunk_total=4, mass=RULE.mass, max_ids=RULE.max_ids, full_every=RULE.full_every,
        content_sha256="",
        arithmetic=PackArithmetic(backend="CPU", llama_cpp_python="0", llama_cpp_commit="c", system_info="s", n_gpu_layers=0,
                                  main_gpu=0, tensor_split=()))
    path = tmp_path / "ref.safetensors"
    with path.open("w+b") as file:
        write_refpack(file, facts, content, [chunk.data for chunk in chunks])
    return path


def score(model: Path, pack: Path, **settings: Any) -> PackAuditSession:
    return PackAuditSession(model, dataclasses.replace(fake.SETTINGS, **settings), fake.OFFLOAD, pack)


def test_base_against_its_own_pack_is_exactly_zero_in_every_row(base: Path, pack: Path) -> None:
    session = score(base, pack)
    for chunk in CHUNKS:
        item = session.score(chunk)
        assert (item.rows["kld"] == 0.0).all()
        assert (item.rows["nll_q"] == item.rows["nll_base"]).all()
        assert np.isin(item.tail_kld[np.isfinite(item.tail_kld)], 0.0).all()


def test_all_but_the_kld_is_what_an_audit_gives_bit_by_bit(base: Path, tier: Path, pack: Path) -> None:
    audit = AuditSession(base, [tier], fake.SETTINGS, fake.OFFLOAD, TOKENS)
    session = score(tier, pack)
    for chunk in CHUNKS:
        (direct,) = audit.score(chunk).tiers
        item = session.score(chunk)
        for name in direct.dtype.names or ():
            if name != "kld":
                assert item.rows[name].tobytes() == direct[name].tobytes(), name
        assert (item.rows["kld"] <= direct["kld"] + 1e-5).all()
        full = np.isfinite(item.tail_kld)
        assert item.rows["kld"][full] + item.tail_kld[full] == pytest.approx(direct["kld"][full], abs=5e-5)


def test_whole_rows_are_every_third_of_the_text(tier: Path, pack: Path) -> None:
    session = score(tier, pack)
    found = [7 * chunk + int(i) for chunk in CHUNKS for i in np.flatnonzero(np.isfinite(session.score(chunk).tail_kld))]
    assert found == [row for row in range(28) if row % 3 == 0 and row // 7 in CHUNKS]


@pytest.mark.parametrize("n_batch", [1, 3, 5, 8])
def test_bytes_and_rows_do_not_depend_on_the_block_size(base: Path, tier: Path, pack: Path, n_batch: int) -> None:
    for blocked, whole in zip(encode(base, n_batch), encode(base), strict=True):
        assert blocked.data == whole.data
        assert blocked.numbers.tobytes() == whole.numbers.tobytes()
    assert score(tier, pack, n_batch=n_batch).score(3).rows.tobytes() == score(tier, pack).score(3).rows.tobytes()


def test_a_row_that_is_not_finite_names_model_chunk_and_position(pack: Path, tmp_path: Path) -> None:
    broken = fake.write_model(tmp_path / "broken.gguf", nan_at=10)
    with pytest.raises(EngineError, match=r"broken.gguf, chunk 3, position 10"):
        score(broken, pack).score(3)
    session = PackSession(broken, fake.SETTINGS, fake.OFFLOAD, TOKENS, RULE)
    with pytest.raises(EngineError, match=r"the base, chunk 2, position 10"):
        session.encode(2)


@pytest.mark.parametrize("facts", [{"n_vocab": 34}, {"add_bos": True}])
def test_a_tier_of_another_vocabulary_is_refused(pack: Path, tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"other.gguf is not a tier of ref.safetensors's base: .* \(32 tokens\)"):
        score(fake.write_model(tmp_path / "other.gguf", **facts), pack)


def test_trials_against_a_pack_are_what_an_audit_against_it_gives_and_base_is_not_opened(tier: Path, pack: Path,
                                                                                       tmp_path: Path) -> None:
    session = TrialSession(tmp_path / "no base", fake.SETTINGS, fake.OFFLOAD, TOKENS, (3, 0), tmp_path, pack)
    other = fake.write_model(tmp_path / "other.gguf", noise=0.1)
    found = {item.key: item.rows for item in session.measure([Trial("tier", (tier,)), Trial("other", (other,))])}
    session.close()
    for key, model in (("tier", tier), ("other", other)):
        audit = score(model, pack)
        assert found[key].tobytes() == np.concatenate([audit.score(chunk).rows for chunk in (3, 0)]).tobytes()
