"""Texts by hash: where they are searched, what the hub gives, and what a wrong text is told to be."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.core.errors import CorpusError
from quantkit.job.corpus import cache_folder, explain_mismatch, find_corpus, join_rows, locate_corpus, read_corpus
from quantkit.spec.protocol import Corpus, load_protocol

TEXT = b" \n = A town = \n \n The town is old . \n It lies by a river . \n \n = = Trade = = \n \n \n Wool , mostly . \n \n"
ROWS = ["", " = A town = \n", "", " The town is old . \n", " It lies by a river . \n", "", " = = Trade = = \n", "", "",
        " Wool , mostly . \n", ""]


def corpus_of(data: bytes = TEXT, *, hub: bool = True, documents: str = "wikitext") -> Corpus:
    place = ("owner/text", "raw-v1", "test") if hub else ("", "", "")
    return Corpus(name="the text", file="text.raw", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data),
                  documents="wikitext" if documents == "wikitext" else "none", format="text", hub_dataset=place[0],
                  hub_config=place[1], hub_split=place[2])


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, an empty cache, and a hub that is out of reach."""
    monkeypatch.delenv("QUANTKIT_CORPUS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    set_hub(monkeypatch, refuse)


def refuse(*args: str, **options: str) -> Any:
    raise ConnectionError("Couldn't reach 'owner/text' on the Hub\nmore lines")


def set_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def set_rows(monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """A hub that holds these rows; returns the calls it gets."""
    calls = []

    def load_dataset(*args: str, **options: str) -> dict[str, list[str]]:
        calls.append((args, options))
        return {"text": rows}

    set_hub(monkeypatch, load_dataset)
    return calls


def rows_of(data: bytes) -> list[str]:
    """The rows of a WikiText copy on the hub: a line each, blank ones empty."""
    return ["" if line == " \n" else line for line in data.decode().splitlines(keepends=True)]


class TestSearch:
    def test_the_path_given(self, tmp_path: Path) -> None:
        path = tmp_path / "anything.txt"
        path.write_bytes(TEXT)
        assert find_corpus(corpus_of(), path) == path
        assert read_corpus(corpus_of(), path) == TEXT

    def test_a_folder_given(self, tmp_path: Path) -> None:
        (tmp_path / "text.raw").write_bytes(TEXT)
        assert find_corpus(corpus_of(), tmp_path) == tmp_path / "text.raw"

    def test_a_path_given_is_the_only_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "text.raw").write_bytes(TEXT)
        monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(tmp_path))
        with pytest.raises(CorpusError, match=r"expected the text the text at .*gone\.txt, found no file there"):
            find_corpus(corpus_of(), tmp_path / "gone.txt")

    def test_the_folder_of_the_environment_before_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder in (tmp_path / "mine", tmp_path / "cache" / "quantkit" / "corpora"):
            folder.mkdir(parents=True)
            (folder / "text.raw").write_bytes(TEXT)
        monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(tmp_path / "mine"))
        assert find_corpus(corpus_of()) == tmp_path / "mine" / "text.raw"
        monkeypatch.delenv("QUANTKIT_CORPUS_DIR")
        assert find_corpus(corpus_of()) == tmp_path / "cache" / "quantkit" / "corpora" / "text.raw"

    def test_a_wrong_text_in_the_folder_is_not_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "text.raw").write_bytes(TEXT + b"x")
        monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(tmp_path))
        set_rows(monkeypatch, ROWS)
        with pytest.raises(CorpusError, match=r"found sha256"):
            find_corpus(corpus_of())

    def test_a_folder_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(tmp_path / "gone"))
        with pytest.raises(CorpusError, match=r"expected a folder in QUANTKIT_CORPUS_DIR, got .*gone: correct it or unset it"):
            find_corpus(corpus_of())

    def test_bundled_texts(self) -> None:
        protocol = load_protocol("demo-v1")
        for name in (*protocol.eval.corpora, protocol.imatrix.corpus):
            corpus = protocol.corpus(name)
            assert len(read_corpus(corpus)) == corpus.size_bytes

    def test_a_text_on_no_hub(self) -> None:
        corpus = corpus_of(hub=False)
        with pytest.raises(CorpusError) as caught:
            find_corpus(corpus)
        assert str(caught.value) == (
            f"the text the text ({len(TEXT)} bytes, sha256 {corpus.sha256}) is on no hub: give its path, or set "
            "QUANTKIT_CORPUS_DIR to a folder that holds text.raw")


