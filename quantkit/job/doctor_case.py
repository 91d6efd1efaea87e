"""What the checks of `quantkit doctor` share: the case that they look at, and the records that they leave.

A fact that several checks need is found once. The first check that asks for one that cannot be found gets the error, which is its
finding; to those after it the fact is `Unknown`, and they do not apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from quantkit.core.errors import QuantkitError
from quantkit.engine.library import BuildFacts
from quantkit.engine.lockstep import read_build
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import ContextSettings, Offload
from quantkit.job.corpus import locate_corpus, read_corpus
from quantkit.job.doctor_checkpoint import read_base
from quantkit.job.evaluation import Evaluation, Subject, choose_offload, context_settings, default_workers, prepare_evaluation
from quantkit.job.foreign import read_imatrix
from quantkit.job.plans import choose_tiers, resolve_tier
from quantkit.job.progress import Progress, Silent
from quantkit.job.session import RunOptions
from quantkit.spec.imatrix_file import Imatrix
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan, require_base
from quantkit.spec.protocol import Protocol, Tier

State = Literal["ok", "warning", "problem", "not applicable"]

_T = TypeVar("_T")
# How the advice at the end of a message begins: errors say what was expected and found, and then what to do.
_ADVICE = re.compile(
    r"[:;] ((?:ask|calibrate|choose|collect|connect|convert|copy|correct|fetch|free|give|install|let|make|mark|merge|narrow|pass|"
    r"plan|rename|rewrite|set|split|start|strip|take|use|wait|write)\b.*)$", re.DOTALL)


class Unknown(Exception):
    """A fact that an earlier check could not find; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table. `fix` is empty where nothing needs one; `error` is what a run would end with."""

    check: str
    state: State
    found: str
    fix: str = ""
    error: QuantkitError | None = None


def ok(check: str, found: str) -> Finding:
    """A line of which nothing is to be done."""
    return Finding(check=check, state="ok", found=found)


def warning(check: str, found: str, fix: str) -> Finding:
    """A line that stops no run, but that its owner should know."""
    return Finding(check=check, state="warning", found=found, fix=fix)


def not_applicable(check: str, why: str) -> Finding:
    """A line that says nothing of this case."""
    return Finding(check=check, state="not applicable", found=why)


def problem(check: str, error: QuantkitError, fix: str = "") -> Finding:
    """An error as a line: what it found, and the advice at its end as the fix; `fix` where it has none."""
    found, advice = split_advice(str(error))
    return Finding(check=check, state="problem", found=found, fix=fix or advice or "see what was found", error=error)


def split_advice(message: str) -> tuple[str, str]:
    """A message without its advice, and the advice; the whole message and "" where none is told by its first word."""
    match = _ADVICE.search(message)
    return (message[:match.start()], match[1]) if match else (message, "")


class Ladder(NamedTuple):
    """The plans of a ladder that could be made, and why the others could not."""

    plans: tuple[Plan, ...]
    refused: Mapping[str, QuantkitError]


class Case:
    """A base, a protocol and a run directory to come, with the facts that checks need of them.

    Args:
        protocol: the protocol, or why there is none.
        tiers: names of some of its tiers; None for all.
        run: the run directory; None where none is named yet.
        options: as the run would get them.
        measure: whether a chunk may be decoded to tell the time, and a small base hashed.
        pool: workers that are there already; none: one is started when it is needed.
    """

    def __init__(self, base: Path, protocol: Protocol | QuantkitError, *, tiers: Sequence[str] | None = None,
                 run: Path | None = None, options: RunOptions = RunOptions(), measure: bool = True,  # noqa: B008 - frozen
                 progress: Progress = Silent(), pool: WorkerPool | None = None) -> None:  # noqa: B008 - without a state
        self.base, self.run, self.options, self.measure, self.progress = base, run, options, measure, progress
        self._protocol, self._tiers = protocol, tiers
        self._facts: dict[str, Any] = {}
        self._pool, self._own_pool = pool, pool is None

    def __enter__(self) -> Case:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None and self._own_pool:
            self._pool.__exit__(kind, error, trace)

    def once(self, what: str, make: Callable[[], _T]) -> _T:
        """A fact, found the first time that it is asked for.

        Raises:
            QuantkitError: it cannot be found; the first time.
            Unknown: and every time after.
        """
        if what not in self._facts:
            try:
                self._facts[what] = make()
            except (QuantkitError, OSError, Unknown) as error:
                self._facts[what] = Unknown(str(error) if isinstance(error, Unknown) else what)
                raise
        if isinstance(value := self._facts[what], Unknown):
            raise value
        return cast(_T, value)

    @property
    def folder(self) -> Path:
        """Where the run's files would go: the run directory, or the folder that the command is given in."""
        return self.run if self.run is not None else Path.cwd()

    @property
    def pool(self) -> WorkerPool:
        """One worker, which starts when it is needed."""
        if self._pool is None:
            self._pool = WorkerPool(1)
        return self._pool

    @property
    def protocol(self) -> Protocol:
        """The protocol."""
        def make() -> Protocol:
            if isinstance(self._protocol, QuantkitError):
                raise self._protocol
            return self._protocol
        return self.once("the protocol", make)

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that are asked for."""
        return self.once("the tiers", lambda: choose_tiers(self.protocol, self._tiers))

    @property
    def model(self) -> ModelInfo:
        """The base, from its header."""
        return self.once("the base's header", lambda: describe_model(read_base(self.base)))

    @property
    def base_model(self) -> ModelInfo:
        """The base, if tiers can be made from it at all."""
        def make() -> ModelInfo:
            if self.model.problems:  # the findings of the header's checks
                raise Unknown("a header that agrees with itself")
            require_base(self.model)
            return self.model
        return self.once("a base that tiers can be made from", make)

    @property
    def imatrix(self) -> Imatrix | None:
        """The importance matrix that was given."""
        given = self.options.imatrix
        return self.once("the importance matrix", lambda: None if given is None else read_imatrix(given))

    @property
    def ladder(self) -> Ladder:
        """Every tier's plan, with the given matrix or as if one held every tensor."""
        def make() -> Ladder:
            model, lengths = self.base_model, self._lengths()
            plans, refused = [], {}
            for tier in self.tiers:
                try:
                    plans.append(resolve_tier(self.pool, model, self.protocol, tier, lengths))
                except QuantkitError as error:
                    refused[tier.name] = error
            return Ladder(tuple(plans), refused)
        return self.once("the plans", make)

    def _lengths(self) -> dict[str, int] | None:
        """Of the given matrix's entries; as if none were given where it cannot be read, which its own check tells."""
        try:
            return None if self.options.imatrix is None else read_imatrix(self.options.imatrix).lengths()
        except QuantkitError:
            return None

    @property
    def offload(self) -> Offload:
        """Where layers go."""
        return choose_offload(self.protocol, self.options.offload)

    @property
    def settings(self) -> ContextSettings:
        """The evaluation's arithmetic."""
        return context_settings(self.protocol.eval)

    @property
    def n_workers(self) -> int:
        """Worker processes of the run."""
        return self.options.n_workers or default_workers(self.settings, self.offload)

    @property
    def build(self) -> BuildFacts:
        """The library's build; that a worker tells it proves that the library loads and fits its binding."""
        asked = self.options.offload.n_gpu_layers
        return self.once("llama.cpp", lambda: cast(BuildFacts, self.pool.call("build", read_build, n_gpu_layers=asked)))

    def text(self, name: str, explicit: Path | None) -> Path | None:
        """The file of a text; None where it would be fetched."""
        return self.once(f"the text {name}", lambda: locate_corpus(self.protocol.corpus(name), explicit))

    def evaluation(self, name: str) -> Evaluation | None:
        """A text as the base's vocabulary sees it; None where the text would be fetched."""
        def make() -> Evaluation | None:
            corpus = self.protocol.corpus(name)
            path = self.text(name, self.options.corpus)
            if path is None:
                return None
            _ = self.build  # Unknown, if the library does not load
            base = Subject(name="base", model=self.model, sha256="")  # nothing that is asked here depends on its bytes
            return prepare_evaluation(self.pool, self.protocol, base, read_corpus(corpus, path), self.offload, corpus)
        return self.once(f"the tokens of {name}", make)

    def known_evaluation(self, name: str) -> Evaluation | None:
        """The same if it was found already; None where nobody asked for it."""
        held = self._facts.get(f"the tokens of {name}")
        return held if isinstance(held, Evaluation) else None
