"""The exception tree. Every error that a user can meet is one of these; `cli` catches the root, in one place.

    QuantkitError                 exit code
    ├── InputError                2   a wrong argument, or a file that is not what it must be
    │   ├── GgufError             2   a GGUF header that is damaged, hostile or unsupported
    │   ├── ProtocolError         2   a protocol file; names the dotted path
    │   ├── PlanError             2   a plan that cannot be carried out as written
    │   ├── CorpusError           2   a text that is missing or has another hash
    │   └── ImatrixError          2   an importance matrix that does not fit the model or the plan
    ├── CheckFailed               1   a gate or a verification said no
    └── EnvironmentFault          3   this machine cannot do it now
        ├── EngineCrash           3   native code died: step, signal, last log lines
        │   └── EngineKilled      3   it was ended, for want of memory or because it hung: no word about the file
        ├── EngineError           3   native code returned an error: step, its own words
        ├── NoSpace               3   not enough disk, before or during a write
        └── RunLocked             3   another process works in this run directory

A message is one sentence or two: what was expected, what was found, where, what to do.
"""

from __future__ import annotations


class QuantkitError(Exception):
    """Root of the tree."""

    exit_code = 2


class InputError(QuantkitError):
    """A wrong argument, or a file that is not what it must be."""


class GgufError(InputError):
    """A GGUF header that is damaged, hostile or unsupported."""


class ProtocolError(InputError):
    """A protocol file that is not valid; the message names the dotted path."""


class PlanError(InputError):
    """A plan that cannot be carried out as written."""


class CorpusError(InputError):
    """A text that is missing or whose bytes have another hash."""


class ImatrixError(InputError):
    """An importance matrix that does not fit the model or the plan."""


class CheckFailed(QuantkitError):
    """A gate or a verification said no."""

    exit_code = 1


class EnvironmentFault(QuantkitError):
    """This machine cannot do it now: a missing library, no space, a crash of native code."""

    exit_code = 3


class EngineCrash(EnvironmentFault):
    """Native code died. The message holds the step, the signal or exit status and the last log lines."""


class EngineKilled(EngineCrash):
    """Native code was ended from outside, or hung: no word about the file that it worked on, so nothing of it goes on record."""


class EngineError(EnvironmentFault):
    """Native code returned an error. The message holds the step and the library's own words."""


class NoSpace(EnvironmentFault):
    """Not enough disk space, found before a write or during it."""


class RunLocked(EnvironmentFault):
    """Another process works in this run directory."""
