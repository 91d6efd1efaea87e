"""What a verification finds: checks with their counts, what was not checked and why, and every failure by file.

A failure names the file, what was expected and what was found. Whatever a damaged or hostile file makes a reader raise is a
failure of that file, never the end of the verification.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.core.errors import CheckFailed, QuantkitError

_LONGEST = 300  # characters of a value from a file that is not trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is not what it should be. `file` is a path in the bundle."""

    check: str
    file: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of check: how many things were looked at, how many failed, and notes on what was left out."""

    name: str
    n_checked: int
    n_failed: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a verification came to. `result_id` is the manifest's own word, None where it has none."""

    result_id: str | None
    checks: tuple[Check, ...]
    failures: tuple[Failure, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def plus(self, other: Verification) -> Verification:
        """Both verifications as one."""
        return Verification(result_id=self.result_id, checks=(*self.checks, *other.checks),
                            failures=(*self.failures, *other.failures))

    def require(self, where: str) -> None:
        """Turn failures into an error.

        Raises:
            CheckFailed: names the first of them.
        """
        if self.passed:
            return
        first, n = self.failures[0], len(self.failures)
        more = "" if n == 1 else f" (and {n - 1} more)"
        raise CheckFailed(f"{where} does not verify: {first.file}: expected {first.expected}, found {first.found}{more}; fetch "
                          "or measure again what it names")


class Findings:
    """Collects while a verification runs. Checks stand in the order in which they were first named."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._notes: dict[str, list[str]] = {}
        self.failures: list[Failure] = []

    def result(self, result_id: str | None) -> Verification:
        """Everything that was found."""
        failed = [failure.check for failure in self.failures]
        checks = tuple(Check(name=name, n_checked=n, n_failed=failed.count(name), notes=tuple(self._notes[name]))
                       for name, n in self._counts.items())
        return Verification(result_id=result_id, checks=checks, failures=tuple(self.failures))

    def count(self, check: str, n: int = 1) -> None:
        """Some more things were looked at."""
        self._counts[check] = self._counts.get(check, 0) + n
        self._notes.setdefault(check, [])

    def note(self, check: str, text: str) -> None:
        """Something that a reader of the counts must know."""
        self.count(check, 0)
        if text not in self._notes[check]:
            self._notes[check].append(text)

    def fail(self, check: str, file: str, expected: object, found: object) -> None:
        """Something is not what it should be."""
        self.count(check, 0)
        self.failures.append(Failure(check=check, file=_shown(file), expected=_shown(expected), found=_shown(found)))

    def equal(self, check: str, file: str, what: str, expected: object, found: object) -> bool:
        """Look at one thing; `what` names it, such as "eval_id"."""
        self.count(check)
        same = type(expected) is type(found) and expected == found
        if not same:
            self.fail(check, file, f"{what} {_shown(expected)}", _shown(found))
        return same

    def has_check(self, check: str) -> bool:
        """Whether a check was begun."""
        return check in self._counts

    def has_failed(self, file: str) -> bool:
        """Whether a file is known to be another than the manifest's."""
        return any(failure.file == _shown(file) for failure in self.failures)

    @contextlib.contextmanager
    def reading(self, check: str, file: str, expected: str) -> Iterator[None]:
        """Read a file that is not trusted; `expected` says what it should be."""
        try:
            yield
        except QuantkitError as error:
            self.fail(check, file, expected, str(error))
        except Exception as error:  # whatever a damaged file makes a reader raise is a finding
            self.fail(check, file, expected, f"{type(error).__name__}: {error}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST - 1] + "…"
