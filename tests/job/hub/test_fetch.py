"""Fetching from a repository that may be damaged or hostile."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from quantkit.core.errors import CheckFailed, EnvironmentFault, InputError, NoSpace
from quantkit.job.hub import fetch as module
from quantkit.job.hub.fetch import Fetched, fetch
from quantkit.job.hub.publish import plan_publish, publish
from quantkit.job.manifest import APART
from quantkit.job.progress import Silent
from tests.faults.mounts import grow, small_disk
from tests.hub_server import HubServer
from tests.job.hub.conftest import RESULT_ID, list_anew, list_apart

pytestmark = pytest.mark.system

REPO = "user/model"
MODEL = "quants/m-Q8_0.gguf"
FULL = "the disk is full (while writing|at) .*: free some space and run again"


@pytest.fixture
def published(hub: HubServer, run: Path) -> HubServer:
    publish(plan_publish(run, REPO), Silent())
    hub.ranges.clear()
    return hub


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "fetched here"


def get(target: Path, *, force: bool = False, revision: str | None = None) -> Fetched:
    return fetch(REPO, target, Silent(), force=force, revision=revision)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def bundle(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(run).items()
            if name != "run.json" and name.split("/")[0] not in ("logs", "parts")}


def edit_manifest(hub: HubServer, name: str, data: bytes) -> None:
    """List one more file, and have it."""
    value = json.loads(hub.repos[REPO].files["manifest.json"])
    value["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    hub.add(REPO, {"manifest.json": json.dumps(value).encode(), name: data}, "hostile")


def test_what_was_published_comes_back(published: HubServer, run: Path, target: Path) -> None:
    done = get(target)
    assert contents(target) == bundle(run)
    assert done == Fetched(RESULT_ID, published.repos[REPO].head, 7, 0, sum(map(len, bundle(run).values())) -
                           (run / "manifest.json").stat().st_size)


def test_files_that_the_manifest_does_not_list_are_not_fetched(published: HubServer, run: Path, target: Path) -> None:
    published.add(REPO, {"extra.json": b"{}", "evil.py": b"x"}, "somebody")
    get(target)
    assert contents(target) == bundle(run)


def test_what_is_listed_apart_comes_back_too(hub: HubServer, run: Path, target: Path) -> None:
    list_apart(run)
    publish(plan_publish(run, REPO), Silent())
    get(target)
    assert contents(target) == bundle(run)
    assert (target / APART).exists()
    assert get(target).n_kept == 9


def test_a_listing_that_an_earlier_result_left_is_nothing_to_fetch(hub: HubServer, run: Path, target: Path) -> None:
    list_apart(run, result_id="cd" * 32)
    hub.add(REPO, {name: (run / name).read_bytes() for name in bundle(run)}, "published")
    get(target)
    assert {"report/report.html", "README.md", APART}.isdisjoint(contents(target))


def test_a_listing_apart_cannot_stand_for_the_manifest(hub: HubServer, run: Path, target: Path) -> None:
    list_apart(run)
    value = json.loads((run / APART).read_bytes())
    value["files"]["plan/other.json"] = {"sha256": "0" * 64, "size_bytes": 1}
    (run / APART).write_text(json.dumps(value))
    hub.add(REPO, {name: (run / name).read_bytes() for name in bundle(run)}, "published")
    with pytest.raises(InputError, match="expected nothing but speeds, page and card"):
        get(target)
    assert not target.exists()


def test_the_second_time_nothing_is_downloaded(published: HubServer, target: Path) -> None:
    get(target)
    published.ranges.clear()
    assert get(target).n_kept == 7
    assert [path for path, _ in published.ranges] == ["manifest.json"]


def test_an_older_commit_can_be_named(published: HubServer, run: Path, target: Path) -> None:
    before, old = bundle(run), published.repos[REPO].head
    (run / "protocol.toml").write_bytes(b"schema = 2\n")
    list_anew(run, "cd" * 32)
    publish(plan_publish(run, REPO), Silent())
    assert get(target, revision=old).result_id == RESULT_ID
    assert contents(target) == before


@pytest.mark.parametrize("kind", ["500", "truncate"])
def test_an_error_that_passes_is_retried(published: HubServer, run: Path, target: Path, kind: str) -> None:
    published.fail(f"storage/.*{MODEL}", kind=kind, times=2)
    get(target)
    assert contents(target) == bundle(run)


def test_a_truncated_download_is_refused_and_goes_on_where_it_ended(published: HubServer, run: Path, target: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    size = (run / MODEL).stat().st_size
    monkeypatch.setattr(module, "_PIECE_BYTES", size // 3)
    seen = 0

    def cut_the_second(line: str) -> None:
        nonlocal seen
        seen += line.endswith(MODEL) and "/storage/" in line
        if seen == 2 and not any(fault.left for fault in published.faults):
            published.fail(MODEL, kind="short", times=100)

    published.on_request = cut_the_second
    with pytest.raises(EnvironmentFault, match=rf"expected {size // 3} bytes from byte {size // 3} of {size}, got"):
        get(target)
    assert not (target / "manifest.json").exists()
    assert not (target / MODEL).exists()
    published.faults.clear()
    published.on_request = lambda line: None
    published.ranges.clear()
    get(target)
    assert sum(n for path, n in published.ranges if path == MODEL) == size - size // 3
    assert contents(target) == bundle(run)


def test_a_damaged_download_is_refused(published: HubServer, run: Path, target: Path) -> None:
    published.fail(f"storage/.*{MODEL}", kind="flip")
    with pytest.raises(EnvironmentFault, match=rf"expected sha256 [0-9a-f]+ of {MODEL}, the download has another"):
        get(target)
    assert not (target / MODEL).exists()
    assert not list(target.rglob("*.part"))
    get(target)
    assert contents(target) == bundle(run)


def test_a_server_without_ranges_is_enough_for_small_files(published: HubServer, run: Path, target: Path) -> None:
    published.fail(".*(storage|resolve)/", kind="norange", times=100)
    get(target)
    assert contents(target) == bundle(run)


@pytest.mark.parametrize(("name", "data", "expected"), [
    (MODEL, b"GGUF" * 300, "has 1200 bytes instead of"), ("protocol.toml", b"schema = 1", "has 10 bytes instead of 11")])
def test_a_repository_that_contradicts_its_manifest_is_told_before_any_download(
        published: HubServer, target: Path, name: str, data: bytes, expected: str) -> None:
    published.add(REPO, {name: data}, "changed")
    with pytest.raises(CheckFailed, match=f"does not hold what the manifest.json of user/model lists: {name} {expected}"):
        get(target)
    assert not target.exists()


def test_a_large_file_of_another_hash_is_told_before_any_download(published: HubServer, run: Path, target: Path) -> None:
    published.add(REPO, {MODEL: (run / "quants" / "m-Q4_K.gguf").read_bytes()}, "changed")
    with pytest.raises(CheckFailed, match=f"{MODEL} has (another sha256|[0-9]+ bytes instead)"):
        get(target)


def test_a_small_file_of_another_hash_is_told_when_it_is_read(published: HubServer, target: Path) -> None:
    published.add(REPO, {"protocol.toml": b"schema = 9\n"}, "changed")
    with pytest.raises(EnvironmentFault, match=r"expected sha256 [0-9a-f]+ of protocol\.toml, the download has another"):
        get(target)


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json", "a/../../outside.json", ".hidden.json", "parts/x.json",
                                  "x.sh"])
def test_names_that_lead_elsewhere_are_refused_before_anything_is_written(published: HubServer, target: Path, name: str) -> None:
    edit_manifest(published, name, b"{}")
    with pytest.raises(InputError, match=r"manifest\.json of user/model lists what no bundle holds"):
        get(target)
    assert not target.exists()


def test_nothing_is_written_through_a_link(published: HubServer, target: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target.mkdir()
    (target / "quants").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a symbolic link"):
        get(target)
    (target / "quants").unlink()
    (target / "manifest.json").symlink_to(tmp_path / "elsewhere" / "m.json")
    with pytest.raises(InputError, match="is a symbolic link"):
        get(target)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_planted_part_that_is_a_link_is_not_followed(published: HubServer, run: Path, target: Path, tmp_path: Path) -> None:
    (target / "quants").mkdir(parents=True)
    sha256 = hashlib.sha256((run / MODEL).read_bytes()).hexdigest()
    (target / "quants" / f".{sha256}.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        get(target)
    assert not (tmp_path / "victim").exists()


def test_other_files_in_the_way_stay_unless_forced(published: HubServer, run: Path, target: Path) -> None:
    target.mkdir()
    (target / "protocol.toml").write_text("mine")
    with pytest.raises(InputError, match=r"protocol\.toml exists already and is not what the bundle lists"):
        get(target)
    assert contents(target) == {"protocol.toml": b"mine"}
    get(target, force=True)
    assert contents(target) == bundle(run)


def test_another_bundle_in_the_folder_stays_unless_forced(published: HubServer, run: Path, target: Path) -> None:
    get(target)
    list_anew(run, "cd" * 32)
    publish(plan_publish(run, REPO), Silent())
    with pytest.raises(InputError, match="holds another bundle"):
        get(target)
    assert get(target, force=True).result_id == "cd" * 32


def test_a_repository_without_a_bundle_is_told(hub: HubServer, target: Path) -> None:
    hub.add(REPO, {"model.gguf": b"GGUF"})
    with pytest.raises(InputError, match=r"expected a published bundle in user/model, found no manifest\.json"):
        get(target)


def test_a_missing_revision_is_told(published: HubServer, target: Path) -> None:
    with pytest.raises(EnvironmentFault, match="asking for user/model failed: RevisionNotFoundError"):
        get(target, revision="none")


@pytest.mark.parametrize(("unit", "step"), [("n_page", 20), ("n_inode", 1)])
def test_a_disk_that_is_full_at_every_write(published: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            unit: str, step: int) -> None:
    """Nothing has its name before it is whole, the manifest comes last, and what was there is not fetched again."""
    monkeypatch.setattr(module, "require_space", lambda *_: None)  # somebody else takes the room meanwhile
    whole = bundle(run)
    faults = []
    with small_disk(tmp_path / "disk", **{unit: step}) as disk:
        for n in range(2, 100):
            try:
                get(disk / "fetched")
                break
            except NoSpace as error:
                faults.append(str(error))
            held = contents(disk / "fetched") if (disk / "fetched").is_dir() else {}
            assert "manifest.json" not in held
            assert {name: data for name, data in held.items() if not name.endswith(".part")}.items() <= whole.items()
            grow(disk, **{unit: n * step})
        assert contents(disk / "fetched") == whole
        assert get(disk / "fetched").n_kept == 7
    assert len(faults) > 3
    assert all(re.fullmatch(FULL, fault) for fault in faults)


def test_too_little_room_is_told_before_the_first_byte(published: HubServer, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", n_page=4) as disk:
        with pytest.raises(NoSpace, match=r"fetching user/model needs .*, but .* free: free some space"):
            get(disk / "fetched")
        assert contents(disk / "fetched") == {}
