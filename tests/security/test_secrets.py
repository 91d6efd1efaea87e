"""Tokens, passwords and signed addresses stay out of messages, records and logs; nothing travels in the clear."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from quantkit.core.errors import CorpusError, EnvironmentFault, InputError
from quantkit.core.secrets import hide_secrets
from quantkit.job import corpus
from quantkit.job.hub import client
from quantkit.job.hub.client import Hub, check_endpoint
from quantkit.job.hub.publish import plan_publish, publish
from quantkit.job.progress import Silent
from quantkit.spec.protocol import load_protocol
from tests.hub_server import HubServer
from tests.job.hub.conftest import hub as hub
from tests.job.hub.conftest import run as run

TOKEN = "hf_" + "Ab1" * 12  # looks like one, and is none
ODD = "a-token-of-no-known-form"


@pytest.mark.parametrize(("text", "shown"), [
    (f"401 for token {TOKEN}.", "401 for token hf_***."),
    (f"headers {{'authorization': 'Bearer {TOKEN}'}}", "headers {'authorization': 'Bearer hf_***'}"),
    ("Authorization: Bearer abcdefgh.ijkl-mnop", "Authorization: Bearer ***"),
    ("ProxyError https://me:secret@proxy.example:8080/x", "ProxyError https://***@proxy.example:8080/x"),
    ("GET https://cdn.example/x?X-Amz-Signature=abc123&X-Amz-Credential=AK/1&n=1",
     "GET https://cdn.example/x?X-Amz-Signature=***&X-Amz-Credential=***&n=1"),
    ("https://x.example/f?Signature=aa~bb__&Key-Pair-Id=K1", "https://x.example/f?Signature=***&Key-Pair-Id=***"),
    ("ghp_" + "a" * 36, "ghp_***"), ("sk-" + "a" * 40, "sk-***"),
    (f"the variable holds {ODD}", "the variable holds ***"),
])
def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.setenv("HF_TOKEN", ODD)
    assert hide_secrets(text) == shown


@pytest.mark.parametrize("text", ["hf_hub is a library", "task-force-of-a-long-name.gguf", "a@b.example", "n_tokens=512 & key",
                                  "https://huggingface.co/user/model?download=true", "half_" + "a" * 40])
def test_ordinary_words_stay(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """A token that the library sends with every request."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return TOKEN


@pytest.mark.parametrize("pattern", ["GET /api/models", "POST", "PUT"])
def test_no_token_in_what_a_failed_upload_leaves(hub: HubServer, run: Path, token: str, pattern: str,
                                                 capfd: pytest.CaptureFixture[str]) -> None:
    hub.fail(pattern, kind="500", times=99)
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign,assignment]
    try:
        publish(plan_publish(run, "user/model"), progress)
    except EnvironmentFault as error:
        notes += [str(error), repr(error)]
    said = "\n".join(notes) + "".join(capfd.readouterr())
    assert "failed" in said
    assert token not in said
    assert [path for path in run.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []


def test_no_token_in_what_a_success_leaves(hub: HubServer, run: Path, token: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish(plan_publish(run, "user/model"), Silent())
    assert token not in "".join(capfd.readouterr())
    assert [path for path in run.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []
    assert [name for name, data in hub.repos["user/model"].files.items() if token.encode() in data] == []


def test_an_error_that_quotes_the_request_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(f"POST https://me:pw@hub.example/x?sig=abc with Bearer {TOKEN}\nsecond line")

    hub = Hub("user/model")
    monkeypatch.setattr(hub._api, "repo_info", fail)
    with pytest.raises(EnvironmentFault) as caught:
        hub.head()
    assert str(caught.value) == ("asking for user/model failed: OSError: POST https://***@hub.example/x?sig=*** with Bearer "
                                 "hf_***; run the same command again to go on from there")


def test_an_error_of_the_data_sets_library_is_cleaned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError(f"401 with token {TOKEN}")

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUANTKIT_CORPUS_DIR", raising=False)
    with pytest.raises(CorpusError) as caught:
        corpus.read_corpus(load_protocol("wikitext2-quick-v1").corpora[0], None)
    assert "401 with token hf_***" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_an_endpoint_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(InputError) as caught:
        check_endpoint("https://me:secret@hub.example")
    assert str(caught.value) == ("expected an address without user and password in HF_ENDPOINT, got 'https://***@hub.example': "
                                 "log in with `hf auth login` instead")


@pytest.mark.parametrize("url", [
    "http://cdn.example/x?sig=abc", "ftp://cdn.example/x", "http://127.0.0.1.evil.example/x", "file:///etc/passwd"])
def test_a_redirect_to_plain_http_gives_nothing(url: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"reading x: expected an https address, the hub led to .*: nothing of it was used"):
        client._check_redirects(["https://hub.example/x", url], "reading x")
    client._check_redirects(["https://hub.example/x", "http://127.0.0.1:8080/y", "http://[::1]/z", "http://localhost/w"], "x")


def test_texts_are_fetched_over_https_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUANTKIT_CORPUS_DIR", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    with pytest.raises(InputError, match="expected an https address in HF_ENDPOINT"):
        corpus.read_corpus(load_protocol("wikitext2-quick-v1").corpora[0], None)
    assert list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.raw")) == []
