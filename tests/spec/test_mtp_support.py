"""What the pinned llama.cpp can draft with, and what it would load and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.mtp_support import MAX_NEXTN, cannot_draft
from tests.mtp_factory import headed_model


@pytest.mark.parametrize(("arch", "n_nextn", "words"), [
    ("qwen35", 1, None),
    ("qwen35", 2, "drafts with 1 NextN block of the architecture qwen35, and this file has 2"),
    ("step35", 3, None),
    ("mimo2", 2, None),
    ("qwen35", 0, "no MTP head"),
    ("llama", 1, "no draft graph for the architecture llama"),
    ("exaone-moe", 1, "no draft graph for the architecture exaone-moe"),
])
def test_reasons(tmp_path: Path, arch: str, n_nextn: int, words: str | None) -> None:
    model = describe_model(read_header(headed_model(tmp_path / "m.gguf", arch=arch, n_nextn=n_nextn)[0]))
    reason = cannot_draft(model)
    assert (reason is None) == (words is None)
    assert words is None or words in (reason or "")


def test_every_architecture_runs_at_least_one_block() -> None:
    assert min(MAX_NEXTN.values()) == 1
    assert {arch for arch, most in MAX_NEXTN.items() if most > 1} == {"hy_v3", "mimo2", "step35"}
