"""`publish`, `fetch` and `remote` against a hub on loopback."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quantkit.cli.fetch import fetch
from quantkit.cli.publish import publish
from quantkit.cli.remote import remote
from quantkit.core.errors import CheckFailed, EnvironmentFault
from quantkit.job import verify
from quantkit.job.verify_findings import Failure, Verification
from tests.hub_server import HubServer
from tests.job.hub.conftest import RESULT_ID, hub, list_anew, run  # noqa: F401 - fixtures

REPO = "user/model"


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were verified; these runs are made of a few bytes and would not pass."""
    seen: list[Path] = []

    def verify_bundle(folder: Path, make_report: object) -> Verification:
        seen.append(folder)
        failures = () if (folder / "protocol.toml").read_bytes() != b"forged = 1\n" else (
            Failure(check="protocol", file="protocol.toml", expected="another", found="forged"),)
        return Verification(result_id=RESULT_ID, checks=(), failures=failures)

    monkeypatch.setattr(verify, "verify_bundle", verify_bundle)
    return seen


def call(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)


def test_without_yes_everything_is_listed_and_nothing_sent(hub: HubServer, run: Path) -> None:  # noqa: F811
    done = call(publish, run, "--repo", REPO, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert (len(rows), rows[-1]["file"], {row["action"] for row in rows}) == (8, "README.md", {"send"})
    assert rows[-1]["bytes"] == str((run / "README.md").stat().st_size)
    assert done.stderr.splitlines() == [
        f"user/model does not exist at {hub.url}: it will be made, by default for all to see",
        "card: README.md, sent last as README.md",
        "nothing was sent: 2.35 MiB would be; pass --yes to send it"]
    assert hub.repos == {}


@pytest.mark.slow
def test_published_and_fetched_again(hub: HubServer, run: Path, tmp_path: Path, verified: list[Path]) -> None:  # noqa: F811
    done = call(publish, run, "--repo", REPO, "--yes")
    assert f"published result {RESULT_ID[:12]} in user/model at commit {hub.repos[REPO].head}" in done.stderr
    done = call(fetch, REPO, "-o", tmp_path / "copy")
    assert done.stdout == f"{tmp_path / 'copy'}: result {RESULT_ID} verified, 7 files, 2.35 MiB, commit {hub.repos[REPO].head}\n"
    assert (tmp_path / "copy" / "manifest.json").read_bytes() == (run / "manifest.json").read_bytes()
    assert verified == [run, tmp_path / "copy"]


def test_a_bundle_that_does_not_verify_is_not_sent(hub: HubServer, run: Path) -> None:  # noqa: F811
    (run / "protocol.toml").write_bytes(b"forged = 1\n")
    list_anew(run)
    with pytest.raises(CheckFailed, match=r"does not verify: protocol\.toml: expected another, found forged"):
        call(publish, run, "--repo", REPO, "--yes")
    assert hub.repos == {}


@pytest.mark.slow
def test_what_the_dry_run_says_about_a_repository_that_is_there(hub: HubServer, run: Path) -> None:  # noqa: F811
    call(publish, run, "--repo", REPO, "--yes")
    hub.add(REPO, {"README.md": b"# Mine\n"}, "somebody else")
    done = call(publish, run, "--repo", REPO)
    assert "| replace | README.md " in done.stdout
    assert "user/model was changed since this run was last published there" in done.stderr


def test_the_dry_run_works_offline(hub: HubServer, run: Path) -> None:  # noqa: F811
    hub.fail(".*", times=100)
    done = call(publish, run, "--repo", REPO)
    assert "what the repository holds is unknown: asking for user/model failed" in done.stderr
    with pytest.raises(EnvironmentFault):
        call(publish, run, "--repo", REPO, "--yes")


def test_a_repository_that_contradicts_its_manifest_fails_the_check(hub: HubServer, run: Path, tmp_path: Path) -> None:  # noqa: F811
    call(publish, run, "--repo", REPO, "--yes")
    hub.add(REPO, {"protocol.toml": b"x"}, "somebody else")
    with pytest.raises(CheckFailed) as caught:
        call(fetch, REPO, "-o", tmp_path / "copy")
    assert caught.value.exit_code == 1


@pytest.mark.engine
def test_a_look_in_three_forms(hub: HubServer, shared: Path) -> None:  # noqa: F811
    for name in ("Q4_K_M", "Q8_0"):
        hub.add(REPO, {f"stock-{name}.gguf": (shared / "oracle" / f"stock-{name}.gguf").read_bytes()})
    hub.add(REPO, {"x | y.gguf": b"GGUF\3\0\0\0\xff"})
    done = call(remote, REPO, "-p", "wikitext2-v1")
    assert f"# user/model at {hub.repos[REPO].head[:12]}\n" in done.stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert ["stock-Q4_K_M.gguf", "1", "4.18 MiB", "Q4_K_M", "5.0686", "4.8139", "present", "94d754f89b5c", "0", "31", ""] in rows
    assert "## stock-Q4_K_M.gguf beside Q4_K_M\n" in done.stdout
    assert ["blk.*.ssm_alpha.weight", "3", "Q4_K", "Q8_0"] in rows
    assert r"- x \| y.gguf: x \| y.gguf: " in done.stdout
    assert done.stderr.splitlines()[-1] == "since the last look: this is the first look"
    records = list(csv.DictReader(io.StringIO(call(remote, REPO, "--format", "csv").stdout)))
    assert [(row["name"], row["n_unlike_stock"], row["n_unlike_ours"]) for row in records] == [
        ("stock-Q4_K_M.gguf", "0", ""), ("stock-Q8_0.gguf", "0", ""), ("x | y.gguf", "", "")]
    value = json.loads(call(remote, REPO, "--format", "json").stdout)
    assert value["changes"] == []
    assert value["models"][0]["types"]["output.weight"] == "Q6_K"
