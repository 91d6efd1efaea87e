"""docs/ERRORS.md is what the source says, and what the source says can be understood."""

from __future__ import annotations

import ast
import re

import pytest

from quantkit.core import errors
from tests.error_document import ADVICE, CLASSES, DOCUMENT, GAP, Message, all_messages, document, messages_of, pattern_of

MESSAGES = all_messages()

# What a user of the command line cannot act on: words of a programming language, of a machine, of ourselves.
JARGON = re.compile(r"\b([Ee]xception|[Tt]raceback|NoneType|None|errno|assert\w*|stack|null|dict|tuple|self|kwargs|[Ii]nvalid|"
                    r"[Ii]llegal|bad|unable|[Oo]ops|[Pp]lease|[Ss]orry|bug)\b|!$")
FOUND = re.compile(r"\b(got|found|missing|none|lacks?|gave|led|wrote|read|has|in only|cannot|but|is no|is a|it)\b|: …$|; …:")


# What to do begins with one of these, after a stop of some kind.
STEPS = {
    "add", "allow", "ask", "audit", "begin", "calibrate", "change", "check", "choose", "clear", "collect", "connect", "convert",
    "correct", "decide", "drop", "end", "evaluate", "fetch", "flatten", "free", "gate", "give", "install", "keep", "leave",
    "let", "log", "lower", "make", "mark", "measure", "merge", "name", "narrow", "pass", "plan", "print", "publish", "put",
    "quantize", "raise", "read", "rename", "run", "screen", "see", "set", "shorten", "show", "split", "start", "strip", "take",
    "try", "undo", "unset", "use", "verify", "wait", "write",
}
ELSEWHERE = {  # why a message needs no step of its own
    f"cannot work in {GAP}: {GAP}; {GAP}": "the step is an argument",
    (f"expected the text {GAP} with sha256 {GAP} from the hub's {GAP}, got sha256 {GAP} ({GAP} bytes): "
     f"the dataset has changed; {GAP}"):
        "the step is the same in several messages, and has the text's name in it",
    f"the system refused{GAP}: {GAP}": "a finding of the doctor, which has its fix in a column",
    f"expected an importance matrix at {GAP}: {GAP}": "ends with the message of the header's reader",
    f"expected an importance matrix: {GAP}": "ends with the message of the reading process",
    f"chunk {GAP} of the calibration text: {GAP}": "ends with the message of the pass that failed",
}


def tells_what_to_do(pattern: str) -> bool:
    """Whether a clause of a message is an order."""
    return not STEPS.isdisjoint(word for clause in re.split(r"[:;,] | and | or |\n", pattern) for word in clause.split()[:1])


def test_every_message_says_what_to_do() -> None:
    silent = {message.pattern for message in MESSAGES if not tells_what_to_do(message.pattern)}
    assert silent == set(ELSEWHERE)


def test_the_document_is_what_the_source_says() -> None:
    assert DOCUMENT.read_text("utf-8") == document(), "write it again: python -m tests.error_document"


def test_every_class_is_explained() -> None:
    assert set(ADVICE) == set(CLASSES) - {"QuantkitError"}
    assert {kind.exit_code for kind in CLASSES.values()} == {1, 2, 3}
    tree = errors.__doc__ or ""
    assert [name for name in ADVICE if not re.search(rf"{name} +{CLASSES[name].exit_code}\b", tree)] == []


def test_there_are_many() -> None:
    """The walk over the source finds them, helpers included."""
    kinds = {message.kind for message in MESSAGES}
    assert set(ADVICE) - {"EngineKilled"} <= kinds  # that one has the words of a crash
    assert len(MESSAGES) > 300


def faults_of(message: Message) -> list[str]:
    """What is wrong with how a message is written."""
    pattern, faults = message.pattern, []
    if found := JARGON.search(re.sub(r"`[^`]*`", "", pattern)):
        faults.append(f"says {found[0]!r}")
    if pattern.endswith("."):
        faults.append("ends with a full stop")
    if re.match(r"[A-Z][a-z]", pattern):
        faults.append("begins with a capital")
    if not re.search(r"[a-z]{3,}.*[a-z (…]", pattern):
        faults.append("is no sentence")
    if "got" in pattern and "expected" not in pattern and "cannot" not in pattern:
        faults.append("says what it got and not what it expected")
    if "expected" in pattern and not FOUND.search(pattern):
        faults.append("says what it expected and not what it found")
    return faults


def test_every_message_is_a_sentence_with_what_was_expected_and_found() -> None:
    assert [f"{message.where} {fault}: {message.pattern}" for message in MESSAGES for fault in faults_of(message)] == []


@pytest.mark.parametrize(("pattern", "fault"), [
    ("Invalid file", "says 'Invalid'"), ("expected a file.", "ends with a full stop"),
    ("expected a file", "says what it expected and not what it found"),
    ("42", "is no sentence"), ("a file, got another one", "says what it got and not what it expected"),
])
def test_a_poor_message_is_seen(pattern: str, fault: str) -> None:
    assert fault in faults_of(Message("InputError", pattern, "x.py:1"))


def test_patterns() -> None:
    def of(source: str) -> str:
        return pattern_of(ast.parse(source, mode="eval").body)

    assert of('f"expected {a!r}, " f"got {b}" + rest(c)') == f"expected {GAP}, got {GAP}"
    assert of('f"{a}{b} x"') == f"{GAP} x"
    source = 'raise InputError(f"no {x}")\ncursor.fail("odd")\nraise ValueError("y")\n'
    assert [m.pattern for m in messages_of("quantkit/spec/gguf_x.py", source)] == [
        f"no {GAP}", f"{GAP}: odd; fetch or convert the file again"]