class TestHub:
    def test_rows_become_the_file_and_stay_in_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = set_rows(monkeypatch, ROWS)
        cached = tmp_path / "cache" / "quantkit" / "corpora" / "text.raw"
        assert locate_corpus(corpus_of()) is None
        assert not cached.parent.exists()
        assert find_corpus(corpus_of()) == cached
        assert cached.read_bytes() == TEXT
        assert [path.name for path in cached.parent.iterdir()] == ["text.raw"]
        assert find_corpus(corpus_of()) == cached
        assert calls == [(("owner/text", "raw-v1"), {"split": "test"})]

    def test_wikitext_2(self, wiki_test: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = wiki_test.read_bytes()
        calls = set_rows(monkeypatch, rows_of(data))
        assert read_corpus(load_protocol("wikitext2-v1").corpus("wiki.test.raw")) == data
        assert calls == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})]

    def test_a_damaged_cache_is_fetched_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cached = tmp_path / "cache" / "quantkit" / "corpora" / "text.raw"
        cached.parent.mkdir(parents=True)
        cached.write_bytes(TEXT[:-5])
        set_rows(monkeypatch, ROWS)
        assert read_corpus(corpus_of()) == TEXT

    def test_another_text_is_refused_and_not_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        set_rows(monkeypatch, [*ROWS, "more\n"])
        found = hashlib.sha256(TEXT + b"more\n").hexdigest()
        with pytest.raises(CorpusError, match=rf"sha256 {corpus_of().sha256} from the hub's owner/text .*, got sha256 {found}"):
            find_corpus(corpus_of())
        assert not (tmp_path / "cache").exists()

    def test_no_network(self) -> None:
        with pytest.raises(CorpusError) as caught:
            find_corpus(corpus_of())
        assert str(caught.value) == (
            "the text the text is not on this machine, and the hub's owner/text (raw-v1, test) cannot be read (ConnectionError: "
            "Couldn't reach 'owner/text' on the Hub): connect to the network; or set QUANTKIT_CORPUS_DIR to a folder that holds "
            f"text.raw ({len(TEXT)} bytes, sha256 {corpus_of().sha256}), or give its path")

    @pytest.mark.parametrize("rows", [{"other": []}, {"text": [3]}, {"text": None}])
    def test_a_dataset_of_another_form(self, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        set_hub(monkeypatch, lambda *args, **options: rows)
        with pytest.raises(CorpusError, match="cannot be read"):
            find_corpus(corpus_of())

    def test_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(CorpusError, match=r"the package datasets cannot be imported .*: install it; or set QUANTKIT_C"):
            find_corpus(corpus_of())


class TestCache:
    def test_beside_other_caches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "quantkit" / "corpora"

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        set_rows(monkeypatch, ROWS)
        assert cache_folder() is None
        with pytest.raises(CorpusError, match="found neither XDG_CACHE_HOME nor a home folder: set one of them, or set QUANTKIT"):
            find_corpus(corpus_of())


class TestWrongTexts:
    """What people do to the text; each is undone and hashed, so the answer is certain."""

    @pytest.mark.parametrize(("done", "words"), [
        (lambda t: t.replace(b"\n", b"\r\n"), "its lines end in CRLF"),
        (lambda t: b"\xef\xbb\xbf" + t, "it begins with a byte order mark"),
        (lambda t: t + b"\n", "there is a newline too much at its end"),
        (lambda t: t.strip(), "blanks at its start or end are missing"),
        (lambda t: t.rstrip(), "blanks at its start or end are missing"),
        (lambda t: t[:-1], "blanks at its start or end are missing"),
        (lambda t: b"\n".join(line.strip() for line in t.split(b"\n")), "its lines were stripped of the spaces at both ends"),
        (lambda t: b"\n".join(line.strip() for line in t.splitlines()), "its lines were stripped of the spaces at both ends"),
        (lambda t: b"\n".join(line.rstrip() for line in t.split(b"\n")), "its lines were stripped of the spaces at their ends"),
        (lambda t: "\n".join(rows_of(t)).encode(), "its rows were joined with a newline"),
        (lambda t: "\n\n".join(rows_of(t)).encode(), "its rows were joined with two newlines"),
        (lambda t: "".join(rows_of(t)).encode(), "it has no empty lines, as if the rows of a dataset were joined with nothing"),
        (lambda t: t.replace(b" river ", b" <unk> "), "it holds <unk>, as the tokenized WikiText does"),
        (lambda t: t[:40], f"it is {len(TEXT) - 40} bytes too short, as after a broken download"),
        (lambda t: b"\n \n" + t.swapcase(), "it is another text"),
        (lambda t: t * 3, "it is another text, and longer"),
    ])
    def test_is_told(self, done: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
        path = tmp_path / "text.raw"
        path.write_bytes(done(TEXT))
        with pytest.raises(CorpusError) as caught:
            read_corpus(corpus_of(), path)
        message = str(caught.value)
        found = hashlib.sha256(done(TEXT)).hexdigest()
        assert message.startswith(f"expected the text the text with sha256 {corpus_of().sha256} ({len(TEXT)} bytes), found sha256 "
                                  f"{found} ({len(done(TEXT))} bytes) at {path}: {words}")
        assert message.endswith("; use the original bytes")

    @pytest.mark.parametrize(("done", "words"), [
        (lambda t: t.replace(b"\n", b"\r\n"), "its lines end in CRLF"),
        (lambda t: b"\n".join(line.strip() for line in t.split(b"\n")), "its lines were stripped of the spaces at both ends"),
        (lambda t: "\n\n".join(rows_of(t)).encode(), "its rows were joined with two newlines"),
        (lambda t: "".join(rows_of(t)).encode(), "it has no empty lines, as if the rows of a dataset were joined with nothing "
                                                 "between them"),
    ])
    def test_of_wikitext_2(self, done: Callable[[bytes], bytes], words: str, wiki_test: Path) -> None:
        corpus = load_protocol("wikitext2-v1").corpus("wiki.test.raw")
        assert explain_mismatch(done(wiki_test.read_bytes()), corpus) == words

    def test_lines_are_never_translated(self, tmp_path: Path) -> None:
        data = "a\r\nb\u2028c\x85\n".encode()
        path = tmp_path / "text.raw"
        path.write_bytes(data)
        assert read_corpus(corpus_of(data), path) == data

    @given(st.binary(max_size=60))
    def test_something_is_always_said(self, data: bytes) -> None:
        assert explain_mismatch(data, corpus_of())


@given(st.lists(st.one_of(st.just(""), st.text(st.characters(categories=["L", "P"]), min_size=1).map(lambda line: f" {line} \n"))))
@pytest.mark.slow
def test_rows_and_bytes_are_two_forms_of_one_text(rows: list[str]) -> None:
    assert rows_of(join_rows(rows)) == rows
