"""Workers that are killed or send nonsense in the middle of a run: the step is named, other tiers stand, the next run completes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError, EngineKilled
from quantkit.engine import lockstep
from quantkit.engine.collect import Sums
from quantkit.engine.lockstep import ChunkRows, Tokenized
from quantkit.job import audit as audit_module
from quantkit.job.answers import check_sums, check_tokens
from quantkit.job.fit import estimate_contexts
from quantkit.job.parts import PartFile
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.job.smoke import smoke_path, smoke_tier
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from tests.faults import fakes

pytestmark = pytest.mark.system

KILLED = "the worker process was killed (signal 9): probably out of memory"


def killing(times: int, *words: str) -> Callable[[str], None]:
    """Kills the first so many steps whose name has all the words."""
    left = [times]

    def before(step: str) -> None:
        if left[0] and all(word in step for word in words):
            left[0] -= 1
            raise EngineKilled(f"{step}: {KILLED}")
    return before


class TestKilled:
    def test_a_group_that_does_not_fit_is_measured_tier_by_tier(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fakes.Pool, "before", staticmethod(killing(99, "audit Q8_0 Q4_0")))
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_one_tier_that_does_not_fit_fails_alone_and_is_measured_later(self, job: fakes.Job, tmp_path: Path,
                                                                         expected: dict[str, str],
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fakes.Pool, "before", staticmethod(killing(99, "audit", "Q4_0")))
        failed = job.run(tmp_path / "run").failed
        assert list(failed) == ["Q4_0"]
        assert str(failed["Q4_0"]) == f"audit Q4_0: {KILLED}"
        assert (tmp_path / "run" / "audit" / "Q8_0" / "summary.json").exists()
        monkeypatch.setattr(fakes.Pool, "before", staticmethod(killing(0)))
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    @pytest.mark.parametrize("n_step", range(4))
    def test_any_step(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch,
                      n_step: int) -> None:
        """The first step, the second and so on: whatever it was, the next run gives the same bundle."""
        steps: list[str] = []

        def before(step: str) -> None:
            steps.append(step)
            if len(steps) == n_step + 1:
                raise EngineKilled(f"{step}: {KILLED}")

        monkeypatch.setattr(fakes.Pool, "before", staticmethod(before))
        with contextlib.suppress(EngineKilled):  # some steps end the run, some are tried again
            job.run(tmp_path / "run")
        assert len(steps) > n_step
        monkeypatch.setattr(fakes.Pool, "before", staticmethod(killing(0)))
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_a_smoke_test_that_was_killed_is_no_record_of_the_file(self, job: fakes.Job, tmp_path: Path) -> None:
        class Killing(fakes.Pool):
            before = staticmethod(killing(1, "smoke"))

        run = RunFolder(path=tmp_path / "run")
        with pytest.raises(EngineKilled, match="smoke Q8_0: the worker process was killed"):
            smoke_tier(run, Killing(), job.protocol, "Q8_0", job.tiers[0], "0" * 64, 1)  # type: ignore[arg-type]
        assert not smoke_path(run, "Q8_0").exists()

    def test_a_simulation_that_was_killed_is_not_replaced_by_a_formula(self, job: fakes.Job) -> None:
        class Killing(fakes.Pool):
            before = staticmethod(killing(1, "memory"))

        with pytest.raises(EngineKilled):
            estimate_contexts(describe_model(read_header(job.base)), [512], "F16", Silent(), Killing())  # type: ignore[arg-type]


def _shorter(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=tuple(rows[:-1] for rows in item.tiers))


def _empty(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=tuple(rows[:0] for rows in item.tiers))


def _other_type(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=tuple(rows["kld"].astype(np.float32) for rows in item.tiers))


def _no_array(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=tuple(rows.tolist() for rows in item.tiers))


def _other_tokens(item: ChunkRows) -> ChunkRows:
    for rows in item.tiers:
        rows["token"] = np.roll(rows["token"], 1)
    return item


def _other_chunk(item: ChunkRows) -> ChunkRows:
    for rows in item.tiers:
        rows["chunk"] = 10_000
    return item


def _two_dimensions(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=tuple(rows.reshape(-1, 1) for rows in item.tiers))


def _one_tier_less(item: ChunkRows) -> ChunkRows:
    return item._replace(tiers=item.tiers[:-1])


class TestAnswers:
    @pytest.mark.parametrize(("harm", "found"), [
        (_shorter, r"got rows of shape \(14,\)"), (_empty, r"got rows of shape \(0,\)"),
        (_other_type, r"got float32 of shape \(15,\)"), (_no_array, "got list"), (_other_tokens, "got others"),
        (_other_chunk, "got others"),
        (_two_dimensions, r"got rows of shape \(15, 1\)"), (_one_tier_less, "got those of 0 from a worker process"),
    ])
    def test_rows_that_are_not_what_was_asked_for_are_refused(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              harm: Callable[[ChunkRows], ChunkRows], found: str) -> None:
        def score(state: Any, *, chunks: tuple[int, ...]) -> Iterator[ChunkRows]:
            yield from map(harm, lockstep.score(state, chunks=chunks))

        monkeypatch.setattr(audit_module, "score", score)
        failed = job.run(tmp_path / "run").failed
        assert sorted(failed) == ["Q4_0", "Q8_0"]
        for name, error in failed.items():
            assert isinstance(error, EngineError)
            assert str(error).startswith(f"audit {name}: expected")
            assert re.search(found, str(error))
        monkeypatch.setattr(audit_module, "score", lockstep.score)
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_chunks_that_never_come_are_told(self, job: fakes.Job, tmp_path: Path, expected: dict[str, str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that ends each task early, as if all of it were done."""
        def score(state: Any, *, chunks: tuple[int, ...]) -> Iterator[ChunkRows]:
            yield from lockstep.score(state, chunks=chunks[:-1])

        monkeypatch.setattr(audit_module, "score", score)
        failed = job.run(tmp_path / "run").failed
        assert "audit Q8_0: expected the rows of 6 chunks, the workers gave none of 3," in str(failed["Q8_0"])
        monkeypatch.setattr(audit_module, "score", lockstep.score)
        assert job.run(tmp_path / "run").failed == {}
        assert fakes.bundle_of(tmp_path / "run") == expected

    def test_rows_that_come_twice_count_once(self, tmp_path: Path) -> None:
        tokens = fakes.tokens_of(2)
        with PartFile(tmp_path / "x.rows", fakes.N_CTX, tokens) as part:
            for _ in range(3):
                part.append(fakes.rows_of(tokens, 1))
        assert (tmp_path / "x.rows").read_bytes() == fakes.rows_of(tokens, 1).tobytes()

    @pytest.mark.parametrize(("change", "found"), [
        ({"ids": np.zeros(3, np.int64)}, "got int64 of shape"), ({"ids": np.zeros((3, 1), np.int32)}, r"shape \(3, 1\)"),
        ({"ends": np.zeros(2, np.int64)}, r"ends of shape \(2,\)"), ({"ids": np.array([0, 5, 9], np.int32)}, "got 0 to 9"),
        ({"ids": np.array([0, -1, 2], np.int32)}, "got -1 to 2"),
    ])
    def test_tokens(self, change: dict[str, Any], found: str) -> None:
        sound = Tokenized(np.arange(3, dtype=np.int32), np.arange(3), 5, False)
        check_tokens("tokenize", sound)
        with pytest.raises(EngineError, match=rf"^tokenize: expected .*{found}"):
            check_tokens("tokenize", sound._replace(**change))

    @pytest.mark.parametrize(("name", "in_sum2", "counts", "found"), [
        ("a", np.ones((1, 3)), np.ones(1, np.int64), r"got float64 of shape \(1, 3\)"),
        ("a", np.ones(4), np.ones(1, np.int64), r"got float64 of shape \(4,\)"),
        ("a", np.ones((1, 4), np.float32), np.ones(1, np.int64), "got float32"),
        ("a", np.ones((3, 4)), np.ones(2, np.int64), r"int64 of shape \(2,\)"),
        ("a", np.ones((1, 4)), np.ones(1), "float64 of shape"),
        ("a", np.full((1, 4), np.nan), np.ones(1, np.int64), "not finite or below 0"),
        ("a", np.full((1, 4), -1.0), np.ones(1, np.int64), "not finite or below 0"),
        ("a", np.ones((1, 4)), np.full(1, -1), "not finite or below 0"),
        ("b", np.ones((1, 4)), np.ones(1, np.int64), "got some of b"),
    ])
    def test_sums(self, name: str, in_sum2: Any, counts: Any, found: str) -> None:
        check_sums("imatrix", {"a": Sums(np.ones((2, 4)), np.ones(2, np.int64))}, {"a": 4}, {"a"})
        with pytest.raises(EngineError, match=f"^imatrix: expected .*{found}"):
            check_sums("imatrix", {name: Sums(in_sum2, counts)}, {"a": 4, "b": 4}, {"a"})
