"""A trunk and a head whose logits are a function of the tokens before, a clock that only they move, and what can go wrong.

They stand behind `engine.draft`'s interfaces, where llama.cpp would; everything above is the real code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError

Tokens = npt.NDArray[np.int32]
N_VOCAB = 32
_WAVE = np.cos(np.arange(N_VOCAB)).astype(np.float32)


class Clock:
    """Time in a test: `perf_counter` that stands still until someone works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def true_logits(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The row after some tokens; any token changed anywhere gives another one."""
    digest = hashlib.sha256(np.array(tokens, np.int32).tobytes()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32)).normal(0, 3, N_VOCAB).astype(np.float32)


class FakeTrunk:
    """A sequence that must be decoded without gaps.

    Args:
        shape_noise: what decoding several tokens at once does to rows, nats.
        forgets: False leaves rejected tokens in the sequence, as a memory does that was not rolled back.
        can_roll_back: False is a memory that refuses.
        end: a token that ends the text.
        seconds: of one decode, whatever its length.
    """

    def __init__(self, *, n_batch: int = 16, shape_noise: float = 0.0, forgets: bool = True, can_roll_back: bool = True,
                 end: int | None = None, clock: Clock | None = None, seconds: float = 1.0,
                 logits: Callable[[Sequence[int]], npt.NDArray[np.float32]] = true_logits) -> None:
        self.n_batch = n_batch
        self._shape_noise, self._forgets, self._can_roll_back, self._end = shape_noise, forgets, can_roll_back, end
        self._clock, self._seconds, self._logits = clock, seconds, logits
        self.tokens: list[int] = []
        self.n_decode = 0

    def clear(self) -> None:
        self.tokens = []

    def decode(self, tokens: Tokens, pos: int, scored: slice) -> npt.NDArray[np.float32]:
        assert len(tokens) <= self.n_batch
        assert pos == len(self.tokens) or not self._forgets
        self.n_decode += 1
        if self._clock is not None:
            self._clock.now += self._seconds
        rows = []
        for i, token in enumerate(tokens):
            self.tokens.append(int(token))
            if i in range(*scored.indices(len(tokens))):
                row = self._logits(self.tokens)
                if len(tokens) > 1:
                    row = row + np.float32(self._shape_noise) * _WAVE
                rows.append(row)
        return np.array(rows, np.float32).reshape(len(rows), N_VOCAB)

    def is_end(self, token: int) -> bool:
        return token == self._end

    def save(self) -> None:
        pass

    def keep(self, tokens: Tokens, pos: int, n_keep: int) -> None:
        if n_keep == len(tokens):
            return
        if not self._can_roll_back:
            raise EngineError(f"the memory of fake.gguf cannot be rolled back to position {pos + n_keep}")
        if self._forgets:
            del self.tokens[pos + n_keep:]

    def close(self) -> None:
        pass


class FakeHead:
    """A head that knows the trunk's greedy choice, and says it where `is_right(position)`, else another token.

    Args:
        seconds: of one draft token, and of following.
    """

    def __init__(self, trunk: FakeTrunk, is_right: Callable[[int], bool], *, clock: Clock | None = None,
                 seconds: float = 0.0) -> None:
        self._trunk, self._is_right, self._clock, self._seconds = trunk, is_right, clock, seconds
        self.n_followed = 0
        self.n_noted = 0

    def clear(self) -> None:
        self.n_followed = self.n_noted = 0

    def note(self, n: int) -> None:
        self.n_noted += n

    def follow(self, tokens: Tokens, pos: int) -> None:
        assert pos == self.n_followed + self.n_noted
        self._work()
        self.n_followed += len(tokens)

    def draft(self, last: int, pos: int, n_draft: int) -> list[int]:
        assert pos == len(self._trunk.tokens) or not self._trunk._forgets
        text, out = [*self._trunk.tokens[:pos], last], []
        for _ in range(n_draft):
            self._work()
            best = int(true_logits(text).argmax())
            out.append(best if self._is_right(len(text)) else (best + 1) % N_VOCAB)
            text.append(out[-1])
        return out

    def keep(self, pos: int, n_keep: int) -> None:
        self.n_followed = pos + n_keep - self.n_noted

    def close(self) -> None:
        pass

    def _work(self) -> None:
        if self._clock is not None:
            self._clock.now += self._seconds
