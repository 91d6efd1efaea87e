"""A model and a context of llama.cpp, as little of them as the project needs. Worker processes only.

One sequence per decode, memory cleared between chunks: several sequences in one micro-batch have changed the output of
recurrent models (llama.cpp#29002), and a state left over from the chunk before always does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError, InputError
from quantkit.engine.library import load_library, tap
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.vetted import native_path, native_paths
from quantkit.measure.slices import Piece
from quantkit.spec.tensor_types import TENSOR_TYPES

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class Model:
    """Weights and vocabulary of one GGUF file.

    Args:
        path: a GGUF file, or the first part of a split one.
        splits: all files of the model in order, `path` the first, where they are not named as llama.cpp names the parts of one.
        load_mtp: load the MTP block too; an MTP context on a model loaded without it aborts the process.
        use_extra_bufts: let the CPU backend repack weights (copies in private memory, other kernels, other rounding).

    Raises:
        GgufError: the header does not pass the reader, see `vetted`.
        EngineError: the library refused the file; holds its own words.
    """

    def __init__(self, path: Path, *, load_mtp: bool = False, use_extra_bufts: bool = True, vocab_only: bool = False,
                 offload: Offload = Offload(), splits: Sequence[Path] = ()) -> None:  # noqa: B008 - frozen
        lib = load_library()
        self._lib = lib
        self.path = path
        params = lib.llama_model_default_params()
        params.n_gpu_layers = offload.n_gpu_layers
        params.main_gpu = offload.main_gpu
        self._tensor_split = _tensor_split(lib, offload.tensor_split)
        if self._tensor_split is not None:
            params.tensor_split = self._tensor_split
        params.use_extra_bufts = use_extra_bufts
        params.load_mtp = load_mtp
        params.vocab_only = vocab_only
        self.handle: Any = (_load_splits(lib, splits, params) if splits
                            else lib.llama_model_load_from_file(native_path(path), params))
        if not self.handle:
            raise EngineError(f"llama.cpp cannot load {path}: {tap.last_error()}; make or fetch the file again")
        self._vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self.n_embd = int(lib.llama_model_n_embd(self.handle))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self.bos = int(lib.llama_vocab_bos(self._vocab))

    def tokenize(self, text: bytes, *, add_special: bool = True, parse_special: bool = False) -> Tokens:
        """All token ids of a text, shape (n_tokens,) int32; specials in the text stay text unless `parse_special`.

        Raises:
            InputError: the text is not UTF-8, or longer than 2^31 bytes.
        """
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"expected a UTF-8 text, found byte 0x{text[error.start]:02x} at offset {error.start}: convert "
                             "the text") from error
        if len(text) >= 2**31:
            raise InputError(f"expected a text below 2 GiB, got {len(text)} bytes: use a part of it")
        ids = np.empty(len(text) // 2 + 16, np.int32)  # mostly enough, so that the text is tokenized once
        n = self._tokenize(text, ids, add_special, parse_special)
        if n < 0:
            ids = np.empty(-n, np.int32)
            if self._tokenize(text, ids, add_special, parse_special) != -n:
                raise EngineError(f"llama.cpp tokenized one text to different lengths with {self.path}: run it again")
            return ids
        return ids[:n].copy()

    def _tokenize(self, text: bytes, ids: Tokens, add_special: bool, parse_special: bool) -> int:
        """The number of tokens, negative if the array cannot hold so many."""
        pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        return int(self._lib.llama_tokenize(self._vocab, text, len(text), pointer, len(ids), add_special, parse_special))

    def token_ends(self, ids: Tokens, *, special: bool = False) -> npt.NDArray[np.int64]:
        """The byte offset in the text where each token ends, shape (n_tokens,) int64, from the pieces' lengths.

        Control tokens such as BOS have no text, unless `special`, for a text that was tokenized with `parse_special`. A
        vocabulary that normalises its input shifts the offsets by a few bytes.
        """
        unique, inverse = np.unique(ids, return_inverse=True)
        buffer = ctypes.create_string_buffer(4096)
        lengths = np.array([max(0, self._lib.llama_token_to_piece(self._vocab, int(i), buffer, len(buffer), 0, special))
                            for i in unique], np.int64)
        return np.cumsum(lengths[inverse])

    def pieces(self, ids: Tokens) -> dict[int, Piece]:
        """The text of each token among some, as the vocabulary writes it, and whether it is a control token."""
        buffer = ctypes.create_string_buffer(4096)
        found = {}
        for i in np.unique(ids).tolist():
            n = self._lib.llama_token_to_piece(self._vocab, i, buffer, len(buffer), 0, True)
            found[i] = Piece(buffer.raw[: max(0, n)], bool(self._lib.llama_vocab_is_control(self._vocab, i)))
        return found

    def detokenize(self, ids: Tokens) -> bytes:
        """The text of some tokens, control tokens left out."""
        buffer = ctypes.create_string_buffer(4096)
        out = b""
        for i in ids:
            n = self._lib.llama_token_to_piece(self._vocab, int(i), buffer, len(buffer), 0, False)
            out += buffer.raw[: max(0, n)]
        return out

    def close(self) -> None:
        """Free the weights; contexts first."""
        if self.handle:
            self._lib.llama_model_free(self.handle)
            self.handle = None


class Context:
    """One sequence of one model.

    Args:
        n_outputs_max: the most rows of logits that one decode may ask for; the output buffer holds so many rows of n_vocab
            float32. More in one call aborts the process.
        cb_eval: a ctypes callback that sees every node of the graph, for importance matrices.
    """

    def __init__(self, model: Model, settings: ContextSettings, *, n_outputs_max: int, cb_eval: Any = None,
                 mtp_of: Context | None = None, n_rs_seq: int = 0) -> None:
        lib = load_library()
        self._lib = lib
        self.model = model
        self.n_batch = min(settings.n_batch, settings.n_ctx)
        params = lib.llama_context_default_params()
        params.n_ctx = settings.n_ctx
        params.n_batch = self.n_batch
        params.n_ubatch = min(settings.n_ubatch, self.n_batch)
        params.n_seq_max = 1
        params.n_rs_seq = n_rs_seq
        params.n_outputs_max = n_outputs_max
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.type_k = TENSOR_TYPES[settings.type_k].id
        params.type_v = TENSOR_TYPES[settings.type_v].id
        params.flash_attn_type = int(settings.flash_attn)
        params.no_perf = True
        if cb_eval is not None:
            params.cb_eval = ctypes.cast(cb_eval, lib.ggml_backend_sched_eval_callback)
        if mtp_of is not None:
            params.ctx_type, params.ctx_other = lib.LLAMA_CONTEXT_TYPE_MTP, mtp_of.handle
        self.handle: Any = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise EngineError(f"llama.cpp cannot make a context of {settings.n_ctx} tokens for {model.path}: "
                              f"{tap.last_error()}; free memory, or use fewer workers")
        self.memory = lib.llama_get_memory(self.handle)
        self._cb_eval = cb_eval  # must outlive the context
        self._batch = _Batch(lib, self.n_batch)

    def clear(self) -> None:
        """Forget the sequence: attention cache and recurrent state."""
        self._lib.llama_memory_clear(self.memory, True)

    def decode(self, tokens: Tokens, pos: int, scored: slice) -> Logits:
        """Decode consecutive tokens of the sequence.

        Args:
            tokens: (n,) int32, at most n_batch.
            pos: the position of the first of them.
            scored: which of them yield logits, as a slice of 0..n.

        Returns:
            (n_scored, n_vocab) float32, a view into the library's buffer that the next decode overwrites. Rows are packed:
            only flagged positions are there.

        Raises:
            EngineError: `llama_decode` returned non-zero.
        """
        n_scored = self._batch.fill(tokens, pos, scored)
        status = self._lib.llama_decode(self.handle, self._batch.raw)
        if status != 0:
            raise EngineError(f"llama_decode returned {status} at position {pos} with {self.model.path}: "
                              f"{tap.last_error()}; see the step's log")
        if n_scored == 0:
            return np.zeros((0, self.model.n_vocab), np.float32)
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self.handle), (n_scored, self.model.n_vocab))

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            self._batch.close()
            self._lib.llama_free(self.handle)
            self.handle = None


class _Batch:
    """A `llama_batch` of one sequence whose arrays are filled through numpy."""

    def __init__(self, lib: Any, capacity: int) -> None:
        self._lib = lib
        self.raw = lib.llama_batch_init(capacity, 0, 1)
        shape = (capacity,)
        self._token = np.ctypeslib.as_array(self.raw.token, shape)
        self._pos = np.ctypeslib.as_array(self.raw.pos, shape)
        self._logits = np.ctypeslib.as_array(self.raw.logits, shape)
        np.ctypeslib.as_array(self.raw.n_seq_id, shape)[:] = 1
        for i in range(capacity):
            self.raw.seq_id[i][0] = 0

    def fill(self, tokens: Tokens, pos: int, scored: slice) -> int:
        n = len(tokens)
        self.raw.n_tokens = n
        self._token[:n] = tokens
        self._pos[:n] = np.arange(pos, pos + n, dtype=np.int32)
        self._logits[:n] = 0
        self._logits[:n][scored] = 1
        return int(self._logits[:n].sum())

    def close(self) -> None:
        self._lib.llama_batch_free(self.raw)


def _tensor_split(lib: Any, shares: tuple[float, ...]) -> Any:
    if not shares:
        return None
    n_max = int(lib.llama_max_devices())
    if len(shares) > n_max:
        raise InputError(f"expected at most {n_max} shares in tensor_split (this build's devices), got {len(shares)}: give "
                         "one for each, or fewer")
    return (ctypes.c_float * n_max)(*shares)


def _load_splits(lib: Any, paths: Sequence[Path], params: Any) -> Any:
    names = (ctypes.c_char_p * len(paths))(*native_paths(paths))
    return lib.llama_model_load_from_splits(names, len(paths), params)
