"""An MTP head beside its trunk: fed with the trunk's hidden rows, asked for drafts, rolled back. Worker processes only.

At position i the head sees token i with the trunk's hidden row of position i − 1, and predicts token i + 1. With several NextN
blocks the k-th draft token comes from the k-th block, which has a cache of its own and therefore decodes the whole draft again.

Source: common_speculative_impl_draft_mtp in common/speculative.cpp of the pinned llama.cpp, without heads that share the trunk's
memory (gemma4-assistant).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.engine.library import load_library, tap
from quantkit.engine.model import Context, Logits, Model, Tokens
from quantkit.engine.settings import ContextSettings

Hidden = npt.NDArray[np.float32]


def remove_from(context: Context, pos: int) -> bool:
    """Forget every position from `pos` on; False where this memory cannot, and nothing is changed."""
    return bool(load_library().llama_memory_seq_rm(context.memory, 0, pos, -1))


class MtpHead:
    """An MTP context of a head's model that follows a trunk's context.

    Args:
        model: opened with `load_mtp`; the trunk's own model, or another file's.
        trunk: the context that it follows.
        n_outputs_max: the most rows of logits that one `follow` may ask for.
        cb_eval: as in `Context`.

    Raises:
        EngineError: trunk and head have hidden rows of different widths, or the library refused.
    """

    def __init__(self, model: Model, trunk: Context, settings: ContextSettings, *, n_outputs_max: int, cb_eval: Any = None) -> None:
        from llama_cpp import llama_cpp_ext

        self._ext, self._lib = llama_cpp_ext, load_library()
        self._trunk, self._model = trunk, model
        self.n_nextn = int(self._lib.llama_model_n_layer_nextn(model.handle))
        self._width = int(self._lib.llama_model_n_embd_out(model.handle))
        if self._width != (found := int(self._lib.llama_model_n_embd_out(trunk.model.handle))):
            raise EngineError(f"{model.path.name} is not a head of {trunk.model.path.name}: expected hidden rows of {found} "
                              f"values, found {self._width}; give the head that belongs to it")
        self._context = Context(model, settings, n_outputs_max=n_outputs_max, cb_eval=cb_eval, mtp_of=trunk)
        self._ext.llama_set_embeddings_nextn(trunk.handle, True, False)  # of every token
        self._ext.llama_set_embeddings_nextn(self._context.handle, True, True)  # of those flagged for output
        self._batch = _HiddenBatch(self._lib, trunk.n_batch, self._width)
        self._before = self._zero = np.zeros(self._width, np.float32)
        self._rows: Hidden = np.zeros((0, self._width), np.float32)

    def clear(self) -> None:
        """Forget the sequence; the row before the first token is zero."""
        self._context.clear()
        self._before = self._zero

    def note(self, n: int) -> None:
        """Remember the trunk's hidden rows of the n tokens that it just decoded, without decoding them here."""
        self._rows = np.ctypeslib.as_array(self._ext.llama_get_embeddings_nextn(self._trunk.handle), (n, self._width)).copy()
        self._before = self._rows[-1]

    def follow(self, tokens: Tokens, pos: int, *, scored: bool = False) -> Logits:
        """Decode the tokens that the trunk just decoded.

        Args:
            tokens: (n,) int32; n is at most the trunk's n_batch.
            pos: the position of the first.
            scored: whether the logits are wanted.

        Returns:
            (n, n_vocab) float32 if scored, else (0, n_vocab): row i is the first block's guess at token pos + i + 1. A view that
            the next decode overwrites.

        Raises:
            EngineError: the library's words.
        """
        before = self._before
        self.note(len(tokens))
        hidden = np.concatenate([before[None], self._rows[:-1]])
        logits = np.zeros((0, self._model.n_vocab), np.float32)
        for block in range(self.n_nextn):
            if self.n_nextn > 1:
                self._select(block, pos)
            self._decode(tokens, pos, hidden, slice(None) if scored else slice(0))
            if scored and block == 0:
                logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context.handle), (len(tokens), self._model.n_vocab))
                logits = logits if self.n_nextn == 1 else logits.copy()
        if self.n_nextn > 1:
            self._ext.llama_set_nextn_layer_offset(self._context.handle, 0)
        return logits

    def draft(self, last: int, pos: int, n_draft: int) -> list[int]:
        """The head's greedy guesses at the tokens after `last`, which stands at `pos`; the cache is as before.

        With several NextN blocks at most as many as there are blocks.
        """
        chained = self.n_nextn > 1
        n_draft = min(n_draft, self.n_nextn) if chained else n_draft
        tokens, rows = [last], [self._before]
        for i in range(n_draft):
            if chained:
                self._select(i, pos)
            first = 0 if chained else i
            n = len(tokens) - first
            self._decode(np.array(tokens[first:], np.int32), pos + first, np.stack(rows[first:]), slice(n - 1, n))
            logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context.handle, n - 1), (self._model.n_vocab,))
            tokens.append(int(logits.argmax()))
            row = self._ext.llama_get_embeddings_nextn_ith(self._context.handle, n - 1)
            rows.append(np.ctypeslib.as_array(row, (self._width,)).copy())
        if chained:
            self._ext.llama_set_nextn_layer_offset(self._context.handle, 0)
        if n_draft:
            self._remove(pos)
        return tokens[1:]

    def keep(self, pos: int, n_keep: int) -> None:
        """Of the tokens followed last, the first of which stands at `pos`, keep some and forget the others."""
        self._before = self._rows[n_keep - 1]
        if n_keep < len(self._rows):
            self._remove(pos + n_keep)

    def close(self) -> None:
        """Free the context."""
        self._batch.close()
        self._context.close()

    def _select(self, block: int, pos: int) -> None:
        """Run NextN block number `block`, whose cache must hold nothing of another block's from `pos` on."""
        self._remove(pos)
        self._ext.llama_set_nextn_layer_offset(self._context.handle, block)

    def _remove(self, pos: int) -> None:
        if not remove_from(self._context, pos):
            raise EngineError(f"the MTP head's memory cannot be rolled back to position {pos} in {self._model.path.name}: "
                              "take it off, by `quantkit mtp strip`")

    def _decode(self, tokens: Tokens, pos: int, hidden: Hidden, scored: slice) -> None:
        self._batch.fill(tokens, pos, hidden, scored)
        status = self._lib.llama_decode(self._context.handle, self._batch.raw)
        if status != 0:
            raise EngineError(f"llama_decode of the MTP head returned {status} at position {pos} with {self._model.path}: "
                              f"{tap.last_error()}; see the step's log")


