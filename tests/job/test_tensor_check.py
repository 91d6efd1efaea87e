from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from quantkit.core.errors import EngineError
from quantkit.job.tensor_check import BOUNDS, check_quantized, dequantize, measure_error
from quantkit.spec.gguf_header import read_header
from quantkit.spec.quantizable import WRITABLE_TYPES
from quantkit.spec.tensor_types import TENSOR_TYPES

NAME = "blk.0.ffn_up_exps.weight"
Weights = npt.NDArray[np.float32]


def write(path: Path, weights: Weights, type_name: str) -> Path:
    kind = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(NAME, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check(folder: Path, change: Callable[[Weights], None], *, n_expert: int = 4, type_name: str = "Q4_0") -> tuple[float, float]:
    """Errors of a tensor whose weights were changed before they were quantized."""
    weights = np.random.default_rng(0).standard_normal((n_expert, 64, 512), dtype=np.float32)
    source = write(folder / "base.gguf", weights, "F32")
    change(weights)
    target = write(folder / "q.gguf", weights, type_name)
    (error,) = check_quantized(read_header(source), target, {NAME: type_name})
    return error.relative_error, error.worst_run_error


def keep(_: Weights) -> None:
    pass


def zero_all(w: Weights) -> None:
    w[:] = 0


def zero_an_expert(w: Weights) -> None:
    w[2] = 0


def zero_256_columns(w: Weights) -> None:
    w[:, :, 256:] = 0


def zero_256_columns_of_an_expert(w: Weights) -> None:
    w[3, :, :256] = 0


@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_0", "Q4_0"])
def test_what_is_quantized_well_passes(tmp_path: Path, type_name: str) -> None:
    whole, worst = check(tmp_path, keep, type_name=type_name)
    assert 0 < whole <= worst < BOUNDS[type_name].tensor / 2


@pytest.mark.parametrize("change", [zero_all, zero_an_expert, zero_256_columns, zero_256_columns_of_an_expert])
def test_zeros_do_not(tmp_path: Path, change: Callable[[Weights], None]) -> None:
    with pytest.raises(EngineError, match=rf"{NAME} lost its weights as Q8_0: .* \(1\.000\); zeros"):
        check(tmp_path, change, type_name="Q8_0")


def test_every_expert_is_sampled_where_there_are_more_than_rows_to_sample(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="lost its weights"):
        check(tmp_path, zero_an_expert, n_expert=100)


def test_columns_that_were_next_to_nothing_may_be_lost(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((1, 64, 512), dtype=np.float32)
    weights[:, :, :256] *= 1e-6
    source = write(tmp_path / "base.gguf", weights, "F32")
    weights[:, :, :256] = 0
    target = write(tmp_path / "q.gguf", weights, "Q8_0")
    assert check_quantized(read_header(source), target, {NAME: "Q8_0"})[0].worst_run_error < 0.01


def test_a_tensor_of_zeros_stays_one(tmp_path: Path) -> None:
    zeros = np.zeros((1, 64, 512), np.float32)
    source = write(tmp_path / "base.gguf", zeros, "F32")
    target = write(tmp_path / "q.gguf", zeros, "Q4_0")
    assert check_quantized(read_header(source), target, {NAME: "Q4_0"})[0].relative_error == 0.0


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def spoil(w: Weights) -> None:
        w[:, 0, 0] = np.inf

    with pytest.raises(EngineError, match=f"{NAME} holds values that are not finite as F16"):
        check(tmp_path, spoil, type_name="F16")


@pytest.mark.parametrize(("types", "message"), [
    ({NAME: "Q8_0"}, f"found 1 others, the first: {NAME} Q4_0 instead of Q8_0"),
    ({NAME: "Q4_0", "x": "F32"}, "x missing instead of F32"),
    ({}, f"{NAME} is not planned")])
def test_types_other_than_planned_are_named(tmp_path: Path, types: dict[str, str], message: str) -> None:
    weights = np.ones((1, 64, 512), np.float32)
    source, target = write(tmp_path / "base.gguf", weights, "F32"), write(tmp_path / "q.gguf", weights, "Q4_0")
    with pytest.raises(EngineError, match=message):
        check_quantized(read_header(source), target, types)


def test_the_error_is_the_share_of_energy_lost(tmp_path: Path) -> None:
    weights = np.full((1, 64, 512), 2, np.float32)
    source = read_header(write(tmp_path / "base.gguf", weights, "F32"))
    weights[:, :, :128] = 1
    changed = read_header(write(tmp_path / "q.gguf", weights, "F16"))
    error = measure_error(source, source.tensors[0], changed, changed.tensors[0])
    assert (error.relative_error, error.worst_run_error) == pytest.approx((0.25, np.sqrt(1 / 8)))


def test_every_type_that_can_be_written_has_a_bound_and_can_be_read_back() -> None:
    for name in WRITABLE_TYPES:
        kind = TENSOR_TYPES[name]
        raw = np.zeros((2, kind.type_size * 3), np.uint8)
        assert dequantize(raw, kind).shape == (2, 3 * kind.block_size)
        assert 0 <= BOUNDS[name].tensor <= BOUNDS[name].run < 1


def test_types_of_one_and_two_bits_read_as_llama_cpp_reads_them() -> None:
    """ggml-quants.c: bits from the lowest; Q1_0 0 is -d, 1 is d; Q2_0 0 to 3 are -d to 2d."""
    two = np.frombuffer(np.float16(2).tobytes(), np.uint8)
    q1 = np.concatenate([two, [0b0000_0101], np.zeros(15, np.uint8)])[None].astype(np.uint8)
    assert dequantize(q1, TENSOR_TYPES["Q1_0"])[0, :5].tolist() == [2, -2, 2, -2, -2]
    q2 = np.concatenate([two, [0b1110_0100], np.zeros(15, np.uint8)])[None].astype(np.uint8)
    assert dequantize(q2, TENSOR_TYPES["Q2_0"])[0, :5].tolist() == [-2, 0, 2, 4, -2]
