"""llama.cpp behind `engine.draft`: models, contexts, rollback, and the commands that a worker runs.

How a trunk forgets rejected drafts is found out when it is opened, and recorded:

    recurrent snapshots   n_rs_seq states are kept, `llama_memory_seq_rm` goes back to one of them
    plain KV              positions are cut off an attention cache
    checkpoint            the recurrent state is saved before each draft and restored, and what was accepted decoded again
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.engine.draft import Chooser, Generation, Logits, Tokens, decode_drafting, decode_in_blocks, decode_plainly
from quantkit.engine.library import load_library
from quantkit.engine.model import Context, Model
from quantkit.engine.mtp_head import MtpHead, remove_from
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.engine.worker import WorkerState
from quantkit.measure.sampling import Sampler
from quantkit.spec.mtp_records import Rollback

#: A drafting trunk can give so many more rows a decode than its drafts need: `block_rows` looks at longer blocks too.
MORE_ROWS = 4


class LlamaTrunk:
    """A context of the trunk that can forget the end of its sequence.

    Args:
        n_draft: the longest draft; 0 for a trunk that is never rolled back.
        snapshots: False leaves recurrent snapshots off even where the library has them.

    Raises:
        EngineError: its memory can neither be cut nor restored.
    """

    def __init__(self, model: Model, settings: ContextSettings, *, n_draft: int, n_outputs_max: int,
                 snapshots: bool = True) -> None:
        self._lib = load_library()
        self.context = Context(model, settings, n_outputs_max=n_outputs_max, n_rs_seq=n_draft if snapshots else 0)
        self.n_batch = self.context.n_batch
        self._vocab = self._lib.llama_model_get_vocab(model.handle)
        self._saved: Any = None
        self.rollback = self._find_rollback() if n_draft else Rollback(mode="plain KV", n_rs_seq=0)

    def clear(self) -> None:
        """Forget the sequence."""
        self.context.clear()

    def decode(self, tokens: Tokens, pos: int, scored: slice) -> Logits:
        """As `Context.decode`."""
        return self.context.decode(tokens, pos, scored)

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text, or a turn of it."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def save(self) -> None:
        """Save the recurrent state where `keep` will have to restore it."""
        if self.rollback.mode != "checkpoint":
            return
        size = self._lib.llama_state_seq_get_size_ext(self.context.handle, 0, self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if self._saved is None or len(self._saved) < size:
            self._saved = (ctypes.c_uint8 * size)()
        self._n_saved = self._lib.llama_state_seq_get_data_ext(self.context.handle, self._saved, size, 0,
                                                               self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def keep(self, tokens: Tokens, pos: int, n_keep: int) -> None:
        """Forget all but the first n_keep of the tokens decoded last.

        Raises:
            EngineError: the library refused, though it did not when it was asked first.
        """
        if n_keep == len(tokens):
            return
        if self.rollback.mode != "checkpoint":
            self._remove(pos + n_keep)
            return
        restored = self._lib.llama_state_seq_set_data_ext(self.context.handle, self._saved, self._n_saved, 0,
                                                          self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if restored != self._n_saved:
            raise EngineError(f"{self.context.model.path.name}: the state before position {pos} cannot be restored: speculation "
                              "would continue from a wrong state; take its head off, by `quantkit mtp strip`")
        self._remove(pos)
        self.context.decode(tokens[:n_keep], pos, slice(0))

    def close(self) -> None:
        """Free the context."""
        self.context.close()

    def _remove(self, pos: int) -> None:
        if not remove_from(self.context, pos):
            raise EngineError(f"the memory of {self.context.model.path.name} cannot be rolled back to position {pos}: speculation "
                              "with this model would continue from a wrong state; take its head off, by `quantkit mtp strip`")

    def _find_rollback(self) -> Rollback:
        """Ask the library, by cutting one token off a sequence of two.

        Source: common_context_can_seq_rm in common/common.cpp.
        """
        n_rs_seq = int(self._lib.llama_n_rs_seq(self.context.handle))
        self.clear()
        self.context.decode(np.zeros(2, np.int32), 0, slice(0))
        can_cut = remove_from(self.context, 1)
        self.clear()
        if can_cut:
            return Rollback(mode="recurrent snapshots" if n_rs_seq else "plain KV", n_rs_seq=n_rs_seq)
        return Rollback(mode="checkpoint", n_rs_seq=0)


class PlainSession:
    """A trunk alone."""

    def __init__(self, trunk: Path, settings: ContextSettings, offload: Offload) -> None:
        self._model = Model(trunk, use_extra_bufts=settings.use_extra_bufts, offload=offload)
        try:
            self.trunk = LlamaTrunk(self._model, settings, n_draft=0, n_outputs_max=1)
        except EngineError:
            self._model.close()
            raise

    def close(self) -> None:
        """Free context, then weights."""
        self.trunk.close()
        self._model.close()


class _Models:
    """Files opened once each, for a trunk and its heads."""

    def __init__(self, settings: ContextSettings, offload: Offload) -> None:
        self._settings, self._offload = settings, offload
        self._open: dict[Path, Model] = {}

    def get(self, path: Path, *, load_mtp: bool) -> Model:
        if path not in self._open:
            self._open[path] = Model(path, load_mtp=load_mtp, use_extra_bufts=self._settings.use_extra_bufts,
                                     offload=self._offload)
        return self._open[path]

    def close(self) -> None:
        for model in self._open.values():
            model.close()
        self._open = {}


class DraftSession:
    """A trunk and one head, out of one file or two."""

    def __init__(self, trunk: Path, head: Path, settings: ContextSettings, offload: Offload, n_draft: int,
                 snapshots: bool = True) -> None:
        self._models = _Models(settings, offload)
        self._closing: list[Any] = []
        try:
            self.trunk = LlamaTrunk(self._models.get(trunk, load_mtp=trunk == head), settings, n_draft=n_draft,
                                    n_outputs_max=n_draft + 1 + MORE_ROWS, snapshots=snapshots)
            self._closing.append(self.trunk)
            self.head = MtpHead(self._models.get(head, load_mtp=True), self.trunk.context, settings, n_outputs_max=1)
            self._closing.append(self.head)
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Free contexts, the head's first, then weights."""
        for context in reversed(self._closing):
            context.close()
        self._closing = []
        self._models.close()


