"""Files appear whole or not at all, inputs are never written over, one process works in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from quantkit.core import files
from quantkit.core.errors import EnvironmentFault, InputError, NoSpace, RunLocked
from quantkit.core.files import (
    FolderLock,
    atomic_path,
    canonical_json,
    find_leftovers,
    is_same_file,
    is_taken,
    lock_holder,
    pretty_json,
    refuse_overwrite,
    remove_leftovers,
    require_space,
    sha256_file,
    sha256_json,
    temp_path,
    write_atomic,
)

LONGEST = 255  # bytes of a name on the usual file systems
NAMES = {"spaces": "a file, with spaces.gguf", "non-ascii": "modèle-四.gguf", "newline": "a\nb", "dash": "-rf",
         "longest ascii": "x" * LONGEST, "longest wide": "四" * (LONGEST // 3),
         "not utf-8": os.fsdecode(b"caf\xe9.gguf")}


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def write_half(target: Path, error: BaseException) -> None:
    """Begin to write a file, and fail."""
    with atomic_path(target) as temp:
        temp.write_bytes(b"half")
        raise error


def run_python(code: str, folder: Path, *, expected: int = 0) -> None:
    """Run code in a process of its own, which must print nothing."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])})
    assert (done.returncode, done.stdout, done.stderr) == (expected, b"", b"")


