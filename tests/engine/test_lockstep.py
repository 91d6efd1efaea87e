"""The lockstep loop over a fake engine: which positions are scored, what goes in, what faults are told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.lockstep import AuditSession, Block, PanelSession, Rows, blocks_of
from quantkit.measure.scoring import Scorer
from tests.engine import fake

TOKENS = (np.arange(64, dtype=np.int32) * 5) % 32


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return fake.write_model(tmp_path / "base.gguf")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return fake.write_model(tmp_path / "tier.gguf", noise=0.3)


def session(base: Path, *tiers: Path, n_batch: int = 16) -> AuditSession:
    settings = dataclasses.replace(fake.SETTINGS, n_batch=n_batch)
    return AuditSession(base, tiers, settings, fake.OFFLOAD, TOKENS)


@pytest.mark.parametrize(("n_ctx", "n_scored"), [(512, 255), (64, 31), (7, 3), (2048, 1023)])
def test_positions_from_half_to_the_last_but_one_are_scored(n_ctx: int, n_scored: int) -> None:
    blocks = blocks_of(n_ctx, 512)
    assert sum(block.last - block.first for block in blocks) == n_scored
    assert blocks[0].start == 0
    assert blocks[-1].stop == n_ctx


def test_blocks_of_a_long_chunk() -> None:
    assert blocks_of(16, 6) == [Block(0, 6, 8, 8), Block(6, 12, 8, 12), Block(12, 16, 12, 15)]


def test_rows_hold_the_chunk_the_position_and_the_token_that_follows(base: Path, tier: Path) -> None:
    (rows,) = session(base, tier).score(2).tiers
    assert rows["chunk"].tolist() == [2] * 7
    assert rows["pos"].tolist() == list(range(8, 15))
    assert rows["token"].tolist() == TOKENS[2 * 16 + 9:3 * 16].tolist()


def test_base_against_itself_is_exactly_zero(base: Path) -> None:
    (rows,) = session(base, base).score(0).tiers
    assert (rows["kld"] == 0.0).all()
    assert (rows["nll_q"] == rows["nll_base"]).all()
    assert (rows["top1_q"] == rows["top1_base"]).all()


def test_rows_are_what_the_scorer_makes_of_the_logits(base: Path, tier: Path) -> None:
    (rows,) = session(base, tier).score(1).tiers
    logits = []
    for path in (base, tier):
        context = fake.FakeContext(fake.FakeModel(path), fake.SETTINGS, n_outputs_max=7)
        logits.append(context.decode(TOKENS[16:32], 0, slice(8, 15)))
    expected = Scorer().score(logits[0], TOKENS[16 + 9:32], [logits[1]])
    assert rows["kld"].tolist() == expected.tiers[0].kld.tolist()
    assert rows["nll_q"].tolist() == expected.tiers[0].nll.tolist()
    assert rows["entropy_base"].tolist() == expected.base.entropy.tolist()
    assert rows["margin_base"].tolist() == expected.base.margin.tolist()


def assert_equal_rows(actual: Rows, expected: Rows) -> None:
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n_batch", [1, 3, 5, 8, 15])
def test_rows_do_not_depend_on_the_block_size(base: Path, tier: Path, n_batch: int) -> None:
    whole, blocked = session(base, tier).score(1), session(base, tier, n_batch=n_batch).score(1)
    assert_equal_rows(blocked.tiers[0], whole.tiers[0])


def test_rows_do_not_depend_on_the_group_or_the_order_of_chunks(base: Path, tier: Path, tmp_path: Path) -> None:
    other = fake.write_model(tmp_path / "other.gguf", noise=1.0)
    together = session(base, other, tier)
    together.score(3)
    alone = session(base, tier)
    assert_equal_rows(together.score(0).tiers[1], alone.score(0).tiers[0])


def test_panels_give_the_rows_of_the_lockstep_and_leave_no_file(base: Path, tier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    settings = dataclasses.replace(fake.SETTINGS, n_batch=5)
    panel = PanelSession(base, settings, fake.OFFLOAD, TOKENS, (1, 3), folder)
    assert list(folder.iterdir()) == []
    found = list(panel.score_tier(tier))
    assert [item.chunk for item in found] == [1, 3]
    for item in found:
        assert_equal_rows(item.tiers[0], session(base, tier).score(item.chunk).tiers[0])


def test_bos_replaces_the_first_token_of_each_chunk_in_the_input_only(tmp_path: Path) -> None:
    path = fake.write_model(tmp_path / "bos.gguf", add_bos=True)
    tokens = np.full(32, 9, np.int32)
    audit = AuditSession(path, [path], dataclasses.replace(fake.SETTINGS, n_batch=8), fake.OFFLOAD, tokens)
    (rows,) = audit.score(1).tiers
    assert [inputs[0] for inputs in fake.FakeContext.inputs] == [1, 1, 9, 9]  # base and tier, first and second block
    assert rows["token"].tolist() == [9] * 7
    assert tokens.tolist() == [9] * 32


def test_without_bos_tokens_go_in_as_they_are(base: Path, tier: Path) -> None:
    session(base, tier).score(1)
    assert fake.FakeContext.inputs == [TOKENS[16:32].tolist()] * 2


def test_a_tier_of_another_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    other = fake.write_model(tmp_path / "other.gguf", n_vocab=34)
    with pytest.raises(InputError, match=r"other.gguf is not a tier of this base: .* \(32 tokens\), found 34"):
        session(base, other)


def test_a_row_that_is_not_finite_names_tier_chunk_and_position(base: Path, tmp_path: Path) -> None:
    broken = fake.write_model(tmp_path / "broken.gguf", nan_at=10)
    with pytest.raises(EngineError, match=r"broken.gguf, chunk 2, position 10"):
        session(base, broken).score(2)
    with pytest.raises(EngineError, match=r"the base, chunk 2, position 10"):
        session(broken, base).score(2)
