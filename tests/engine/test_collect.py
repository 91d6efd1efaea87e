from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.core.errors import EngineError
from quantkit.engine.collect import GraphPass, Node, Sums, collect, open_collect
from quantkit.engine.lockstep import close_group, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.imatrix import collection_targets
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from tests.engine.collect_commands import collect_whole, stops
from tests.gguf_factory import tiny_model as factory_model

DEMO = Path(__file__).parents[2] / "quantkit" / "data" / "demo"
SETTINGS = ContextSettings(n_ctx=128, n_batch=128, n_ubatch=128, type_k="F16", type_v="F16", flash_attn=True, use_extra_bufts=True,
                           n_threads=2)


def matrix(name: str, weight: str, source: str, n_matrix: int = 1) -> Node:
    return Node(name.encode(), weight.encode(), source.encode(), n_matrix)


def learned(nodes: list[Node], wanted: set[str]) -> tuple[bytes, bytes]:
    graph = GraphPass(frozenset(wanted))
    for node in nodes:
        graph.see(node)
    graph.learn()
    return graph.stop, graph.last


BODY = [Node(b"embd"), matrix("q", "attn_q", "norm"), Node(b"result_norm"), matrix("logits", "output", "result_norm")]


class TestWhereAGraphEnds:
    def test_at_the_input_of_its_last_multiplication(self) -> None:
        assert learned(BODY, {"attn_q"}) == (b"result_norm", b"output")
        assert learned(BODY, {"attn_q", "output"}) == (b"result_norm", b"output")

    def test_of_several_micro_batches_the_first_counts(self) -> None:
        assert learned(BODY * 3, {"attn_q"}) == (b"result_norm", b"output")

    @pytest.mark.parametrize("nodes", [
        [], [Node(b"embd")],
        [*BODY[:2], Node(b"result_norm"), *BODY[2:]],  # a name that two nodes have
        [*BODY[:3], matrix("late", "attn_v", "result_norm"), BODY[3]],  # something wanted behind it
        [*BODY[:3], matrix("logits", "output", "result_norm", 2)],  # not one matrix
        [*BODY[:3], matrix("logits", "output", "elsewhere")],
    ])
    def test_nowhere_if_that_could_lose_something(self, nodes: list[Node]) -> None:
        assert learned(nodes, {"attn_q", "attn_v"}) == (b"", b"")

    def test_what_is_not_wanted_may_come_late(self) -> None:
        nodes = [*BODY[:3], matrix("late", "attn_v", "result_norm"), BODY[3]]
        assert learned(nodes, {"attn_q"}) == (b"result_norm", b"output")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    with WorkerPool(1, tmp_path_factory.mktemp("logs")) as pool:
        yield pool


@pytest.fixture(scope="module")
def demo(pool: WorkerPool) -> dict[str, Any]:
    return arguments(pool, DEMO / "tiny-qwen35-mtp-BF16.gguf")


def arguments(pool: WorkerPool, path: Path) -> dict[str, Any]:
    """What a collection over the demo's calibration text needs."""
    wanted = collection_targets(describe_model(read_header(path)), output=True, mtp=True)
    ids = pool.call("tokenize", tokenize, path=path, text=(DEMO / "demo-calibration.txt").read_bytes()).ids
    return {"path": path, "settings": SETTINGS, "trunk": wanted.trunk, "mtp": wanted.mtp, "tokens": ids}


def assert_same(ours: dict[str, Sums], theirs: dict[str, Sums], rtol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name].counts, theirs[name].counts)
        np.testing.assert_allclose(ours[name].in_sum2, theirs[name].in_sum2, rtol=rtol, atol=rtol * theirs[name].in_sum2.max())


