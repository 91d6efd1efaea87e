"""A whole run in this process, in a fraction of a second: real GGUFs, headers and records, fake forward passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.core.errors import EngineError
from quantkit.core.files import sha256_file
from quantkit.engine import lockstep
from quantkit.job import fit, session
from quantkit.job.ladder import RunResult, audit_files
from quantkit.job.progress import Silent
from quantkit.report import run_report
from quantkit.report.run_report import write_report
from quantkit.spec.protocol import Protocol, load_protocol
from tests.engine import fake
from tests.gguf_factory import tiny_model

N_CTX = 32
SETTINGS = ["eval.n_ctx=32", "eval.n_batch=32", "eval.n_ubatch=32", "eval.chunks=spread", "eval.n_chunk=6"]


class AnyModel(fake.FakeModel):
    """Takes any file; a tier is as far from base as its name says."""

    def __init__(self, path: Path, **_: Any) -> None:
        self.path = path
        self.facts = {"n_vocab": 260, "noise": {"Q8_0": 0.1, "Q4_0": 0.5}.get(path.stem, 0.0)}
        self.n_vocab, self.add_bos, self.bos, self.closed = 260, False, 1, False


class Pool(fake.InProcessPool):
    """Takes a `WorkerPool`'s place. `before` is called ahead of each step, and may do harm."""

    before: Callable[[str], None] = staticmethod(lambda step: None)

    def __init__(self, n_workers: int = 1, log_folder: Path | None = None) -> None:
        super().__init__(1)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def call(self, step: str, command: Callable[..., Any], *, on_item: Callable[[Any], None] | None = None,
             **arguments: Any) -> Any:
        self.before(step)
        return super().call(step, command, on_item=on_item, **arguments)

    def stream(self, step: str, command: Callable[..., Any], tasks: Sequence[dict[str, Any]], *,
               n_workers: int | None = None) -> Iterator[Any]:
        self.before(step)
        yield from super().stream(step, command, tasks)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes in place; the report goes without pictures, which take longer than all the rest."""
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("no simulation here")

    fake.install(monkeypatch)
    monkeypatch.setattr(lockstep, "Model", AnyModel)
    monkeypatch.setattr(session, "WorkerPool", Pool)
    monkeypatch.setattr(Pool, "before", staticmethod(lambda step: None))
    monkeypatch.setattr(fit, "simulate", refuse)
    monkeypatch.setattr(run_report, "draw_run", lambda data: {})


class Job:
    """Base and two tiers, audited and reported into a run directory."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny_model(folder / "tiny-BF16.gguf")[0]
        self.tiers = [tiny_model(folder / f"{name}.gguf", type_name=name)[0] for name in ("Q8_0", "Q4_0")]
        self.protocol: Protocol = load_protocol("demo-v1", SETTINGS)

    def run(self, path: Path) -> RunResult:
        """Go on, or begin."""
        result = audit_files(self.base, self.protocol, path, self.tiers, Silent())
        if result.result_id is not None:
            write_report(path)
        return result


def bundle_of(run: Path) -> dict[str, str]:
    """The sha256 of every file that the manifest lists, and of the manifest."""
    names = [*json.loads((run / "manifest.json").read_bytes())["files"], "manifest.json"]
    return {name: sha256_file(run / name) for name in names}


def tokens_of(n_chunk: int) -> npt.NDArray[np.int32]:
    """A text of some chunks."""
    return np.random.default_rng(1).integers(0, 260, n_chunk * N_CTX).astype(np.int32)


def rows_of(tokens: npt.NDArray[np.int32], chunk: int) -> npt.NDArray[np.void]:
    """The rows of one chunk of a text, as a worker sends them."""
    return lockstep.empty_rows(tokens[chunk * N_CTX:(chunk + 1) * N_CTX], chunk)
