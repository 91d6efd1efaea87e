"""A small audit with fake passes, and what it leaves when nothing goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import fakes


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fakes.Job:
    fakes.install(monkeypatch)
    return fakes.Job(tmp_path)


@pytest.fixture
def expected(job: fakes.Job, tmp_path: Path) -> dict[str, str]:
    """The bundle of an undisturbed run."""
    job.run(tmp_path / "reference")
    return fakes.bundle_of(tmp_path / "reference")
