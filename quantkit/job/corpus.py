"""Texts by hash: found by path, in `QUANTKIT_CORPUS_DIR`, in the package, in the cache or on the hub, and never taken unchecked.

The rows of a WikiText copy on the hub give the original file's bytes when each empty row becomes `" \\n"` and the others are
joined as they are. Everything else that people do to such a text (rows joined with nothing or with newlines, lines stripped,
CRLF) gives other bytes, hence other numbers; where that is what happened, the refusal says so.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from quantkit.core.errors import CorpusError
from quantkit.core.files import sha256_file, write_atomic
from quantkit.core.secrets import hide_secrets
from quantkit.job.hub.client import check_endpoint
from quantkit.spec.protocol import Corpus

FOLDER_VARIABLE = "QUANTKIT_CORPUS_DIR"

_BUNDLED = Path(__file__).resolve().parents[1] / "data" / "demo"
_BOM = b"\xef\xbb\xbf"


def read_corpus(corpus: Corpus, explicit: Path | None = None) -> bytes:
    """The bytes of a text, hash checked.

    Args:
        corpus: the text as the protocol names it.
        explicit: its file, or a folder that holds it; then nowhere else is searched.

    Raises:
        CorpusError: found nowhere, or found with another hash; says what to do.
    """
    path = find_corpus(corpus, explicit)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != corpus.sha256:
        raise CorpusError(f"{path} changed while it was read: run again when nothing writes to it")
    return data


def find_corpus(corpus: Corpus, explicit: Path | None = None) -> Path:
    """The file of a text, hash checked; fetched from the hub into the cache if it is nowhere else.

    The order: the path given, `QUANTKIT_CORPUS_DIR`, the package, the cache, the hub. A file of the right name with other bytes
    is an error and not passed over, except in the cache, where it is fetched again.

    Raises:
        CorpusError: as `read_corpus`.
    """
    found = locate_corpus(corpus, explicit)
    if found is not None:
        return found
    cache = cache_folder()
    assert cache is not None  # or nothing could be fetched
    write_atomic(cache / corpus.file, _fetch(corpus))
    return cache / corpus.file


def locate_corpus(corpus: Corpus, explicit: Path | None = None) -> Path | None:
    """The file of a text on this machine, hash checked; None where it would be fetched from the hub into the cache.

    Raises:
        CorpusError: as `read_corpus`, but for what the hub says.
    """
    if explicit is not None:
        path = explicit / corpus.file if explicit.is_dir() else explicit
        if not path.is_file():
            raise CorpusError(f"expected the text {corpus.name} at {path}, found no file there: correct the path")
        return _checked(path, corpus)
    for folder in _folders():
        if (folder / corpus.file).is_file():
            return _checked(folder / corpus.file, corpus)
    cache = cache_folder()
    cached = cache / corpus.file if cache else None
    if cached and cached.is_file() and (not corpus.hub_dataset or sha256_file(cached) == corpus.sha256):
        return _checked(cached, corpus)
    if not corpus.hub_dataset:
        raise CorpusError(f"the text {corpus.name} ({corpus.size_bytes} bytes, sha256 {corpus.sha256}) is on no hub: "
                          f"give its path, or set {FOLDER_VARIABLE} to a folder that holds {corpus.file}")
    if cached is None:
        raise CorpusError(f"expected a cache folder for the text {corpus.name}, found neither XDG_CACHE_HOME nor a home folder: "
                          f"set one of them, or set {FOLDER_VARIABLE} to a folder that holds {corpus.file}")
    return None


def cache_folder() -> Path | None:
    """Where fetched texts are kept: `quantkit/corpora` under XDG_CACHE_HOME or ~/.cache; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the XDG rules say to ignore a relative one
        return Path(base) / "quantkit" / "corpora"
    try:
        return Path.home() / ".cache" / "quantkit" / "corpora"
    except RuntimeError:
        return None


def join_rows(rows: Iterable[str]) -> bytes:
    """The bytes of the original file from the rows of a WikiText copy: an empty row becomes `" \\n"`, others stay as they are."""
    return "".join(row or " \n" for row in rows).encode()


