"""Sums of squared activations per input column of every matrix, seen through llama.cpp's evaluation callback.

Equal to llama-imatrix (tools/imatrix/imatrix.cpp, collect_imatrix) on what that collects, and more: the output matrix (or the
tied embedding in its place), and every matrix of the MTP block, driven by the trunk's hidden rows and the next tokens.
Every position of a chunk is flagged for output: architectures that prune rows before the last block's FFN would else see half.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, EnvironmentFault
from quantkit.engine.library import ggml_base, load_library
from quantkit.engine.model import Context, Model, Tokens
from quantkit.engine.mtp_head import MtpHead
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState

Floats = npt.NDArray[np.float64]
_TENSOR_BYTES = 336


class Tensor(ctypes.Structure):
    """`ggml_tensor` of the pinned version (ggml/include/ggml.h)."""


Tensor._fields_ = [
    ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p), ("padding", ctypes.c_char * 8),
]


class Sums(NamedTuple):
    """What one matrix saw: in_sum2 (n_matrix, ne0) float64, sums of squares; counts (n_expert or 1,) int64, rows."""

    in_sum2: Floats
    counts: npt.NDArray[np.int64]


class Node(NamedTuple):
    """What a graph's end is found by: a node's name, and if it multiplies, its matrix, its input and the matrices in a tensor."""

    name: bytes
    weight: bytes = b""
    input: bytes = b""
    n_matrix: int = 0


class GraphPass:
    """One kind of graph, the trunk's or the head's: the matrices that are wanted of it, and where it may end.

    The last multiplication of a language model is by its output matrix, a fifth of all work in a small model with a large
    vocabulary. Its input is all that is wanted of it, so once a graph has been seen whole, the next ones stop there.
    """

    def __init__(self, wanted: frozenset[str], *, may_stop: bool = True) -> None:
        self.wanted = frozenset(name.encode() for name in wanted)
        self.stop, self.last = b"", b""  # the input of the last multiplication, and its matrix; empty: run to the end
        self.is_known = not may_stop
        self._nodes: list[Node] = []

    def see(self, node: Node) -> None:
        """Take the next node of the first graph."""
        self._nodes.append(node)

    def learn(self) -> None:
        """Find where the graph may end, after its first run."""
        nodes, self._nodes, self.is_known = self._nodes, [], True
        names = [node.name for node in nodes]
        if names and names[0] in names[1:]:  # of several micro-batches the first
            nodes = nodes[:names.index(names[0], 1)]
            names = names[:len(nodes)]
        multiplied = [i for i, node in enumerate(nodes) if node.weight]
        if not multiplied or names.count((last := nodes[multiplied[-1]]).input) != 1 or last.n_matrix != 1:
            return
        at = names.index(last.input)
        if all(i < at for i in multiplied[:-1] if nodes[i].weight in self.wanted):
            self.stop, self.last = last.input, last.weight


class Collector:
    """The callback and what it gathered since the last `take`, from the graphs of the pass that was begun last.

    Trunk and MTP passes share the output matrix, and its sums must come from the trunk alone.
    """

    def __init__(self) -> None:
        lib = load_library()
        if ctypes.sizeof(Tensor) != _TENSOR_BYTES:
            raise EnvironmentFault(f"expected ggml_tensor of {_TENSOR_BYTES} bytes, got {ctypes.sizeof(Tensor)} on this platform: "
                                   "importances cannot be collected here; pass a matrix with --imatrix")
        self._ggml = ggml_base(lib)
        ops = {self._ggml.ggml_op_name(i): i for i in range(64)}
        self._mul_mat, self._mul_mat_id = ops[b"MUL_MAT"], ops[b"MUL_MAT_ID"]
        self._sums: dict[str, Sums] = {}
        self._error: str | None = None
        self._pass = GraphPass(frozenset(), may_stop=False)
        self._seen: tuple[tuple[int, int, int], Sums] | None = None  # of the input seen last
        self.callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(self._see)

    @contextmanager
    def gather(self, graph: GraphPass) -> Iterator[None]:
        """Gather from what is decoded in the block."""
        self._pass, self._seen = graph, None
        yield
        if not graph.is_known:
            graph.learn()

    def take(self) -> dict[str, Sums]:
        """What was gathered since the last call.

        Raises:
            EngineError: an activation was not finite, or a tensor was not shaped as expected; names the tensor.
        """
        if self._error is not None:
            raise EngineError(self._error)
        taken, self._sums = self._sums, {}
        return taken

    def _see(self, pointer: int, ask: bool, _: Any) -> bool:
        """llama.cpp asks of every node whether it is wanted, and shows those that are; False to the latter ends the graph."""
        node, graph = Tensor.from_address(pointer), self._pass
        if ask and not graph.is_known:
            graph.see(self._describe(node))
        if graph.stop and node.name == graph.stop:
            if not ask and graph.last in graph.wanted:
                self._try(graph.last, lambda: self._dense(node, 1, 1))
            return ask
        if node.op != self._mul_mat and node.op != self._mul_mat_id:
            return not ask
        weight = node.src[0].contents
        if weight.name not in graph.wanted:
            return not ask
        if not ask:
            self._try(weight.name, lambda: self._multiplied(node, weight))
        return True

    def _describe(self, node: Tensor) -> Node:
        if node.op != self._mul_mat and node.op != self._mul_mat_id:
            return Node(node.name)
        weight = node.src[0].contents
        n_matrix = 0 if node.op == self._mul_mat_id else weight.ne[2] * weight.ne[3]
        return Node(node.name, weight.name or b"?", node.src[1].contents.name, n_matrix)

    def _try(self, name: bytes, sums_of: Callable[[], Sums]) -> None:
        """Add the sums of one multiplication; an exception cannot cross the C frames, so `take` raises it."""
        if self._error is not None:
            return
        try:
            more = sums_of()
            if not np.isfinite(more.in_sum2).all():
                column = int(np.flatnonzero(~np.isfinite(more.in_sum2).all(axis=0))[0])
                raise ValueError(f"expected finite activations, got one in column {column} that is not")
            held = self._sums.get(name.decode())
            self._sums[name.decode()] = more if held is None else Sums(held.in_sum2 + more.in_sum2, held.counts + more.counts)
        except Exception as error:
            self._error = f"{name.decode()}: {error}"

    def _multiplied(self, node: Tensor, weight: Tensor) -> Sums:
        """The sums that one multiplication adds; matrices side by side (attn_q, attn_k, attn_v) share their input and its sums."""
        source, ids = node.src[1].contents, node.src[2].contents if node.op == self._mul_mat_id else None
        key = (ctypes.addressof(source), ctypes.addressof(ids) if ids is not None else 0, weight.ne[2] * weight.ne[3])
        if self._seen is None or self._seen[0] != key:
            sums = self._dense(source, weight.ne[2], weight.ne[3]) if ids is None else self._experts(source, ids, weight.ne[2])
            self._seen = key, sums
        return self._seen[1]

    def _dense(self, source: Tensor, n_matrix: int, n_outer: int) -> Sums:
        """Rows of slab (i3, i2) of the input meet matrix (i3 mod n_outer, i2 mod n_matrix)."""
        x = self._activations(source)
        in_sum2 = np.zeros((n_matrix * n_outer, x.shape[3]))
        for i3 in range(x.shape[0]):
            for i2 in range(x.shape[1]):
                in_sum2[(i3 % n_outer) * n_matrix + i2 % n_matrix] += np.einsum("ij,ij->j", x[i3, i2], x[i3, i2])
        return Sums(in_sum2, np.array([x.shape[0] * x.shape[1] * x.shape[2] // len(in_sum2)], np.int64))

    def _experts(self, source: Tensor, ids: Tensor, n_expert: int) -> Sums:
        """x is (1, n_token, n_used or 1, ne0); ids is (n_token, n_used): the expert of each token's each slot."""
        x = self._activations(source)
        chosen = self._array(ids, np.dtype(np.int32))[0, 0]
        n_used = chosen.shape[1]
        order = np.argsort(chosen, axis=None, kind="stable")
        counts = np.bincount(chosen.ravel(), minlength=n_expert)
        in_sum2 = np.zeros((n_expert, x.shape[3]))
        end = 0
        for expert in np.flatnonzero(counts):
            start, end = end, end + counts[expert]
            token, slot = np.divmod(order[start:end], n_used)
            rows = x[0, token, slot % x.shape[2]]
            in_sum2[expert] = np.einsum("ij,ij->j", rows, rows)
        return Sums(in_sum2, counts.astype(np.int64))

    def _activations(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        if tensor.type != 0:
            raise ValueError(f"expected F32 activations, got ggml type {tensor.type}")
        return self._array(tensor, np.dtype(np.float32))

    def _array(self, tensor: Tensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A tensor as a numpy array of shape (ne3, ne2, ne1, ne0) with its strides; copied to the host if it is not there."""
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        n_bytes = dtype.itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if tensor.buffer and not self._ggml.ggml_backend_buffer_is_host(tensor.buffer):
            buffer = ctypes.create_string_buffer(n_bytes)
            self._ggml.ggml_backend_tensor_get(ctypes.addressof(tensor), buffer, 0, n_bytes)
        else:
            buffer = (ctypes.c_char * n_bytes).from_address(tensor.data)
        return np.ndarray(shape, dtype, memoryview(buffer), strides=strides)


class CollectSession:
    """A trunk context, and an MTP context beside it where the head is wanted, both under the collector."""

    def __init__(self, path: Path, settings: ContextSettings, offload: Offload, trunk: frozenset[str],
                 mtp: frozenset[str]) -> None:
        self._collector = Collector()
        self._n_ctx = settings.n_ctx
        self._trunk_pass = GraphPass(trunk)
        self._model = Model(path, load_mtp=bool(mtp), use_extra_bufts=settings.use_extra_bufts, offload=offload)
        self._context = Context(self._model, settings, n_outputs_max=min(settings.n_batch, settings.n_ctx),
                                cb_eval=self._collector.callback)
        self._head = MtpHead(self._model, self._context, settings, n_outputs_max=self._context.n_batch,
                             cb_eval=self._collector.callback) if mtp else None
        # each of several NextN blocks has a graph of its own
        self._head_pass = GraphPass(mtp, may_stop=self._head is not None and self._head.n_nextn == 1)

    def collect(self, tokens: Tokens, chunk: int) -> dict[str, Sums]:
        """Sums over one chunk.

        Raises:
            EngineError: names the tensor and the chunk.
        """
        ids = tokens[chunk * self._n_ctx:(chunk + 1) * self._n_ctx].copy()
        if self._model.add_bos:
            ids[0] = self._model.bos
        self._context.clear()
        if self._head is not None:
            self._head.clear()
        try:
            for pos in range(0, len(ids), self._context.n_batch):
                block = ids[pos:pos + self._context.n_batch]
                with self._collector.gather(self._trunk_pass):
                    self._context.decode(block, pos, slice(None))
                if self._head is not None:
                    with self._collector.gather(self._head_pass):
                        self._head.follow(block, pos, scored=True)
            return self._collector.take()
        except EngineError as error:
            raise EngineError(f"chunk {chunk} of the calibration text: {error}") from error

    def close(self) -> None:
        """Free contexts, then weights."""
        if self._head is not None:
            self._head.close()
        self._context.close()
        self._model.close()


def open_collect(state: WorkerState, *, path: Path, settings: ContextSettings, offload: Offload, trunk: frozenset[str],
                 mtp: frozenset[str]) -> None:
    """Command: load a model for collection of the named matrices."""
    state.open(lambda: CollectSession(path, settings, offload, trunk, mtp))


def collect(state: WorkerState, *, tokens: Tokens, chunks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], dict[str, Sums]]]:
    """Command: the sums over a group of chunks, added in the chunks' order; one item."""
    session = state.session
    assert isinstance(session, CollectSession)
    total: dict[str, Sums] = {}
    for chunk in chunks:
        for name, sums in session.collect(tokens, chunk).items():
            if name in total:
                total[name] = Sums(total[name].in_sum2 + sums.in_sum2, total[name].counts + sums.counts)
            else:
                total[name] = sums
    yield chunks, total