class ChunkChoices(NamedTuple):
    """What trunk and heads would choose at positions 1 … n_ctx − 1 of a chunk, given the true text before.

    trunk: (n_ctx − 1,) int32. heads: one such array for each head.
    """

    chunk: int
    trunk: npt.NDArray[np.int32]
    heads: tuple[npt.NDArray[np.int32], ...]


class TeacherSession:
    """A trunk and several heads that follow it through a given text."""

    def __init__(self, trunk: Path, heads: Sequence[Path], settings: ContextSettings, offload: Offload, tokens: Tokens) -> None:
        self._models, self._tokens, self._n_ctx = _Models(settings, offload), tokens, settings.n_ctx
        self._closing: list[Any] = []
        n_batch = min(settings.n_batch, settings.n_ctx)
        try:
            self._context = Context(self._models.get(trunk, load_mtp=trunk in heads), settings, n_outputs_max=n_batch)
            self._closing.append(self._context)
            self._heads: list[MtpHead] = []
            for path in heads:
                self._heads.append(MtpHead(self._models.get(path, load_mtp=True), self._context, settings, n_outputs_max=n_batch))
                self._closing.append(self._heads[-1])
        except EngineError:
            self.close()
            raise

    def follow(self, chunk: int) -> ChunkChoices:
        """One chunk; position 0, where a head has seen no hidden row, is left out."""
        model = self._context.model
        ids = self._tokens[chunk * self._n_ctx:(chunk + 1) * self._n_ctx].copy()
        if model.add_bos:
            ids[0] = model.bos
        self._context.clear()
        for head in self._heads:
            head.clear()
        trunk, heads = [], [[] for _ in self._heads]  # type: ignore[var-annotated]
        for pos in range(0, self._n_ctx, self._context.n_batch):
            block = ids[pos:pos + self._context.n_batch]
            trunk.append(self._context.decode(block, pos, slice(None)).argmax(1))
            for head, choices in zip(self._heads, heads, strict=True):
                choices.append(head.follow(block, pos, scored=True).argmax(1))
        return ChunkChoices(chunk, _joined(trunk), tuple(_joined(choices) for choices in heads))

    def close(self) -> None:
        """Free contexts, the heads' first, then weights."""
        for context in reversed(self._closing):
            context.close()
        self._closing = []
        self._models.close()


def _joined(choices: Sequence[npt.NDArray[np.intp]]) -> npt.NDArray[np.int32]:
    return np.concatenate(choices)[1:].astype(np.int32)


# Commands.


def open_plain(state: WorkerState, *, trunk: Path, settings: ContextSettings, offload: Offload) -> None:
    """Command: load a trunk alone."""
    state.open(lambda: PlainSession(trunk, settings, offload))


def open_draft(state: WorkerState, **arguments: Any) -> Rollback:
    """Command: load a trunk and a head (arguments of DraftSession); tells how drafts are rolled back."""
    session: DraftSession = state.open(lambda: DraftSession(**arguments))
    return session.trunk.rollback


def open_teacher(state: WorkerState, **arguments: Any) -> None:
    """Command: load a trunk and its heads (arguments of TeacherSession)."""
    state.open(lambda: TeacherSession(**arguments))


def generate(state: WorkerState, *, prompt: Tokens, n_predict: int, n_draft: int, sampler: Sampler | None,
             watch: tuple[int, ...] = (), prompt_to_head: bool = True) -> Generation:
    """Command: decode one prompt in the session that is open, drafting if that has a head."""
    session, chooser = state.session, Chooser(len(prompt), sampler, watch)
    if isinstance(session, PlainSession):
        return decode_plainly(session.trunk, prompt, n_predict, chooser)
    assert isinstance(session, DraftSession)
    return decode_drafting(session.trunk, session.head, prompt, n_predict, n_draft, chooser, prompt_to_head=prompt_to_head)


def block_rows(state: WorkerState, *, prompt: Tokens, tokens: tuple[int, ...], n_block: int,
               watch: tuple[int, ...]) -> dict[int, Logits]:
    """Command: rows of a given text decoded in blocks by the drafting session's trunk; see `decode_in_blocks`."""
    session = state.session
    assert isinstance(session, DraftSession)
    return decode_in_blocks(session.trunk, prompt, tokens, n_block, watch)


def follow_chunks(state: WorkerState, *, chunks: tuple[int, ...]) -> Iterator[ChunkChoices]:
    """Command: the choices over some chunks, one item each."""
    session = state.session
    assert isinstance(session, TeacherSession)
    for chunk in chunks:
        yield session.follow(chunk)


def detokenize(state: WorkerState, *, path: Path, texts: tuple[tuple[int, ...], ...]) -> list[str]:
    """Command: some token sequences as text; bytes that are not UTF-8 become U+FFFD."""
    model = Model(path, vocab_only=True)
    try:
        return [model.detokenize(np.array(ids, np.int32)).decode(errors="replace") for ids in texts]
    finally:
        model.close()


def peak_memory(state: WorkerState) -> int:
    """Command: the most memory that this process has held so far, bytes; pages mapped from files are counted where resident.

    Linux hands a parent's ru_maxrss down to the process that it starts, so the kernel is asked for the peak of the memory itself.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
