"""docs/ERRORS.md out of the source: every message that an error of ours can have, by exit code and class.

A message is written down as its pattern, with `…` where a value stands. Where the source builds an error in a helper
(`cursor.fail`, `fail`, `_damaged`), the calls of the helper are the messages.

usage: python -m tests.error_document        (writes the document; a test fails where it is out of date)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from quantkit.core import errors

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "ERRORS.md"
GAP = "…"

CLASSES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.QuantkitError)}
# What stands in the code of a helper itself; its calls are the messages.
OF_HELPERS = {f"{GAP}: {GAP}", f"{GAP}: {GAP}; {GAP}", f"{GAP}: expected {GAP}, got {GAP}; {GAP}"}
# Records that do not verify are told as findings of `quantkit verify`, after what was expected of them.
FINDINGS = ("quantkit/job/verify_files.py", "quantkit/job/verify_records.py", "quantkit/job/verify_rows.py")

HEAD = """# Every error, by exit code

What a message looks like, with … where a value stands. A message says what was expected, what was found and where, and what to do.
It goes to stderr after `quantkit: `; no output is left half-written. A traceback is a defect.
This list is made from the source: `python -m tests.error_document`.

| Exit code | Means | What helps |
| ---: | :--- | :--- |
| 0 | done | |
| 1 | a gate or a verification said no, or a report is out of date | the message names what, expected and found |
| 2 | a wrong argument, or a file that is not what it must be | correct the argument or fetch the file again; nothing was changed |
| 3 | this machine cannot do it now | make room, wait or install, then give the same command again: it goes on where it stopped |
| 130 | interrupted | the same command goes on where it stopped |
"""

ADVICE = {
    "CheckFailed": "Nothing is broken: the answer is no. What was compared stands in the message.",
    "EnvironmentFault": "What the machine, the network or an installation lacks. Finished steps are kept.",
    "EngineCrash": "A worker process died or hung: the step, the signal and the last lines of its log are told; the whole log is"
                   " in `logs/` of the run. Other tiers go on. The same command tries the step again; with less memory "
                   "(`--workers 1`, `--memory`) if it was memory.",
    "EngineKilled": "The process was ended from outside, mostly for want of memory, or because it hung. This says nothing about "
                    "the file: the same command tries again, with less memory if it is given `--workers 1` or `--memory`.",
    "EngineError": "llama.cpp refused or gave what cannot be used; its own words are in the message. The file is at fault, or "
                   "the build: `quantkit doctor` tells which.",
    "NoSpace": "Free space or choose another folder; the same command goes on.",
    "RunLocked": "Two processes would undo each other's work. A lock ends with its process, however that dies; nothing has to "
                 "be removed by hand.",
    "InputError": "An argument, a record or a file that is not what it must be.",
    "GgufError": "A model's header was read and makes no sense, or llama.cpp would not take it. The file was cut, damaged, "
                 "made by a converter of another time, or is no model: fetch or convert it again. `quantkit show` reads what "
                 "can be read.",
    "ProtocolError": "A protocol file; the dotted path says where in it. docs/PROTOCOL.md explains each key.",
    "PlanError": "A plan that cannot be carried out as it is written, found before any work. `quantkit plan` shows it.",
    "CorpusError": "A text that is missing or has other bytes. Numbers on another text are other numbers, so there is no way "
                   "around it.",
    "ImatrixError": "An importance matrix that is damaged or belongs to another model. `quantkit imatrix show` tells what it "
                    "covers.",
}


class Message(NamedTuple):
    """One way in which an error can speak: its class, its pattern, and where in the source it is made."""

    kind: str
    pattern: str
    where: str


def all_messages() -> list[Message]:
    """Every message of the package, once for each pattern."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted((ROOT / "quantkit").rglob("*.py")):
        for message in messages_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")):
            found.setdefault((message.kind, message.pattern), message)
    return sorted(found.values(), key=lambda m: (m.pattern.lstrip(f"{GAP}: ").casefold(), m.pattern))


def messages_of(where: str, source: str) -> Iterator[Message]:
    """The messages of one file."""
    tree = ast.parse(source)
    words = _constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        at = f"{where}:{node.lineno}"
        if name in CLASSES:
            pattern = pattern_of(node.args[0], words)
            if pattern not in OF_HELPERS and pattern != GAP and (where not in FINDINGS or "expected" in pattern):
                yield Message(name, pattern, at)
        elif name == "fail" and isinstance(node.func, ast.Name) and len(node.args) > 1:
            path = pattern_of(node.args[0], words)
            then = pattern_of(node.args[3], words) if len(node.args) > 3 else "correct it"
            yield Message("ProtocolError", f"{path}: expected {pattern_of(node.args[1], words)}, got {GAP}; {then}", at)
        elif name == "fail" and where.startswith("quantkit/spec/gguf"):
            then = pattern_of(node.args[1], words) if len(node.args) > 1 else "fetch or convert the file again"
            yield Message("GgufError", f"{GAP}: {pattern_of(node.args[0], words)}; {then}", at)
        elif name == "_damaged" and len(node.args) > 1:
            yield Message("InputError", f"the reference pack {GAP} is damaged: {pattern_of(node.args[1], words)}; fetch it "
                                        "again, or make it anew with `quantkit refpack make`", at)


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a file gives a name at its top, for they stand in several of its messages."""
    return {target.id: node.value.value for node in tree.body if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)}


def pattern_of(node: ast.expr, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """A text with `…` for what is known at run time only; several of them in a row are one. `words` are constants of the file."""
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, _shape(node, words)).strip()


def _shape(node: ast.expr, words: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shape(value, words) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _shape(node.value, words) if isinstance(node.value, ast.Name) else GAP
    if isinstance(node, ast.Name):
        return words.get(node.id, GAP)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shape(node.left, words) + _shape(node.right, words)
    return GAP


def document() -> str:
    """The whole of docs/ERRORS.md."""
    messages = all_messages()
    lines = [HEAD]
    for code in (1, 2, 3):
        lines.append(f"## Exit code {code}\n")
        for name, kind in CLASSES.items():
            own = [message for message in messages if message.kind == name]
            if kind.exit_code != code or name not in ADVICE:
                continue
            lines += [f"### {name}\n", f"{ADVICE[name]}\n", *(f"- {_markdown(message.pattern)}" for message in own), ""]
    return "\n".join(lines)


def _markdown(pattern: str) -> str:
    """A pattern as it is printed, in code; a list of lines below the first is left out."""
    line = pattern.split("\n")[0].strip() + (f" {GAP}" if "\n" in pattern else "")
    fence = "``" if "`" in line else "`"
    pad = " " if fence == "``" else ""
    return f"{fence}{pad}{line}{pad}{fence}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), "utf-8")
