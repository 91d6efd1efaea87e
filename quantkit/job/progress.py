"""How a job tells that it moves. The command line draws bars or prints lines; tests and libraries stay silent."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener of one job: steps with a known length, one after another, and notes between them."""

    def start(self, step: str, total: int) -> None:
        """A step begins; `total` units of work are ahead."""

    def advance(self, n: int = 1) -> None:
        """Some units of the current step are done."""

    def finish(self) -> None:
        """The current step is done."""

    def note(self, text: str) -> None:
        """Something worth reading, one line."""


class Silent:
    """A listener that says nothing."""

    def start(self, step: str, total: int) -> None:
        """Say nothing."""

    def advance(self, n: int = 1) -> None:
        """Say nothing."""

    def finish(self) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""
