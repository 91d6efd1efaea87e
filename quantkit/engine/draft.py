"""Decoding with and without a draft head: the same prompt, the same choices, counted and timed. Worker processes only.

Both ways decode the prompt without its last token first (that is `t_prompt_s`), then that token and what follows (`t_decode_s`).
A draft is the head's greedy guess, as in llama.cpp; the trunk then chooses a token at each position as it would alone, greedily or
with noise that belongs to the position, and the draft is kept as far as it equals those choices.

The loops know two small interfaces, `Trunk` and `Head`; `engine.draft_session` fills them with llama.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.measure.acceptance import VerifyStep
from quantkit.measure.sampling import Sampler, choose

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class Trunk(Protocol):
    """A sequence of the trunk."""

    n_batch: int

    def clear(self) -> None:
        """Forget the sequence."""

    def decode(self, tokens: Tokens, pos: int, scored: slice) -> Logits:
        """Decode consecutive tokens; the rows of the scored ones."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""

    def save(self) -> None:
        """Before a draft is verified: whatever `keep` will need."""

    def keep(self, tokens: Tokens, pos: int, n_keep: int) -> None:
        """Of the tokens decoded last, the first of which stands at `pos`, keep some and forget the others."""


class Head(Protocol):
    """A draft head that follows a trunk."""

    def clear(self) -> None:
        """Forget the sequence."""

    def note(self, n: int) -> None:
        """Remember the trunk's hidden rows of the n tokens decoded last, without decoding them."""

    def follow(self, tokens: Tokens, pos: int) -> object:
        """Decode the tokens that the trunk decoded last."""

    def draft(self, last: int, pos: int, n_draft: int) -> list[int]:
        """Guesses at the tokens after `last`, which stands at `pos`."""

    def keep(self, pos: int, n_keep: int) -> None:
        """As `Trunk.keep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one run of one prompt gave.

    `steps` are the trunk's verify steps, one a token without a head. `rows` are the logits that chose the watched tokens, by their
    place among the generated ones.
    """

    tokens: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    t_prompt_s: float
    t_decode_s: float
    rows: dict[int, Logits] = field(default_factory=dict)


class Chooser:
    """Chooses tokens, and keeps the rows of some.

    Args:
        n_prompt: tokens of the prompt; the first token to be chosen stands at that position.
        sampler: None is greedy.
        watch: which choices' rows to keep, counted from 0.
    """

    def __init__(self, n_prompt: int, sampler: Sampler | None, watch: Sequence[int] = ()) -> None:
        self._n_prompt, self._sampler, self._watch = n_prompt, sampler, frozenset(watch)
        self.rows: dict[int, Logits] = {}

    def choose(self, row: Logits, position: int) -> int:
        """The token at a position of the text.

        Raises:
            EngineError: the row is not finite.
        """
        if position - self._n_prompt in self._watch:
            self.rows[position - self._n_prompt] = row.copy()
        if not np.isfinite(row.max()):  # NaN wins every maximum; -inf is a masked token
            raise EngineError(f"expected finite logits, got a row that is not, at position {position}: the file or its source is "
                              "damaged; make it again")
        return choose(row, position, self._sampler)


def decode_plainly(trunk: Trunk, prompt: Tokens, n_predict: int, chooser: Chooser) -> Generation:
    """Decode one token at a time, until n_predict tokens or the end of the text."""
    start = time.perf_counter()
    trunk.clear()
    feed_prompt(trunk, prompt, lambda block, pos: None)
    half = time.perf_counter()
    last, n_past, out = int(prompt[-1]), len(prompt) - 1, list[int]()
    while len(out) < n_predict:
        logits = trunk.decode(np.array([last], np.int32), n_past, slice(0, 1))
        n_past += 1
        last = chooser.choose(logits[0], n_past)
        out.append(last)
        if trunk.is_end(last):
            break
    return Generation(tokens=tuple(out), steps=(VerifyStep(0, 0),) * len(out), t_prompt_s=half - start,
                      t_decode_s=time.perf_counter() - half, rows=chooser.rows)