class _HiddenBatch:
    """A `llama_batch` that carries tokens and hidden rows together; the library allocates only one of the two."""

    def __init__(self, lib: Any, capacity: int, width: int) -> None:
        self._lib = lib
        self.raw = lib.llama_batch_init(capacity, width, 1)
        self._tokens = (lib.llama_token * capacity)()
        self.raw.token = self._tokens
        shape = (capacity,)
        self._token = np.ctypeslib.as_array(self.raw.token, shape)
        self._pos = np.ctypeslib.as_array(self.raw.pos, shape)
        self._logits = np.ctypeslib.as_array(self.raw.logits, shape)
        self._hidden = np.ctypeslib.as_array(self.raw.embd, (capacity * width,)).reshape(capacity, width)
        np.ctypeslib.as_array(self.raw.n_seq_id, shape)[:] = 1
        for i in range(capacity):
            self.raw.seq_id[i][0] = 0

    def fill(self, tokens: Tokens, pos: int, hidden: Hidden, scored: slice) -> None:
        n = len(tokens)
        self.raw.n_tokens = n
        self._token[:n], self._hidden[:n] = tokens, hidden
        self._pos[:n] = np.arange(pos, pos + n, dtype=np.int32)
        self._logits[:n] = 0
        self._logits[:n][scored] = 1

    def close(self) -> None:
        self.raw.token = None  # ours, not the library's to free
        self._lib.llama_batch_free(self.raw)
