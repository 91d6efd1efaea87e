"""The store: whole bundles, one rename, and a kill at every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.core.errors import EnvironmentFault, InputError, RunLocked
from quantkit.core.files import pretty_json, sha256_file
from quantkit.job.bundles import LABEL, open_store
from quantkit.job.manifest import APART

pytestmark = pytest.mark.system

OLD, NEW = "0a" * 32, "0b" * 32


def make_run(folder: Path, result_id: str, text: str) -> Path:
    """A run directory as far as a store looks at it."""
    for name in ("audit/Q8_0/rows.parquet", "quants/model-Q8_0.gguf", "protocol.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {text}")
    (folder / "logs").mkdir()
    (folder / "logs" / "native.log").write_text("not a part of it")
    files = {p.relative_to(folder).as_posix(): {"sha256": sha256_file(p), "size_bytes": p.stat().st_size}
             for p in sorted(folder.rglob("*")) if p.is_file() and p.parent.name != "logs"}
    (folder / "manifest.json").write_bytes(pretty_json({"result_id": result_id, "files": files}))
    return folder


def test_what_is_listed_apart_is_kept_with_the_bundle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", OLD, "old")
    page = run / "report" / "report.html"
    page.parent.mkdir()
    page.write_text("a page")
    entry = {"sha256": sha256_file(page), "size_bytes": page.stat().st_size}
    (run / APART).write_bytes(pretty_json({"result_id": OLD, "files": {"report/report.html": entry}}))
    with open_store(tmp_path / "store") as store:
        store.commit(run, OLD, {})
    held = contents(tmp_path / "store" / "bundles" / OLD)
    assert (held["report/report.html"], held[APART]) == ("a page", (run / APART).read_text())


def contents(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_run(tmp_path / "an old run", OLD, "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a new run", NEW, "new")


def test_current_is_a_link_to_a_whole_bundle_with_its_label(old: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert store.current_id() is None
        store.commit(old, OLD, {"n_commits": 0})
        assert store.current_id() == OLD
    current = tmp_path / "store" / "current"
    assert os.readlink(current) == f"bundles/{OLD}"  # noqa: PTH115 - the text of the link, relative
    expected = {name: text for name, text in contents(old).items() if not name.startswith("logs")}
    assert contents(current) == {**expected, LABEL: '{\n  "n_commits": 0\n}\n'}


def test_a_commit_moves_current_and_keeps_the_old_bundle_as_it_was(old: Path, new: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(old, OLD, {})
        before = contents(store.bundle(OLD))
        store.commit(new, NEW, {"n_commits": 1})
        assert store.current_id() == NEW
        assert contents(store.bundle(OLD)) == before


def test_a_rejected_candidate_is_kept_and_nothing_else_moves(old: Path, new: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(old, OLD, {})
        before = contents(store.path)
        kept = store.reject(new, NEW, {"label": "incomparable"})
        after = contents(store.path)
    assert kept == tmp_path / "store" / "rejected" / NEW
    assert json.loads((kept / LABEL).read_text()) == {"label": "incomparable"}
    assert {name: text for name, text in after.items() if not name.startswith("rejected/")} == before


def test_a_candidate_that_does_not_verify_leaves_its_label_alone(new: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        kept = store.reject(None, NEW, {"label": "protected regression"})
        assert [path.name for path in kept.iterdir()] == [LABEL]
        store.reject(new, NEW, {"label": "no progress"})
        assert (kept / "manifest.json").exists()


def test_model_files_are_links_and_the_rest_are_copies(old: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(old, OLD, {})
        bundle = store.bundle(OLD)
    assert (bundle / "quants" / "model-Q8_0.gguf").samefile(old / "quants" / "model-Q8_0.gguf")
    assert not (bundle / "protocol.toml").samefile(old / "protocol.toml")


def test_a_file_that_changed_since_it_was_verified_is_not_taken(old: Path, tmp_path: Path) -> None:
    (old / "protocol.toml").write_text("changed")
    with open_store(tmp_path / "store") as store:
        with pytest.raises(EnvironmentFault, match=r"for the copy of .*protocol.toml"):
            store.commit(old, OLD, {})
        assert store.current_id() is None
        assert list((store.path / "bundles").iterdir()) == []


def test_another_folder_is_no_store_and_a_held_store_is_not_entered(old: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a store of quantkit or an empty folder, found"), open_store(old):
        pass
    with open_store(tmp_path / "store"), pytest.raises(RunLocked), open_store(tmp_path / "store"):
        pass


@pytest.mark.parametrize("target", ["../elsewhere", "bundles/not-an-id", f"bundles/{NEW}"])
def test_a_current_that_leads_elsewhere_is_refused(tmp_path: Path, target: str) -> None:
    with open_store(tmp_path / "store") as store:
        store.current.symlink_to(target)
        with pytest.raises(InputError, match=r"expected .* to be a link to bundles/<result_id>"):
            store.current_id()


KILLER = """
import os, signal, sys
from pathlib import Path
from quantkit.job.bundles import open_store

store_path, run, result_id = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def commit_and_die(stop):
    n = 0
    def count(event, arguments):
        nonlocal n
        if any(isinstance(a, (str, bytes, os.PathLike)) and os.fspath(a).startswith(str(store_path)) for a in arguments):
            n += 1
            if n == stop:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    with open_store(store_path) as store:
        store.commit(run, result_id, {"n_commits": 1})

for line in sys.stdin:
    child = os.fork()
    if not child:
        commit_and_die(int(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_killed_anywhere_leaves_the_old_bundle_or_the_new_one_whole(old: Path, new: Path, tmp_path: Path) -> None:
    """A child dies at the 1st, 2nd, ... call to the system that touches the store, until one lives to the end."""
    store_path = tmp_path / "store"
    with open_store(store_path) as store:
        store.commit(old, OLD, {})
    whole = {OLD: contents(store_path / "current")}
    found: list[str] = []
    with subprocess.Popen([sys.executable, "-c", KILLER, str(store_path), str(new), NEW], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        code = -9
        while code:
            driver.stdin.write(f"{len(found) + 1}\n")
            driver.stdin.flush()
            code = int(driver.stdout.readline())
            assert code in (0, -9)
            with open_store(store_path) as store:
                current = store.current_id()
                assert current is not None
                assert contents(store.current) == whole.setdefault(current, contents(store.current))
                assert [p.name for p in store_path.rglob("*.tmp")] == []
                found.append(current)
                store.commit(old, OLD, {})
        driver.stdin.close()
    assert found == sorted(found)  # the old one up to some step, the new one from there on
    assert set(found) == {OLD, NEW}
    assert len(found) > 15
    expected = {name: text for name, text in contents(new).items() if not name.startswith("logs")}
    assert whole[NEW] == {**expected, LABEL: '{\n  "n_commits": 1\n}\n'}
