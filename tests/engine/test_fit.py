"""llama.cpp's own account of memory: read from its log, and equal to the formulas where those apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.core.errors import EngineError
from quantkit.core.units import MIB
from quantkit.engine.fit import read_cache_sizes, simulate
from quantkit.engine.pool import WorkerPool
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import ContextMemory, context_memory
from quantkit.spec.model import describe_model
from tests.gguf_factory import tiny_gguf

LOG = [
    "llama_kv_cache:        CPU KV buffer size =     0.00 MiB",
    "llama_kv_cache: size = 2048.00 MiB ( 32768 cells,  16 layers,  1/1 seqs), K (f16): 1024.00 MiB, V (f16): 1024.00 MiB",
    "llama_kv_cache: size =   12.50 MiB (   768 cells,  10 layers,  1/1 seqs), K (f16):    6.25 MiB, V (f16):    6.25 MiB",
    "llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers,  1 seqs  0 rs_seq), R (f32):    5.62 MiB",
    "llama_kv_cache_dsv4: CPU DSV4 csa state buffer size =     3.50 MiB",
]


def test_every_cache_of_a_context_is_counted() -> None:
    """A model with sliding windows has two caches, one with an index has more; each prints its own line."""
    assert read_cache_sizes(LOG) == (round((2048 + 12.5 + 3.5) * MIB), round(149.62 * MIB))


@pytest.mark.engine
@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
def test_formulas_agree_with_the_library(tiny_model: Path, moe_model: Path, kv_type: str) -> None:
    with WorkerPool(1) as pool:
        for path in (tiny_model, moe_model):
            model = describe_model(read_header(path))
            told: list[ContextMemory] = pool.call("memory", simulate, path=path, n_ctx=(8192, 32768), kv_type=kv_type, n_ubatch=512)
            for found in told:
                expected = context_memory(model, found.n_ctx, kv_type)
                assert found.kv_bytes == pytest.approx(expected.kv_bytes, abs=0.0051 * MIB)  # it prints hundredths
                assert found.recurrent_bytes == pytest.approx(expected.recurrent_bytes, abs=0.0051 * MIB)
                assert found.compute_bytes == pytest.approx(expected.compute_bytes, rel=0.25)
                assert found.source == "llama.cpp"


@pytest.mark.engine
def test_a_refusal_is_the_librarys_own_words(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "no.gguf", {"a": ((32,), "F32")})
    with WorkerPool(1) as pool, pytest.raises(EngineError, match=r"llama\.cpp cannot simulate .*no\.gguf: .*load"):
        pool.call("memory", simulate, path=tmp_path / "no.gguf", n_ctx=(512,), kv_type="F16", n_ubatch=512)
