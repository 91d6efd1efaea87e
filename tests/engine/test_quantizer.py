"""What reaches `llama_model_quantize`: defaults, terminators, values that live long enough; and its words when it refuses."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import Arguments, dry_run, quantize
from quantkit.spec.gguf_header import read_header
from quantkit.spec.tensor_types import FTYPES
from tests.gguf_factory import tiny_model


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "base.gguf", n_embd=256, n_ff=256)[0]


@pytest.mark.slow
def test_arrays_end_with_their_terminators_and_outlive_what_they_were_made_of(llama_cpp: Any) -> None:
    arguments = Arguments(llama_cpp, ftype=15, n_threads=2, patterns={"^a$": 8}, imatrix={"a": np.arange(3, dtype=np.float32)},
                          metadata={"k.one": "text", "k.two": 7})
    gc.collect()
    params = arguments.params
    assert (params.ftype, params.nthread) == (15, 2)
    assert (params.tt_overrides[0].pattern, params.tt_overrides[0].type, params.tt_overrides[1].pattern) == (b"^a$", 8, None)
    assert (params.imatrix[0].name, params.imatrix[0].size, params.imatrix[1].name) == (b"a", 3, None)
    assert params.imatrix[0].data[:3] == [0.0, 1.0, 2.0]
    assert [params.kv_overrides[i].key for i in range(3)] == [b"k.one", b"k.two", b""]
    assert params.kv_overrides[0].value.val_str == b"text"
    assert params.kv_overrides[1].value.val_i64 == 7


def test_what_is_not_given_stays_at_the_librarys_default(llama_cpp: Any) -> None:
    params = Arguments(llama_cpp, ftype=7, n_threads=1, patterns={}, imatrix={}, metadata={}).params
    assert not params.tt_overrides
    assert not params.imatrix
    assert not params.kv_overrides
    assert (params.output_tensor_type, params.token_embedding_type) == (43, 43)
    assert params.quantize_output_tensor


@pytest.mark.parametrize(("value", "message"), [("x" * 128, "at most 127 bytes, got 128"), (-1, "got -1"),
                                                (2**32, "got 4294967296")])
def test_metadata_that_the_library_would_cut_is_refused(llama_cpp: Any, value: int | str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Arguments(llama_cpp, ftype=7, n_threads=1, patterns={}, imatrix={}, metadata={"key": value})


@pytest.mark.engine
def test_three_failures_have_three_messages(base: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"source": base, "n_threads": 1, "imatrix": {}, "metadata": {}}
    seen = set()
    with WorkerPool(1, tmp_path / "logs") as pool:
        cases: list[dict[str, Any]] = [{"ftype": 999, "patterns": {}, "target": tmp_path / "a.gguf"},
                                       {"ftype": 15, "patterns": {"(": 8}, "target": tmp_path / "a.gguf"},
                                       {"ftype": 15, "patterns": {}, "target": tmp_path / "missing" / "a.gguf"}]
        for own in cases:
            with pytest.raises(EngineError) as caught:
                pool.call("quantize", quantize, on_item=None, **common, **own)
            seen.add(str(caught.value))
    assert len(seen) == 3
    assert any("invalid output file type 999" in text for text in seen)


@pytest.mark.engine
def test_the_dry_run_says_what_the_real_run_writes(base: Path, tmp_path: Path) -> None:
    with WorkerPool(1, tmp_path / "logs") as pool:
        types = pool.call("dry run", dry_run, source=base, ftype=FTYPES["Q4_K_M"].id, imatrix_names=())
        pool.call("quantize", quantize, source=base, target=tmp_path / "q.gguf", ftype=FTYPES["Q4_K_M"].id, n_threads=2,
                  patterns={}, imatrix={}, metadata={"quantize.note": "ä text"})
    header = read_header(tmp_path / "q.gguf")
    assert types == {tensor.name: tensor.type.name for tensor in header.tensors}
    assert header.metadata["quantize.note"] == "ä text"