class TestAtomic:
    def test_writes_and_leaves_nothing_beside(self, tmp_path: Path) -> None:
        write_atomic(tmp_path / "a", b"new")
        assert content(tmp_path) == {"a": b"new"}

    def test_replaces_whole(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"a longer old content")
        write_atomic(tmp_path / "a", b"new")
        assert content(tmp_path) == {"a": b"new"}

    def test_makes_missing_folders(self, tmp_path: Path) -> None:
        write_atomic(tmp_path / "x" / "y" / "a", b"new")
        assert content(tmp_path / "x" / "y") == {"a": b"new"}

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_any_name(self, tmp_path: Path, name: str) -> None:
        write_atomic(tmp_path / name, b"new")
        assert content(tmp_path) == {name: b"new"}

    def test_target_appears_only_at_the_end(self, tmp_path: Path) -> None:
        target = tmp_path / "a"
        with atomic_path(target) as temp:
            temp.write_bytes(b"half")
            assert (temp.parent, target.exists()) == (tmp_path, False)
        assert target.read_bytes() == b"half"

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_failure_keeps_the_old_file_and_removes_the_new_one(self, tmp_path: Path, error: type[BaseException]) -> None:
        (tmp_path / "a").write_bytes(b"old")
        with pytest.raises(error):
            write_half(tmp_path / "a", error())
        assert content(tmp_path) == {"a": b"old"}

    @pytest.mark.system
    def test_kill_keeps_the_old_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"old")
        run_python("import os, signal\nfrom pathlib import Path\nfrom quantkit.core.files import atomic_path\n"
                   "with atomic_path(Path('a')) as temp:\n    temp.write_bytes(b'half')\n"
                   "    os.kill(os.getpid(), signal.SIGKILL)\n", tmp_path, expected=-signal.SIGKILL)
        assert sorted(content(tmp_path).values()) == [b"half", b"old"]
        assert len(remove_leftovers(tmp_path)) == 1
        assert content(tmp_path) == {"a": b"old"}

    def test_block_that_writes_nothing_publishes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a"):
            pass
        assert content(tmp_path) == {}

    def test_symlink_is_replaced_and_its_aim_kept(self, tmp_path: Path) -> None:
        (tmp_path / "aim").write_bytes(b"old")
        (tmp_path / "link").symlink_to("aim")
        write_atomic(tmp_path / "link", b"new")
        assert content(tmp_path) == {"aim": b"old", "link": b"new"}
        assert not (tmp_path / "link").is_symlink()

    def test_hard_link_is_replaced_and_its_twin_kept(self, tmp_path: Path) -> None:
        (tmp_path / "twin").write_bytes(b"old")
        (tmp_path / "a").hardlink_to(tmp_path / "twin")
        write_atomic(tmp_path / "a", b"new")
        assert content(tmp_path) == {"twin": b"old", "a": b"new"}

    def test_bytes_are_on_disk_before_the_rename(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[str] = []
        sync, replace = os.fsync, os.replace

        def seen_sync(handle: int) -> None:
            steps.append("sync")
            sync(handle)

        def seen_replace(old: Path, new: Path) -> None:
            steps.append("rename")
            replace(old, new)

        monkeypatch.setattr(os, "fsync", seen_sync)
        monkeypatch.setattr(os, "replace", seen_replace)
        write_atomic(tmp_path / "a", b"new")
        assert steps == ["sync", "rename", "sync"]

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_full_disk_is_told_and_cleaned_up(self, tmp_path: Path, code: int) -> None:
        with pytest.raises(NoSpace, match=r"the disk is full while writing .*a: free some space"):
            write_half(tmp_path / "a", OSError(code, os.strerror(code)))
        assert content(tmp_path) == {}

    def test_disk_that_fills_at_the_flush_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fsync(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        (tmp_path / "a").write_bytes(b"old")
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(NoSpace):
            write_atomic(tmp_path / "a", b"new")
        assert content(tmp_path) == {"a": b"old"}

    def test_full_device_is_told(self, tmp_path: Path) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full")
        with pytest.raises(NoSpace), atomic_path(tmp_path / "a"), Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")

    def test_other_errors_of_the_block_pass(self, tmp_path: Path) -> None:
        with pytest.raises(PermissionError), atomic_path(tmp_path / "a"):
            raise PermissionError(errno.EACCES, "denied", "another file")

    @pytest.mark.parametrize("target", ["file/a", "file/x/a", "x" * (LONGEST + 1)])
    def test_impossible_target_is_told_before_the_work(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InputError, match=r"cannot write .*; choose another output path"), atomic_path(tmp_path / target):
            pytest.fail("the work was begun")
        assert content(tmp_path) == {"file": b""}

    def test_read_only_folder_is_told_before_the_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def touch(self: Path, mode: int = 0, exist_ok: bool = True) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "touch", touch)
        with pytest.raises(InputError, match=r"cannot write .*Read-only file system"), atomic_path(tmp_path / "a"):
            pytest.fail("the work was begun")


class TestTemp:
    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_name_is_hidden_short_enough_and_beside(self, name: str) -> None:
        temp = temp_path(Path("folder") / name)
        assert (temp.parent, temp.name[0], len(os.fsencode(temp.name)) <= LONGEST) == (Path("folder"), ".", True)

    def test_names_differ(self) -> None:
        assert len({temp_path(Path("a")) for _ in range(100)}) == 100

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_leftovers_are_recognised(self, tmp_path: Path, name: str) -> None:
        left = temp_path(tmp_path / "x" / name)
        left.parent.mkdir()
        left.write_bytes(b"half")
        assert find_leftovers(tmp_path) == [left]
        assert remove_leftovers(tmp_path) == [left]
        assert content(left.parent) == {}

    def test_only_leftovers_are_removed(self, tmp_path: Path) -> None:
        kept = dict.fromkeys(("a.tmp", ".a.tmp", ".a.12.tmp", ".a.12-abc.tmp", "b.12-0123abcd.tmp", ".lock",
                              ".a.12-0123abcd.tmp.gguf"), b"kept")
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / ".c.12-0123abcd.tmp").symlink_to("a.tmp")
        (tmp_path / ".d.12-0123abcd.tmp").mkdir()
        assert remove_leftovers(tmp_path) == []
        assert content(tmp_path) == {**kept, ".c.12-0123abcd.tmp": b"kept"}


class Case(NamedTuple):
    """An output path that is the input `input.gguf` in disguise."""

    output: str
    link: str = ""


