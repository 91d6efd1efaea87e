"""What holds whatever the input: an error of the project's own tree, in one sentence or two, or a result."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.core.errors import QuantkitError

_LONGEST = 1500


def fuzz(n: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with n numbers for generators, the same ones every time; $QUANTKIT_FUZZ times as many where that is set."""
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        check = settings(max_examples=n * int(os.environ.get("QUANTKIT_FUZZ", "1")), deadline=None, database=None, derandomize=True,
                         suppress_health_check=list(HealthCheck))
        return check(given(number=st.integers(0, 2**32 - 1))(test))
    return decorate


def generator(number: int) -> random.Random:
    """The generator of a number."""
    return random.Random(number)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Let nothing out but the project's own errors, and those only if a person can read them."""
    try:
        yield
    except QuantkitError as error:
        text = str(error)
        assert text, "an error without words"
        assert len(text) <= _LONGEST, f"{len(text)} characters: {text[:400]}..."
        assert "Traceback" not in text
        assert len(text.splitlines()) <= 1, repr(text)
