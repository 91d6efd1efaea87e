"""Importance matrices beside those that llama-imatrix wrote from the same files and chunks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantkit.core.files import sha256_file
from quantkit.job.imatrix import collection_targets
from quantkit.job.progress import Silent
from quantkit.job.standalone import collect_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, read_imatrix, write_imatrix
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import load_protocol

pytestmark = pytest.mark.engine

HEAD = {f"blk.4.{role}.weight" for role in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
                                            "nextn.eh_proj")}
Collect = Callable[..., Imatrix]


@pytest.fixture(scope="module")
def collect(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Collect:
    """Matrices over the first chunks of the calibration text."""
    folder = tmp_path_factory.mktemp("imatrix")

    def make(base: Path, n_chunk: int, *settings: str) -> Imatrix:
        target = folder / f"{len(list(folder.iterdir()))}.gguf"
        collect_to_file(base, load_protocol("wikitext2-quick-v1", [f"imatrix.n_chunk={n_chunk}", *settings]), target, Silent(),
                        calibration=shared / "corpus" / "calibration.txt", corpus=shared / "corpus" / "wiki.test.raw")
        return read_imatrix(target)

    return make


@pytest.fixture(scope="module")
def tiny(collect: Collect, tiny_model: Path) -> Imatrix:
    return collect(tiny_model, 8)


def differences(ours: Imatrix, theirs: Imatrix) -> dict[str, float]:
    """Of each entry of theirs, the largest difference over its largest value; infinite where the counts differ."""
    out = {}
    for name, entry in theirs.entries.items():
        mine = ours.entries[name]
        same = mine.in_sum2.shape == entry.in_sum2.shape and np.array_equal(mine.counts, entry.counts)
        out[name] = float(np.abs(mine.in_sum2 - entry.in_sum2).max() / entry.in_sum2.max()) if same else np.inf
    return out


def test_tiny_trunk_equals_llama_imatrix(tiny: Imatrix, shared: Path) -> None:
    theirs = read_imatrix(shared / "oracle" / "imatrix-tiny.gguf")
    worst = differences(tiny, theirs)
    assert len(worst) == 31
    assert max(worst.values()) < 1e-4, worst
    assert (tiny.chunk_count, tiny.chunk_size) == (theirs.chunk_count, theirs.chunk_size) == (8, 512)


def test_tiny_covers_what_llama_imatrix_never_runs(tiny: Imatrix, tiny_model: Path, shared: Path) -> None:
    """Every matrix of the MTP block, its projection included, and the output; the untied embedding is a lookup."""
    model = describe_model(read_header(tiny_model))
    wanted = collection_targets(model, output=True, mtp=True)
    assert set(tiny.entries) - set(read_imatrix(shared / "oracle" / "imatrix-tiny.gguf").entries) == HEAD | {"output.weight"}
    assert set(tiny.entries) == wanted.required
    assert wanted.lookups == ("token_embd.weight",)
    for name in HEAD | {"output.weight"}:
        entry = tiny.entries[name]
        assert entry.counts.tolist() == [8 * 512]
        assert (entry.in_sum2 > 0).all(), name
        assert tiny.lengths()[name] == next(t.shape[0] for t in model.header.tensors if t.name == name)


def test_output_sums_come_from_the_trunk_alone(tiny: Imatrix, collect: Collect, tiny_model: Path) -> None:
    """The head multiplies by the same output matrix, which must not show."""
    trunk = collect(tiny_model, 8, "imatrix.mtp=false")
    assert set(tiny.entries) - set(trunk.entries) == HEAD
    for name, entry in trunk.entries.items():
        np.testing.assert_array_equal(tiny.entries[name].in_sum2, entry.in_sum2)
        np.testing.assert_array_equal(tiny.entries[name].counts, entry.counts)


def test_experts_equal_llama_imatrix(collect: Collect, moe_model: Path, shared: Path) -> None:
    """Per expert, over a vocabulary that adds BOS; the tied embedding is the output matrix and has an entry."""
    ours = collect(moe_model, 4)
    worst = differences(ours, read_imatrix(shared / "oracle" / "imatrix-moe.gguf"))
    assert len(worst) == 16
    assert max(worst.values()) < 1e-4, worst
    assert set(ours.entries) - set(worst) == {"token_embd.weight"}
    experts = ours.entries["blk.0.ffn_up_exps.weight"]
    n_used = describe_model(read_header(moe_model)).n_expert_used
    assert n_used is not None
    assert len(experts.counts) > 1
    assert experts.counts.sum() == 4 * 512 * n_used


def test_smollm2_equals_llama_imatrix(collect: Collect, smollm2: Path, shared: Path) -> None:
    """The last block's FFN counts every row, although only some rows' logits would be needed."""
    facts = json.loads((shared / "oracle" / "oracle.json").read_text())["smollm2"]
    assert sha256_file(smollm2) == facts["model_sha256"]
    ours = collect(smollm2, facts["imatrix_chunks"])
    worst = differences(ours, read_imatrix(shared / "oracle" / "imatrix-smollm2.gguf"))
    assert len(worst) == 210
    assert max(worst.values()) < 1e-4, worst
    assert ours.entries["blk.29.ffn_down.weight"].counts.tolist() == [2 * 512]
    assert set(ours.entries) - set(worst) == {"token_embd.weight"}


def test_llama_quantize_reads_ours(tiny: Imatrix, tmp_path: Path) -> None:
    """The keys and tensors that its loader asks for (common/imatrix-loader.cpp), by the gguf library's eyes."""
    write_imatrix(tmp_path / "i.gguf", tiny)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    text = {name: bytes(field.parts[field.data[0]]).decode() for name, field in reader.fields.items()
            if field.types and field.types[-1] == gguf.GGUFValueType.STRING}
    assert (text["general.type"], text["imatrix.datasets"]) == ("imatrix", "calibration.txt")
    assert int(reader.fields["imatrix.chunk_count"].parts[-1][0]) == 8
    assert int(reader.fields["imatrix.chunk_size"].parts[-1][0]) == 512
    names = {t.name for t in reader.tensors}
    assert names == {f"{name}.{part}" for name in tiny.entries for part in ("in_sum2", "counts")}
    assert {t.tensor_type for t in reader.tensors} == {gguf.GGMLQuantizationType.F32}


def test_llama_quantize_itself_takes_ours(tiny: Imatrix, tiny_model: Path, tmp_path: Path) -> None:
    """Where llama.cpp's own tool is on the path."""
    tool = shutil.which("llama-quantize")
    if tool is None:
        pytest.skip("no llama-quantize on the path")
    write_imatrix(tmp_path / "i.gguf", tiny)
    done = subprocess.run([tool, "--imatrix", tmp_path / "i.gguf", "--tensor-type", "blk.4=IQ2_XXS", tiny_model,
                           tmp_path / "q.gguf", "Q4_K_M"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "have 40 importance matrix entries" in done.stdout + done.stderr