DISGUISES = {
    "itself": Case("input.gguf"),
    "dot": Case("./input.gguf"),
    "through a folder and back": Case("x/../input.gguf"),
    "through a missing folder and back": Case("missing/../input.gguf"),
    "symlink": Case("link", "symlink"),
    "hard link": Case("link", "hardlink"),
    "folder symlink": Case("folder/input.gguf", "folder"),
}


class TestOverwrite:
    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A working folder with an input in it."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "input.gguf").write_bytes(b"input")
        (tmp_path / "x").mkdir()
        return tmp_path

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("case", DISGUISES.values(), ids=DISGUISES)
    @pytest.mark.parametrize("absolute", [False, True])
    def test_input_is_refused(self, home: Path, case: Case, absolute: bool, force: bool) -> None:
        if case.link == "symlink":
            Path("link").symlink_to("input.gguf")
        elif case.link == "hardlink":
            Path("link").hardlink_to("input.gguf")
        elif case.link == "folder":
            Path("folder").symlink_to(".")
        given = home / "input.gguf" if absolute else Path("input.gguf")
        with pytest.raises(InputError, match="would destroy the input"):
            refuse_overwrite(Path(case.output), [Path("other"), given], force=force)

    def test_input_that_is_a_link_is_refused(self, home: Path) -> None:
        Path("link").symlink_to("input.gguf")
        with pytest.raises(InputError, match=r"the output input\.gguf is the input link"):
            refuse_overwrite(Path("input.gguf"), [Path("link")], force=True)

    def test_copy_is_another_file(self, home: Path) -> None:
        shutil.copy("input.gguf", "copy.gguf")
        assert not is_same_file(Path("copy.gguf"), Path("input.gguf"))
        refuse_overwrite(Path("copy.gguf"), [Path("input.gguf")], force=True)

    def test_free_path_is_let_through(self, home: Path) -> None:
        refuse_overwrite(Path("new/out.gguf"), [Path("input.gguf")])
        assert not Path("new").exists()

    def test_existing_file_needs_force(self, home: Path) -> None:
        Path("out").write_bytes(b"old")
        with pytest.raises(InputError, match="exists already: choose another path or pass --force"):
            refuse_overwrite(Path("out"), [Path("input.gguf")])
        refuse_overwrite(Path("out"), [Path("input.gguf")], force=True)

    def test_dangling_link_needs_force(self, home: Path) -> None:
        Path("out").symlink_to("nowhere")
        with pytest.raises(InputError, match="exists already"):
            refuse_overwrite(Path("out"), [Path("input.gguf")])

    def test_link_loop_is_no_crash(self, home: Path) -> None:
        Path("a").symlink_to("b")
        Path("b").symlink_to("a")
        with pytest.raises(InputError, match="exists already"):
            refuse_overwrite(Path("a"), [Path("input.gguf")])

    @pytest.mark.parametrize("force", [False, True])
    def test_folder_is_refused(self, home: Path, force: bool) -> None:
        with pytest.raises(InputError, match="expected a file path for the output, got the folder x"):
            refuse_overwrite(Path("x"), [Path("input.gguf")], force=force)

    @pytest.mark.parametrize("name", ["x" * (LONGEST + 1), "input.gguf/out"])
    def test_impossible_path_is_told(self, home: Path, name: str) -> None:
        with pytest.raises(InputError, match="cannot write"):
            refuse_overwrite(Path(name), [Path("other.gguf")])

    def test_longest_name_is_possible(self, home: Path) -> None:
        assert is_taken(Path("x" * LONGEST)) is False


