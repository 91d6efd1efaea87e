"""Names at their limits: tensors of 63 bytes, files of 255, and letters of any script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from quantkit.core.errors import GgufError, ImatrixError, InputError
from quantkit.core.files import temp_path, write_atomic
from quantkit.job.evaluation import read_subject
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.progress import Silent
from quantkit.job.standalone import quantize_to_files
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.spec.plan_records import as_mapping
from quantkit.spec.protocol import load_protocol
from tests.cli.test_main import call
from tests.gguf_factory import model_metadata, model_tensors, raw_gguf, raw_tensor, tiny_gguf, tiny_model
from tests.spec.plan_models import resolve, rule
from tests.spec.test_plan_engine import dry_run, model_at

LONGEST_TENSOR = "blk.0." + "x" * 50 + ".weight"  # 63 bytes; with the NUL they fill what ggml has for a name
LONGEST_FILE = "mödel " + "ü" * 121 + ".gguf"


def test_names_are_as_long_as_can_be() -> None:
    assert len(LONGEST_TENSOR.encode()) == 63
    assert len(LONGEST_FILE.encode()) in (254, 255)


@pytest.mark.engine
def test_a_tensor_name_of_63_bytes_is_planned_and_quantized(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", {**model_tensors(n_embd=256, n_block=1), LONGEST_TENSOR: ((256, 256), "BF16")},
                     model_metadata(n_embd=256, n_block=1))[0]
    plan = resolve(model_at(path), rule(LONGEST_TENSOR, "Q8_0"))
    assert as_mapping(plan.rows)[LONGEST_TENSOR] == "Q8_0"
    assert dry_run(path, "Q4_K_M", dict(plan.override_patterns()))[0] == as_mapping(plan.rows)


def test_a_tensor_name_of_64_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf([], [raw_tensor(LONGEST_TENSOR + "x")], data=bytes(128)))
    with pytest.raises(GgufError, match="at most 63"):
        read_header(path)


def entries(name: str) -> dict[str, ImatrixEntry]:
    import numpy as np

    return {name: ImatrixEntry(in_sum2=np.ones((1, 32), np.float32), counts=np.ones(1, np.float32))}


def matrix_of(name: str) -> Imatrix:
    return Imatrix(entries=entries(name), chunk_count=1, chunk_size=64, datasets=("text.txt",), legacy=False)


def test_importances_of_a_long_name_are_kept_or_refused_and_never_cut(tmp_path: Path) -> None:
    fits = LONGEST_TENSOR[: 63 - len(".in_sum2")]
    write_imatrix(tmp_path / "fits.gguf", matrix_of(fits))
    assert list(read_imatrix(tmp_path / "fits.gguf").entries) == [fits]
    with pytest.raises(ImatrixError, match="tensor names of at most 55 bytes fit the format"):
        write_imatrix(tmp_path / "no.gguf", matrix_of(LONGEST_TENSOR))
    assert not (tmp_path / "no.gguf").exists()


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "𝄞" * 63, "a b\tc" + "\u202e" * 80])
def test_temporary_names_fit_the_file_system(tmp_path: Path, name: str) -> None:
    assert len(os.fsencode(temp_path(tmp_path / name).name)) <= 255
    write_atomic(tmp_path / name, b"whole")
    assert (tmp_path / name).read_bytes() == b"whole"


@pytest.mark.engine
@pytest.mark.parametrize("verb", [
    ["quantize", "-t", "Q8_0"], ["imatrix", "--set", "imatrix.chunks=first", "--set", "imatrix.n_chunk=2"]],
    ids=lambda verb: verb[0])
def test_files_of_the_longest_name_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: Sequence[str]) -> None:
    base = tiny_model(tmp_path / LONGEST_FILE.replace("mödel", "bäse "), n_embd=256, n_ff=256)[0]
    code, _, err = call(capsys, *verb, "-b", base, "-p", "demo-v1", "-o", tmp_path / LONGEST_FILE)
    assert (code, "Traceback" in err) == (0, False), err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([base.name, LONGEST_FILE])


@pytest.mark.engine
def test_a_run_of_a_model_of_the_longest_name(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / LONGEST_FILE, n_embd=256, n_ff=256)[0]
    protocol = load_protocol("demo-v1", ["eval.chunks=spread", "eval.n_chunk=8"])
    result = run_ladder(base, protocol, tmp_path / "a rün of 走", ["Q8_0"], Silent(), RunOptions(n_workers=1))
    assert result.failed == {}
    names = [path.name for path in result.folder.path.rglob("*")]
    assert max(len(os.fsencode(name)) for name in names) <= 255
    assert [name for name in names if name.endswith(".tmp")] == []
    assert next(result.folder.quants.iterdir()).name.startswith("mödel ")


def test_a_file_name_that_is_not_utf8_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf"))
    tiny_model(path)
    with pytest.raises(InputError, match=r"expected a file name in UTF-8, got 'm\\udcff\.gguf': rename the file"):
        read_subject(path, "base")


def test_a_tier_is_not_written_to_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "tiny-BF16.gguf")[0]
    target = Path(os.fsdecode(os.fsencode(tmp_path) + b"/q\xff.gguf"))
    with pytest.raises(InputError, match=r"expected a file name in UTF-8, got 'q\\udcff\.gguf': rename the file"):
        quantize_to_files(base, load_protocol("demo-v1"), {"Q8_0": target}, Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-BF16.gguf"]