@pytest.mark.engine
class TestCollection:
    def test_trunk_and_head_end_before_the_output_matrix(self, pool: WorkerPool, demo: dict[str, Any]) -> None:
        assert pool.call("stops", stops, **demo) == ((b"result_norm", b"output.weight"),
                                                     (b"mtp_shared_head_norm", b"output.weight"))

    def test_a_graph_that_ends_early_loses_nothing(self, pool: WorkerPool, demo: dict[str, Any]) -> None:
        """Head included: what it sees of the trunk is the same."""
        short = pool.call("short", collect_whole, chunks=(0, 1, 2), may_stop=True, **demo)
        whole = pool.call("whole", collect_whole, chunks=(0, 1, 2), may_stop=False, **demo)
        for ours, theirs in zip(short, whole, strict=True):
            assert_same(ours, theirs)

    def test_so_with_experts(self, pool: WorkerPool, moe_model: Path) -> None:
        own = arguments(pool, moe_model)
        short, whole = (pool.call("experts", collect_whole, chunks=(0, 1), may_stop=may_stop, **own) for may_stop in (True, False))
        assert_same(short[1], whole[1])
        assert short[1]["token_embd.weight"].counts.tolist() == [128]

    def test_small_batches_sum_to_the_same(self, pool: WorkerPool, demo: dict[str, Any]) -> None:
        one, = pool.call("one", collect_whole, chunks=(1,), may_stop=True, **demo)
        small = replace(SETTINGS, n_batch=64, n_ubatch=32)
        _, parts = pool.call("parts", collect_whole, chunks=(0, 1), may_stop=True, **{**demo, "settings": small})
        assert_same(parts, one, rtol=1e-3)  # other shapes, other kernels
        assert parts["blk.4.nextn.eh_proj.weight"].counts.tolist() == [128]

    def test_chunks_1_to_4_are_the_sum_of_1_to_2_and_3_to_4(self, pool: WorkerPool, demo: dict[str, Any]) -> None:
        """As a merge adds them: rounded to float32 before."""
        def over(*chunks: int) -> dict[str, Sums]:
            (done, sums), = pool.stream("collect", collect, [{"tokens": demo["tokens"], "chunks": chunks}])
            assert done == chunks
            return dict(sums)

        pool.call("open", open_collect, offload=Offload(), **{key: value for key, value in demo.items() if key != "tokens"})
        whole, first, second = over(0, 1, 2, 3), over(0, 1), over(2, 3)
        pool.call("close", close_group)
        both = {name: Sums((a.in_sum2.astype(np.float32) + second[name].in_sum2.astype(np.float32)).astype(np.float64),
                           a.counts + second[name].counts) for name, a in first.items()}
        assert_same(both, whole, rtol=1e-6)

    def test_an_activation_that_is_not_finite_names_tensor_and_chunk(self, pool: WorkerPool, tmp_path: Path) -> None:
        """The embedding of a token that the second chunk has and the first has not is spoilt."""
        path = factory_model(tmp_path / "m.gguf")[0]
        own = arguments(pool, path)
        ids = own["tokens"]
        token = next(int(i) for i in ids[128:256] if i not in ids[:128])
        spoil(path, "token_embd.weight", row=token)
        with pytest.raises(EngineError, match=r"^chunk 1 of the calibration text: blk\.0\.attn_[qkv]\.weight: expected finite "
                                              r"activations, got one in column \d+ that is not"):
            pool.call("collect", collect_whole, chunks=(0, 1), may_stop=True, **own)

    @pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "output_norm.weight"])
    def test_so_inside_the_trunk_and_before_the_output(self, pool: WorkerPool, tmp_path: Path, name: str) -> None:
        path = factory_model(tmp_path / "m.gguf")[0]
        spoil(path, name, row=0)
        seen = {"blk.0.ffn_down.weight": r"blk\.1\.attn_", "output_norm.weight": r"output\.weight"}[name]
        with pytest.raises(EngineError, match=rf"^chunk 0 of the calibration text: {seen}"):
            pool.call("collect", collect_whole, chunks=(0, 1), may_stop=True, **arguments(pool, path))


def spoil(path: Path, name: str, row: int) -> None:
    """Write infinities over one row of a tensor."""
    tensor = next(t for t in read_header(path).tensors if t.name == name)
    row_bytes = tensor.type.row_bytes(tensor.shape[0])
    inf = {"BF16": b"\x80\x7f", "F32": b"\x00\x00\x80\x7f"}[tensor.type.name]
    data = bytearray(path.read_bytes())
    start = tensor.offset + row * row_bytes
    data[start:start + row_bytes] = inf * (row_bytes // len(inf))
    path.write_bytes(data)
