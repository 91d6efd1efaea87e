"""A model that loads, decodes and is broken: its numbers are told as far as they are numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli.main import run
from quantkit.spec.gguf_header import read_header
from tests.gguf_factory import tiny_model

SMALL = ["-p", "demo-v1", "--set", 'eval.chunks="first"', "--set", "eval.n_chunk=2", "--workers", "1"]


@pytest.mark.engine
def test_logits_so_large_that_no_float_holds_the_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit of a norm or a scale is enough: seven damaged files in a thousand were such."""
    base, broken = tiny_model(tmp_path / "base.gguf")[0], tiny_model(tmp_path / "broken.gguf")[0]
    norm = next(t for t in read_header(broken).tensors if t.name == "output_norm.weight")
    data = bytearray(broken.read_bytes())
    data[norm.offset:norm.offset + norm.size_bytes] = np.full(norm.shape, 1e6, "<f4").tobytes()
    broken.write_bytes(data)
    assert run(["audit", str(broken), "-b", str(base), "-o", str(tmp_path / "run"), *SMALL]) == 0
    summary = json.loads((tmp_path / "run" / "audit" / "broken" / "summary.json").read_bytes())["summary"]
    assert summary["ppl_q"]["value"] is None
    assert "too large for a number" in summary["ppl_q"]["reason"]
    assert summary["kld"]["value"] > 1000
    assert "n/a" in capsys.readouterr().out
    assert (tmp_path / "run" / "report" / "report.html").is_file()
