"""docs/REPORTS.md names what there is: every file, every frame and every column."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.report.notebook import load_run
from quantkit.report.pictures import NAMES
from tests.report.run_factory import make_run

TEXT = (Path(__file__).parents[2] / "docs" / "REPORTS.md").read_text("utf-8")


def documented(frame: str) -> list[str]:
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| `run.{frame}`"))
    return re.findall(r"`([^`]+)`", line.split("|")[3])


def test_every_picture_is_explained() -> None:
    assert [name for name in NAMES if f"`{name}`" not in TEXT] == []


def test_every_column_of_a_frame_is_documented(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run").path)
    for name in ("rows", "pairs", "plan", "mtp"):
        assert documented(name) == [" ".join(getattr(run, name))]
    first, kld, same, parts = documented("slices")
    assert [*first.split(), *(f"{n}{part}" for n in (kld, same) for part in ("", *parts.split()))] == list(run.slices)
    assert documented("tiers") == ["retention.csv"]
