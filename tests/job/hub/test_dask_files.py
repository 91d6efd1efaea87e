"""Model files on a worker: by hash, from a shared path, the cache or the hub."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from quantkit.core.errors import EnvironmentFault
from quantkit.core.files import FolderLock, sha256_file
from quantkit.job import dask_files
from quantkit.job.corpus import cache_folder
from quantkit.job.dask_files import ModelFile, find_model, model_file
from quantkit.job.evaluation import read_subject
from tests.gguf_factory import tiny_gguf, tiny_model
from tests.hub_server import HubServer


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known, and nothing was fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dask_files, "_known", {})


def kept(file: ModelFile) -> Path:
    """The folder of a fetched file."""
    folder = cache_folder()
    assert folder is not None
    return folder.parent / "models" / file.sha256


def write(path: Path, data: bytes) -> ModelFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return ModelFile(paths=(path,), sizes=(len(data),), sha256=hashlib.sha256(data).hexdigest())


def test_a_file_is_hashed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def count(path: Path) -> str:
        hashed.append(path)
        return sha256_file(path)

    monkeypatch.setattr(dask_files, "sha256_file", count)
    file = write(tmp_path / "a.gguf", b"weights")
    assert find_model(file) == find_model(file) == tmp_path / "a.gguf"
    assert hashed == [tmp_path / "a.gguf"]
    (tmp_path / "a.gguf").write_bytes(b"WEIGHTS")
    os.utime(tmp_path / "a.gguf", ns=(1, 1))
    with pytest.raises(EnvironmentFault, match=f"expected sha256 {file.sha256} at .*a.gguf, found [0-9a-f]{{64}}: let it lie"):
        find_model(file)
    assert len(hashed) == 2
    (tmp_path / "a.gguf").write_bytes(b"less")
    with pytest.raises(EnvironmentFault, match=r"expected 7 bytes at .*a\.gguf, found 4"):
        find_model(file)
    (tmp_path / "a.gguf").unlink()
    with pytest.raises(EnvironmentFault, match=r"expected a\.gguf \(sha256 [0-9a-f]{16}\) at .*a\.gguf, found nothing: let it"):
        find_model(file)
    assert len(hashed) == 2


def test_a_split_model_is_one_file_of_several_parts(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", {"a.weight": ((32, 2), "F32"), "b.weight": ((32, 2), "F32")}, n_part=2)[0]
    subject = read_subject(path, "base")
    file = model_file(subject)
    assert [part.name for part in file.paths] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    assert find_model(file) == path
    data = bytearray(file.paths[1].read_bytes())
    data[-1] ^= 1
    file.paths[1].write_bytes(data)
    os.utime(file.paths[1], ns=(1, 1))
    with pytest.raises(EnvironmentFault, match=f"expected sha256 {subject.sha256}"):
        find_model(file)


@pytest.mark.slow
def test_a_file_that_is_nowhere_here_comes_from_the_hub_once(hub: HubServer, tmp_path: Path) -> None:
    data = tiny_model(tmp_path / "published.gguf")[0].read_bytes()
    hub.add("user/model", {"quants/other-name.gguf": data, "m.gguf": b"x" * 2000})
    file = write(tmp_path / "gone" / "m.gguf", data)
    file.paths[0].unlink()
    found = find_model(file, "user/model")
    assert found == kept(file) / "m.gguf"
    assert found.read_bytes() == data
    n_requests = len(hub.requests)
    assert find_model(file, "user/model") == find_model(file) == found
    assert len(hub.requests) == n_requests


def test_a_fetch_waits_for_another_process_of_the_machine(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.gguf", b"weights" * 1000)
    data = file.paths[0].read_bytes()
    file.paths[0].unlink()
    other = FolderLock(kept(file))
    other.__enter__()

    def fetched_meanwhile(_: float) -> None:
        (kept(file) / "m.gguf").write_bytes(data)
        other.__exit__(None, None, None)

    monkeypatch.setattr("quantkit.job.dask_files.time.sleep", fetched_meanwhile)
    assert find_model(file, "user/model") == kept(file) / "m.gguf"
    assert hub.requests == []


def test_a_damaged_download_is_dropped_and_a_missing_file_is_named(hub: HubServer, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", b"weights" * 1000)
    data = file.paths[0].read_bytes()
    file.paths[0].unlink()
    hub.add("user/model", {"m.gguf": data})
    hub.fail("storage/", kind="flip")
    with pytest.raises(EnvironmentFault, match="the download has another"):
        find_model(file, "user/model")
    assert [path.name for path in kept(file).iterdir()] == [".lock"]
    assert find_model(file, "user/model").read_bytes() == data
    hub.add("user/empty", {"README.md": b"nothing"})
    other = ModelFile(paths=(tmp_path / "n.gguf",), sizes=(5,), sha256="1" * 64)
    with pytest.raises(EnvironmentFault, match=r"expected n\.gguf \(sha256 1{16}, 5 bytes\) in user/empty, found no such file"):
        find_model(other, "user/empty")