def explain_mismatch(data: bytes, corpus: Corpus) -> str:
    """What was probably done to a text whose hash is another one, as the end of a sentence; never empty.

    What can be undone is undone and hashed, so the answer is certain; what cannot is told by its traces.
    """
    for words, undo in _UNDO.items():
        if any(hashlib.sha256(text).hexdigest() == corpus.sha256 for text in undo(data)):
            return words
    if corpus.documents == "wikitext" and b"\n" in data and b"\n \n" not in data and b"\n\n" not in data:
        return "it has no empty lines, as if the rows of a dataset were joined with nothing between them"
    if corpus.documents == "wikitext" and b" <unk> " in data:
        return "it holds <unk>, as the tokenized WikiText does: the raw one is meant"
    if len(data) < corpus.size_bytes:
        return f"it is {corpus.size_bytes - len(data)} bytes too short, as after a broken download"
    return "it is another text"


def _folders() -> list[Path]:
    given = os.environ.get(FOLDER_VARIABLE, "")
    if given and not Path(given).is_dir():
        raise CorpusError(f"expected a folder in {FOLDER_VARIABLE}, got {given}: correct it or unset it")
    return [*([Path(given)] if given else []), _BUNDLED]


def _checked(path: Path, corpus: Corpus) -> Path:
    found = sha256_file(path)
    if found == corpus.sha256:
        return path
    size_bytes = path.stat().st_size
    why = explain_mismatch(path.read_bytes(), corpus) if size_bytes < 2 * corpus.size_bytes else "it is another text, and longer"
    raise CorpusError(f"expected the text {corpus.name} with sha256 {corpus.sha256} ({corpus.size_bytes} bytes), found sha256 "
                      f"{found} ({size_bytes} bytes) at {path}: {why}; use the original bytes")


def _fetch(corpus: Corpus) -> bytes:
    where = f"{corpus.hub_dataset} ({corpus.hub_config}, {corpus.hub_split})"
    instead = (f"set {FOLDER_VARIABLE} to a folder that holds {corpus.file} "
               f"({corpus.size_bytes} bytes, sha256 {corpus.sha256}), or give its path")
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(f"the text {corpus.name} must be fetched from the hub, and the package datasets cannot be imported "
                          f"({error}): install it; or {instead}") from error
    check_endpoint(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        rows = datasets.load_dataset(corpus.hub_dataset, corpus.hub_config, split=corpus.hub_split)["text"]
        data = join_rows(rows)
    except Exception as error:  # the libraries beneath raise whatever they like when there is no network
        reason = hide_secrets(str(error).splitlines()[0])[:200] if str(error) else ""
        raise CorpusError(f"the text {corpus.name} is not on this machine, and the hub's {where} cannot be read "
                          f"({type(error).__name__}: {reason}): connect to the network; or {instead}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != corpus.sha256:
        raise CorpusError(f"expected the text {corpus.name} with sha256 {corpus.sha256} from the hub's {where}, got sha256 {found} "
                          f"({len(data)} bytes): the dataset has changed; {instead}")
    return data


def _restore_lines(data: bytes, start: bytes) -> Iterator[bytes]:
    """Give stripped lines their spaces back; the last line may have lost its newline."""
    for text in (data, data + b"\n"):
        yield b"".join((start + line if line else b"") + b" \n" for line in text.removesuffix(b"\n").split(b"\n"))


def _restore_ends(data: bytes) -> Iterator[bytes]:
    """Give a stripped text its first and last blanks back."""
    for start in (b"", b" ", b" \n "):
        for end in (b"\n", b" \n", b" \n \n"):
            yield start + data + end


def _unjoin(data: bytes, n: int) -> Iterator[bytes]:
    """Undo joining rows, each but the empty ones with its own newline, with n newlines.

    Between two rows with k empty ones between them stand 1 + n·(k+1) newlines; at the start n·k; at the end 1 + n·k.
    """
    def restore(run: re.Match[bytes]) -> bytes:
        if run.start() == 0:
            return b" \n" * (len(run[0]) // n)
        k = (len(run[0]) - 1) // n - (run.end() < len(data))
        return b"\n" + b" \n" * k

    yield re.sub(rb"\n+", restore, data)


# what was done: the texts of which one is the original, if that was it
_UNDO: Mapping[str, Callable[[bytes], Iterable[bytes]]] = {
    "its lines end in CRLF": lambda data: [data.replace(b"\r\n", b"\n")],
    "it begins with a byte order mark": lambda data: [data.removeprefix(_BOM)],
    "there is a newline too much at its end": lambda data: [data.removesuffix(b"\n")],
    "blanks at its start or end are missing": _restore_ends,
    "its lines were stripped of the spaces at both ends": lambda data: _restore_lines(data, b" "),
    "its lines were stripped of the spaces at their ends": lambda data: _restore_lines(data, b""),
    "its rows were joined with a newline": lambda data: _unjoin(data, 1),
    "its rows were joined with two newlines": lambda data: _unjoin(data, 2),
}
