"""Files from strangers: what their reader does not survive is one sentence here, and the next file is read as if nothing was."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import ImatrixError, InputError
from quantkit.core.units import GIB
from quantkit.job.foreign import Limits, is_own, open_refpack, read_imatrix, read_in_worker, remember_own
from quantkit.job.parts import read_parquet, write_parquet
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, write_imatrix
from tests.measure.synthetic import make_rows

pytestmark = pytest.mark.system

LIMITS = Limits(address_bytes=4 * GIB, cpu_s=60, wall_s=60)


def crash(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(path: Path) -> None:
    os._exit(0)


def spin(path: Path) -> None:
    while True:
        pass


def sleep(path: Path) -> None:
    time.sleep(60)


def hoard(path: Path) -> int:
    return len(bytearray(64 * GIB))


def stumble(path: Path) -> None:
    raise KeyError("a decoder's own\nwords")


def process(path: Path) -> int:
    return os.getpid()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a stranger's.bin"
    path.write_bytes(b"anything")
    return path


@pytest.mark.parametrize(("reader", "limits", "message"), [
    (crash, LIMITS, "SIGSEGV"), (leave, LIMITS, "exit status 0"), (hoard, LIMITS, "memory"), (stumble, LIMITS, "KeyError"),
    (spin, Limits(address_bytes=4 * GIB, cpu_s=0, wall_s=60), "SIGXCPU"),
    (sleep, Limits(address_bytes=4 * GIB, cpu_s=60, wall_s=0.2), "not read within"),
])
def test_what_a_reader_does_not_survive_is_one_error_of_the_file(reader: object, limits: Limits, message: str, file: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_in_worker(reader, file, limits)  # type: ignore[arg-type]
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read_in_worker(process, file) != os.getpid()


def test_a_reader_serves_file_after_file(file: Path) -> None:
    assert len({read_in_worker(process, file) for _ in range(3)}) == 1


def test_pipes_folders_and_nothing_are_refused_before_they_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ImatrixError, match="regular file"):
            read_imatrix(path)
        with pytest.raises(InputError, match="regular file"):
            open_refpack(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_parquet(tmp_path / "none")


def test_only_what_this_process_wrote_and_nobody_changed_is_read_in_it(tmp_path: Path) -> None:
    own, copy = tmp_path / "own.parquet", tmp_path / "copy.parquet"
    rows = make_rows(n_article=2)
    write_parquet(own, rows, {"k": "v"})
    assert is_own(own)
    shutil.copy(own, copy)
    assert not is_own(copy)
    for path in (own, copy):
        found, metadata = read_parquet(path)
        assert metadata == {"k": "v"}
        np.testing.assert_array_equal(found, rows)
    data = own.read_bytes()
    own.write_bytes(data[:-1] + b"x")
    assert not is_own(own)
    own.unlink()
    assert not is_own(own)
    with pytest.raises(FileNotFoundError):
        remember_own(own)


def test_a_matrix_comes_back_as_it_was_and_cannot_be_changed(tmp_path: Path) -> None:
    entry = ImatrixEntry(in_sum2=np.arange(4, dtype=np.float32)[None], counts=np.ones(1, np.float32))
    write_imatrix(tmp_path / "m.gguf", Imatrix(entries={"a": entry}, datasets=("d",), chunk_count=1, chunk_size=512, legacy=False))
    found = read_imatrix(tmp_path / "m.gguf")
    np.testing.assert_array_equal(found.entries["a"].in_sum2, entry.in_sum2)
    with pytest.raises(TypeError):
        found.entries["b"] = entry  # type: ignore[index]


def test_a_matrix_that_claims_more_than_an_honest_file_holds_is_refused_unread(tmp_path: Path) -> None:
    """A hollow file of 8 GiB."""
    n = (1 << 31) - 1
    path = tmp_path / "hollow.dat"
    with path.open("wb") as file:
        for number in (1, 1):
            file.write(number.to_bytes(4, "little"))
        file.write(b"a" + (1).to_bytes(4, "little") + n.to_bytes(4, "little"))
        file.truncate(file.tell() + 4 * n)
    with pytest.raises(ImatrixError, match="at most"):
        read_imatrix(path)
