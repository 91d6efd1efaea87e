"""The smoke test of a file: it answers a fixed prompt at temperature 0, as a user would run it.

    passed    at least 16 tokens, and bytes that are UTF-8 (a character cut by the end is not counted); through the server too
    looped    more n-grams repeat than `mtp.max_repeat_share` allows: told, and no reason to fail by itself, since a small model's
              greedy text loops whatever its types are. The gate compares with the incumbent's record.

The file goes through the OpenAI-compatible server of llama-cpp-python where that extra is installed; tokens and bytes come from its
in-process API in any case, because the server's text has lost what was not UTF-8.
"""

from __future__ import annotations

import codecs
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.core.errors import EngineCrash, EngineError, EngineKilled
from quantkit.engine.pool import WorkerPool
from quantkit.engine.smoke import Answer, ServedAnswer, answer_prompt, has_server, serve_prompt
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.repetition import is_degenerate, repeat_share
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Protocol

MIN_TOKENS = 16
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRecord:
    """What came of it. `failures` say why it did not pass; `text` is the answer, with U+FFFD where bytes were not UTF-8.

    template: the sha256 of the chat template that was applied, or "none".
    served_text: the server's answer where it differs from `text`, else None.
    """

    schema: int
    file: str
    sha256: str
    prompt: str
    n_predict: int
    template: str
    through: Literal["server", "in-process"]
    n_tokens: int
    ended: bool
    valid_utf8: bool
    repeat_share: float | None
    looped: bool
    text: str
    served_text: str | None
    passed: bool
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {**dataclasses.asdict(self), "failures": list(self.failures)}

    @staticmethod
    def from_json(value: Any) -> SmokeRecord | None:
        """A record from `to_json`'s value; None from anything else."""
        try:
            record = SmokeRecord(**{**value, "failures": tuple(value["failures"])})
        except (KeyError, TypeError):
            return None
        return record if record.schema == SCHEMA else None


def smoke_path(run: RunFolder, tier: str) -> Path:
    """Where a tier's record lies: in the bundle."""
    return run.path / "smoke" / f"{tier}.json"


def smoke_tier(run: RunFolder, pool: WorkerPool, protocol: Protocol, tier: str, file: Path, sha256: str,
               n_threads: int) -> SmokeRecord:
    """Test a tier's file and write its record; one that stands is kept if it is of this file and prompt."""
    held = SmokeRecord.from_json(read_json(smoke_path(run, tier)))
    wanted = (sha256, protocol.gate.smoke_prompt, protocol.gate.smoke_n_predict)
    if held is not None and (held.sha256, held.prompt, held.n_predict) == wanted:
        return held
    record = smoke_test(pool, protocol, file, sha256, n_threads)
    write_json(smoke_path(run, tier), record.to_json())
    return record


def smoke_test(pool: WorkerPool, protocol: Protocol, file: Path, sha256: str, n_threads: int) -> SmokeRecord:
    """Ask a file and judge the answer. A crash or an error of the library is a failure of the file, recorded in its words.

    Args:
        file: the GGUF, or the first part of a split one.
        sha256: of the file, for the record.

    Raises:
        EngineKilled: the process was ended; that says nothing about the file.
    """
    gate, template = protocol.gate, describe_model(read_header(file)).chat_template_sha256
    arguments: dict[str, Any] = {"path": read_header(file).parts[0], "prompt": gate.smoke_prompt, "n_predict": gate.smoke_n_predict,
                                 "n_threads": n_threads}
    answer, served, failures = None, None, []
    through: Literal["server", "in-process"] = "server" if has_server() else "in-process"
    try:
        answer = pool.call(f"smoke {file.stem}", answer_prompt, **arguments)
        if through == "server":
            served = pool.call(f"serve {file.stem}", serve_prompt, chat=answer.template_applied, **arguments)
    except EngineKilled:
        raise
    except (EngineError, EngineCrash) as error:
        failures.append(_without_folder(str(error), file))
    return _judge(protocol, file, sha256, template, through, answer, served, failures)


def _judge(protocol: Protocol, file: Path, sha256: str, template: str | None, through: Literal["server", "in-process"],
           answer: Answer | None, served: ServedAnswer | None, failures: list[str]) -> SmokeRecord:
    ids, data = (answer.token_ids, answer.text) if answer else ((), b"")
    valid, text = _decode(data)
    if answer is not None:
        if len(ids) < MIN_TOKENS:
            failures.append(f"expected at least {MIN_TOKENS} tokens, got {len(ids)}")
        if not valid:
            failures.append("expected UTF-8, got other bytes")
    if served is not None and served.n_tokens < MIN_TOKENS:
        failures.append(f"expected at least {MIN_TOKENS} tokens from the server, got {served.n_tokens}")
    mtp = protocol.mtp
    return SmokeRecord(
        schema=SCHEMA, file=file.name, sha256=sha256, prompt=protocol.gate.smoke_prompt, n_predict=protocol.gate.smoke_n_predict,
        template=template or "none", through=through, n_tokens=len(ids), ended=bool(answer and answer.ended), valid_utf8=valid,
        repeat_share=repeat_share(ids, mtp.repeat_ngram), text=text,
        looped=is_degenerate(ids, mtp.repeat_ngram, mtp.max_repeat_share),
        served_text=served.text if served is not None and served.text != text else None, passed=not failures,
        failures=tuple(failures))


def _decode(data: bytes) -> tuple[bool, str]:
    """Whether bytes are UTF-8, but for a character that the end cuts, and their text."""
    try:
        return True, codecs.getincrementaldecoder("utf-8")().decode(data, final=False)
    except UnicodeDecodeError:
        return False, data.decode(errors="replace")


def _without_folder(text: str, file: Path) -> str:
    """The record is published, so it names no folder of this machine."""
    return text.replace(f"{file.parent.resolve()}/", "").replace(f"{file.parent}/", "")