class TestSpace:
    def test_folder_that_is_not_made_yet_counts_as_its_parent(self, tmp_path: Path) -> None:
        require_space(tmp_path / "not" / "made" / "yet", 1, "the run")
        assert not (tmp_path / "not").exists()

    def test_what_cannot_fit_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(NoSpace, match=r"the run needs 1073741824\.00 GiB, but .* has .* free"):
            require_space(tmp_path / "new", 1 << 60, "the run")

    def test_limit_is_exact(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type("Usage", (), {"free": 100})
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        require_space(tmp_path, 100, "the run")
        with pytest.raises(NoSpace, match=r"needs 101 B, but .* has 100 B free"):
            require_space(tmp_path, 101, "the run")


# A holder with a worker of its own, which inherits what can be inherited; both end when their input ends.
HOLD = """
import subprocess, sys
from pathlib import Path
from quantkit.core.files import FolderLock
with FolderLock(Path("run")):
    subprocess.Popen([sys.executable, "-c", "print('held', flush=True); input()"], close_fds=False, stderr=subprocess.DEVNULL)
    sys.stdin.read()
"""


class TestLock:
    @pytest.fixture
    def other(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        """Another process, which holds the lock of run/ until its input ends."""
        env = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
        with subprocess.Popen([sys.executable, "-c", HOLD], cwd=tmp_path, env=env, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process

    @pytest.mark.system
    def test_held_by_another_process(self, tmp_path: Path, other: subprocess.Popen[str]) -> None:
        with pytest.raises(RunLocked, match=rf"another process \(pid {other.pid}\) works in .*run: wait"), \
                FolderLock(tmp_path / "run"):
            pytest.fail("two processes in one run directory")
        assert lock_holder(tmp_path / "run") == str(other.pid)
        other.communicate()
        assert lock_holder(tmp_path / "run") is None
        with FolderLock(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text() == f"{os.getpid()}\n"

    @pytest.mark.system
    def test_ends_with_a_killed_holder(self, tmp_path: Path, other: subprocess.Popen[str]) -> None:
        """Its worker, which lives on for a moment, does not hold the run directory."""
        other.kill()
        other.wait()
        assert (tmp_path / "run" / ".lock").read_text() == f"{other.pid}\n"
        with FolderLock(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text() == f"{os.getpid()}\n"

    def test_stale_file_is_no_lock(self, tmp_path: Path) -> None:
        assert lock_holder(tmp_path) is None
        assert not (tmp_path / ".lock").exists()
        (tmp_path / ".lock").write_text("1\n a longer text that some older holder left")
        assert lock_holder(tmp_path) is None
        with FolderLock(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        assert (tmp_path / ".lock").read_text() == ""

    def test_held_twice_in_one_process(self, tmp_path: Path) -> None:
        with FolderLock(tmp_path), pytest.raises(RunLocked), FolderLock(tmp_path):
            pytest.fail("entered twice")

    def test_can_be_taken_again(self, tmp_path: Path) -> None:
        lock = FolderLock(tmp_path / "x" / "run")
        for _ in range(2):
            with lock:
                assert (tmp_path / "x" / "run" / ".lock").exists()

    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(EnvironmentFault, match=r"cannot work in .*file: .*; choose another run directory"), \
                FolderLock(tmp_path / "file"):
            pytest.fail("entered")

    def test_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def flock(handle: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(EnvironmentFault, match=r"cannot lock .*: No locks available") as caught, FolderLock(tmp_path):
            pytest.fail("entered")
        assert not isinstance(caught.value, RunLocked)


class TestHashes:
    def test_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abc")  # the example of FIPS 180-2, appendix B.1
        assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

    def test_canonical_json(self) -> None:
        value = {"b": [1, 2.5, True, None], "a": "é", "A": {"y": 1e-05, "x": 0.1}}
        assert canonical_json(value) == b'{"A":{"x":0.1,"y":1e-05},"a":"\\u00e9","b":[1,2.5,true,null]}'

    def test_order_of_keys_does_not_matter_and_values_do(self) -> None:
        assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
        assert sha256_json({"a": 1, "b": 2}) != sha256_json({"a": 1, "b": 3})

    @pytest.mark.parametrize("write", [canonical_json, pretty_json])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_number_that_is_none_is_refused(self, write: object, value: float) -> None:
        assert callable(write)
        with pytest.raises(ValueError, match="Out of range float"):
            write({"a": value})

    def test_pretty_json(self) -> None:
        assert pretty_json({"b": "é", "a": [1]}) == '{\n  "b": "é",\n  "a": [\n    1\n  ]\n}\n'.encode()
