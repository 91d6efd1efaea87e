"""One repository on the hub, through huggingface_hub: its head, its files with sizes and hashes, byte ranges, commits.

The endpoint is the library's, set by `HF_ENDPOINT`; it must be https, except on this machine. Errors of the library and of the
HTTP client below it become `EnvironmentFault`s that say what was being done. A file's identity is the sha256 that the hub keeps for
large files, and git's blob id for small ones, so nothing has to be read back to be compared.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from quantkit.core.errors import EnvironmentFault, InputError
from quantkit.core.secrets import hide_secrets

_RETRY_ON = (408, 429, 500, 502, 503, 504)
_STEP = 1 << 20
_TIMEOUT_S = 60.0  # without a byte
_SHOWN_CHARACTERS = 300


class RemoteFile(NamedTuple):
    """A file as the hub lists it: `sha256` of large files, None for those that git itself holds."""

    path: str
    size_bytes: int
    sha256: str | None
    blob_id: str


class Hub:
    """One model repository.

    Raises:
        InputError: an endpoint that is neither https nor on this machine.
        EnvironmentFault: huggingface_hub is missing.
    """

    def __init__(self, repo_id: str) -> None:
        try:
            import huggingface_hub.constants
            import huggingface_hub.utils
        except ImportError as error:
            raise EnvironmentFault("expected the package huggingface_hub, found none: install it to talk to the hub") from error
        self.repo_id = repo_id
        self.endpoint = check_endpoint(os.environ.get("HF_ENDPOINT") or huggingface_hub.constants.ENDPOINT)
        self._utils: Any = huggingface_hub.utils
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint, library_name="quantkit")

    def head(self, revision: str | None = None) -> str | None:
        """The commit that a revision stands for, the default branch's without one; None if there is no such repository.

        Raises:
            InputError: a name that cannot be a repository's.
            EnvironmentFault: the hub cannot be asked.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        with _hub_errors(f"asking for {self.repo_id}"):
            try:
                commit: str | None = self._api.repo_info(self.repo_id, revision=revision, timeout=_TIMEOUT_S).sha
            except RepositoryNotFoundError:
                return None
        if commit is None:
            raise EnvironmentFault(f"expected a commit as the head of {self.repo_id}, the hub told none: try again")
        return commit

    def require_head(self, revision: str | None = None) -> str:
        """The commit of a repository that must be there.

        Raises:
            InputError: it is not, or the hub does not show it to this user.
        """
        commit = self.head(revision)
        if commit is None:
            raise InputError(f"expected a repository {self.repo_id} at {self.endpoint}, found none: check the name; for a "
                             "private one log in with `hf auth login`")
        return commit

    def create(self) -> None:
        """Make the repository."""
        with _hub_errors(f"creating {self.repo_id}"):
            self._api.create_repo(self.repo_id, exist_ok=True)

    def list_files(self, commit: str) -> dict[str, RemoteFile]:
        """Every file of a commit, by path."""
        from huggingface_hub.hf_api import RepoFile

        found = {}
        with _hub_errors(f"listing the files of {self.repo_id}"):
            for item in self._api.list_repo_tree(self.repo_id, revision=commit, recursive=True):
                if isinstance(item, RepoFile):
                    large = item.lfs
                    found[item.path] = RemoteFile(item.path, large.size if large else item.size, large.sha256 if large else None,
                                                  item.blob_id)
        return found

    def commit(self, files: Mapping[str, Path], message: str, parent: str) -> str:
        """Upload some files in one commit on top of another; returns the new commit.

        The hub refuses it if the head is not `parent` any more. Large files go first, resumed and retried as the library does.
        """
        from huggingface_hub import CommitOperationAdd

        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        with _hub_errors(f"uploading {', '.join(list(files)[:3])} to {self.repo_id}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows in parquet are meant to be there
            done = self._api.create_commit(self.repo_id, operations, commit_message=message, parent_commit=parent)
        return str(done.oid)

    def read_range(self, file: RemoteFile, commit: str, start: int, n_bytes: int) -> bytes:
        """Some bytes of a file; exactly so many, from a file of exactly the listed size.

        Raises:
            EnvironmentFault: the hub sent others, after the library's retries.
        """
        doing = f"reading {file.path} of {self.repo_id}"
        with _hub_errors(doing):
            url = f"{self.endpoint}/{self.repo_id}/resolve/{quote(commit, safe='')}/{quote(file.path)}"
            headers = {**self._utils.build_hf_headers(library_name="quantkit"), "Range": f"bytes={start}-{start + n_bytes - 1}",
                       "Accept-Encoding": "identity"}
            response = self._utils.http_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S, retry_on_status_codes=_RETRY_ON)
            self._utils.hf_raise_for_status(response)
            content: bytes = response.content
        _check_redirects([str(answer.url) for answer in (*response.history, response)], doing)
        if response.status_code != 206 and len(content) == file.size_bytes:  # the whole file, from a server without ranges
            content = content[start:start + n_bytes]
        total = str(response.headers.get("Content-Range", "")).rpartition("/")[2]
        if len(content) != n_bytes or (total.isdigit() and int(total) != file.size_bytes):
            raise EnvironmentFault(f"{doing}: expected {n_bytes} bytes from byte {start} of {file.size_bytes}, got {len(content)} "
                                   f"of {total or 'an unknown number'}: the download is truncated; run the same command again")
        return content


def hide_library_bars() -> None:
    """Let huggingface_hub upload without drawing."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    utils.disable_progress_bars()


def check_endpoint(endpoint: str) -> str:
    """An endpoint that tokens and files may be sent to.

    Raises:
        InputError: it is not https, and not on this machine; or it has a password in it, which records would show.
    """
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        raise InputError(f"expected an address without user and password in HF_ENDPOINT, got {hide_secrets(endpoint)!r}: log in "
                         "with `hf auth login` instead")
    if not _is_private(endpoint):
        raise InputError(f"expected an https address in HF_ENDPOINT, got {endpoint!r}: tokens are not sent in the clear; "
                         "correct it or unset it")
    return endpoint.rstrip("/")


def is_same(remote: RemoteFile | None, local: Path, size_bytes: int, sha256: str) -> bool:
    """Whether the hub holds a local file's bytes, by size and hash."""
    if remote is None or remote.size_bytes != size_bytes:
        return False
    return remote.sha256 == sha256 if remote.sha256 is not None else remote.blob_id == blob_id(local)


def blob_id(path: Path) -> str:
    """Git's name of a file's bytes: sha1 of `blob <size>`, a zero byte, and the bytes."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_STEP):
            digest.update(piece)
    return digest.hexdigest()


def _check_redirects(urls: Sequence[str], doing: str) -> None:
    """Nothing is taken from where anybody on the way could have changed it; a redirect may lead anywhere."""
    for url in urls:
        if not _is_private(url):
            raise EnvironmentFault(f"{doing}: expected an https address, the hub led to {hide_secrets(url)[:_SHOWN_CHARACTERS]}: "
                                   "nothing of it was used; check HF_ENDPOINT, or ask who runs it")


def _is_private(url: str) -> bool:
    """Whether what is sent to an address stays between the two: https, or http on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or ""))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """Say what was being done. Which HTTP client raises depends on the library's version, so anything it raises counts."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise InputError(f"expected the name of a repository such as user/model: {_first_line(error)}; correct it") from error
    except Exception as error:
        raise EnvironmentFault(f"{doing} failed: {_first_line(error)}; run the same command again to go on from there") from error


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return hide_secrets(f"{type(cause).__name__}: {lines[0]}")[:_SHOWN_CHARACTERS] if lines else type(cause).__name__
