"""Sums of squared activations per input column of every matrix, seen through llama.cpp's evaluation callback.

Equal to llama-imatrix (tools/imatrix/imatrix.cpp, collect_imatrix) on what that collects, and more: the output matrix (or the
tied embedding in its place), and every matrix of the MTP block, driven by the trunk's hidden rows and the next tokens.
Every position of a chunk is flagged for output: architectures that prune rows before the last block's FFN would else see half.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
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
    """What one matrix saw: in_sum2 (n_expert, ne0) float64, sums of squares; counts (n_expert,) int64, rows."""

    in_sum2: Floats
    counts: npt.NDArray[np.int64]


class Collector:
    """The callback and what it gathered since the last `take`.

    `wanted` decides by name which matrices are gathered: trunk and MTP passes share the output matrix, and its sums must come
    from the trunk alone.
    """

    def __init__(self) -> None:
        lib = load_library()
        if ctypes.sizeof(Tensor) != _TENSOR_BYTES:
            raise EnvironmentFault(f"expected ggml_tensor of {_TENSOR_BYTES} bytes, got {ctypes.sizeof(Tensor)} on this platform")
        self._ggml = ggml_base(lib)
        ops = {self._ggml.ggml_op_name(i): i for i in range(64)}
        self._mul_mat, self._mul_mat_id = ops[b"MUL_MAT"], ops[b"MUL_MAT_ID"]
        self._sums: dict[str, Sums] = {}
        self._error: str | None = None
        self.wanted: frozenset[bytes] = frozenset()
        self.callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(self._see)

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
        node = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
        if node.op != self._mul_mat and node.op != self._mul_mat_id:
            return not ask
        weight = node.src[0].contents
        if weight.name not in self.wanted:
            return not ask
        if ask:
            return True
        if self._error is None:
            try:
                self._add(node, weight)
            except Exception as error:  # an exception cannot cross the C frames; `take` raises it
                self._error = f"{weight.name.decode()}: {error}"
        return True

    def _add(self, node: Tensor, weight: Tensor) -> None:
        x = self._activations(node.src[1])
        name = weight.name.decode()
        n_expert = weight.ne[2] * weight.ne[3]
        sums = self._sums.setdefault(name, Sums(np.zeros((n_expert, weight.ne[0])),
                                                np.zeros(n_expert if node.op == self._mul_mat_id else 1, np.int64)))
        if node.op == self._mul_mat_id:
            self._add_experts(sums, x, self._ids(node.src[2]))
        else:
            for i3 in range(x.shape[0]):
                for i2 in range(x.shape[1]):
                    matrix = (i3 % weight.ne[3]) * weight.ne[2] + i2 % weight.ne[2]
                    sums.in_sum2[matrix] += np.einsum("ij,ij->j", x[i3, i2], x[i3, i2])
            sums.counts[0] += x.shape[0] * x.shape[1] * x.shape[2] // n_expert
        if not np.isfinite(sums.in_sum2).all():
            raise ValueError("an activation is not finite")

    @staticmethod
    def _add_experts(sums: Sums, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> None:
        """x is (1, n_token, n_used or 1, ne0); ids is (n_token, n_used): the expert of each token's each slot."""
        for slot in range(ids.shape[1]):
            rows = x[0, :, slot % x.shape[2]]
            for expert in np.unique(ids[:, slot]):
                chosen = rows[ids[:, slot] == expert]
                sums.in_sum2[expert] += np.einsum("ij,ij->j", chosen, chosen)
                sums.counts[expert] += len(chosen)

    def _activations(self, source: Any) -> npt.NDArray[np.float32]:
        tensor = source.contents
        if tensor.type != 0:
            raise ValueError(f"expected F32 activations, got ggml type {tensor.type}")
        return self._array(source, np.dtype(np.float32))

    def _ids(self, source: Any) -> npt.NDArray[np.int32]:
        ids = self._array(source, np.dtype(np.int32))
        return np.ascontiguousarray(ids[0, 0])

    def _array(self, source: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A tensor as a numpy array of shape (ne3, ne2, ne1, ne0) with its strides; copied to the host if it is not there."""
        tensor = source.contents
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
        self._trunk_names = frozenset(name.encode() for name in trunk)
        self._mtp_names = frozenset(name.encode() for name in mtp)
        self._model = Model(path, load_mtp=bool(mtp), use_extra_bufts=settings.use_extra_bufts, offload=offload)
        self._context = Context(self._model, settings, n_outputs_max=min(settings.n_batch, settings.n_ctx),
                                cb_eval=self._collector.callback)
        self._head = MtpHead(self._model, self._context, settings, n_outputs_max=self._context.n_batch,
                             cb_eval=self._collector.callback) if mtp else None

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
                self._collector.wanted = self._trunk_names
                self._context.decode(block, pos, slice(None))
                if self._head is not None:
                    self._collector.wanted = self._mtp_names
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