def decode_drafting(trunk: Trunk, head: Head, prompt: Tokens, n_predict: int, n_draft: int, chooser: Chooser, *,
                    prompt_to_head: bool = True) -> Generation:
    """Decode with drafts of n_draft tokens, fewer at the very end, until n_predict tokens or the end of the text.

    Args:
        prompt_to_head: False leaves the head without the prompt, as a runtime does that forgets it: an ablation.
    """
    start = time.perf_counter()
    trunk.clear()
    head.clear()
    feed_prompt(trunk, prompt, head.follow if prompt_to_head else lambda block, pos: head.note(len(block)))
    half = time.perf_counter()
    last, n_past, out = int(prompt[-1]), len(prompt) - 1, list[int]()
    steps = []
    while len(out) < n_predict and not (out and trunk.is_end(last)):
        draft = head.draft(last, n_past, min(n_draft, n_predict - len(out) - 1))
        tokens = np.array([last, *draft], np.int32)
        trunk.save()
        logits = trunk.decode(tokens, n_past, slice(None))
        head.follow(tokens, n_past)
        n_kept, chosen = verify(logits, draft, n_past + 1, chooser)
        new = _until_end([*draft[:n_kept], chosen], trunk.is_end)
        trunk.keep(tokens, n_past, n_kept + 1)
        head.keep(n_past, n_kept + 1)
        steps.append(VerifyStep(len(draft), n_kept))
        out += new
        last, n_past = out[-1], n_past + n_kept + 1
    return Generation(tokens=tuple(out), steps=tuple(steps), t_prompt_s=half - start, t_decode_s=time.perf_counter() - half,
                      rows=chooser.rows)


def verify(logits: Logits, draft: Sequence[int], position: int, chooser: Chooser) -> tuple[int, int]:
    """How many of the draft's tokens are those that the trunk chooses, and the token that it chooses after them.

    Args:
        logits: (len(draft) + 1, n_vocab) float32; row i chooses the token at position + i.
    """
    for i, token in enumerate(draft):
        chosen = chooser.choose(logits[i], position + i)
        if chosen != token:
            return i, chosen
    return len(draft), chooser.choose(logits[len(draft)], position + len(draft))


def decode_in_blocks(trunk: Trunk, prompt: Tokens, tokens: Sequence[int], n_block: int, watch: Sequence[int]) -> dict[int, Logits]:
    """The rows that choose some of the tokens of a given text, decoded in blocks, with nothing drafted and nothing thrown away.

    Args:
        tokens: what follows the prompt.
        n_block: tokens a decode, as in a verify step with a draft of n_block − 1.
        watch: places among the tokens, counted from 0.
    """
    trunk.clear()
    feed_prompt(trunk, prompt, lambda block, pos: None)
    n_whole = -(-(max(watch, default=0) + 1) // n_block) * n_block  # a block cut short would have another shape
    text = np.array([int(prompt[-1]), *tokens[:n_whole - 1]], np.int32)
    rows: dict[int, Logits] = {}
    for start in range(0, len(text), n_block):
        block = text[start:start + n_block]
        logits = trunk.decode(block, len(prompt) - 1 + start, slice(None))
        rows |= {start + i: logits[i].copy() for i in range(len(block)) if start + i in watch}
    return rows


def feed_prompt(trunk: Trunk, prompt: Tokens, then: Callable[[Tokens, int], object]) -> None:
    """Decode all but the prompt's last token, in blocks of n_batch; `then` is called after each with the block and its position."""
    body = prompt[:-1]
    for pos in range(0, len(body), trunk.n_batch):
        block = body[pos:pos + trunk.n_batch]
        trunk.decode(block, pos, slice(0))
        then(block, pos)


def _until_end(tokens: list[int], is_end: Callable[[int], bool]) -> list[int]:
    for i, token in enumerate(tokens):
        if is_end(token):
            return tokens[:i + 1]
    return tokens
