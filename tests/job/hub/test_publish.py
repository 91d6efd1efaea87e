"""Publishing against a hub that fails in the ways hubs have failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.core.errors import EnvironmentFault, InputError
from quantkit.job.hub.client import Hub, check_endpoint
from quantkit.job.hub.publish import PublishPlan, plan_publish, publish
from quantkit.job.manifest import APART
from quantkit.job.progress import Silent
from quantkit.job.rundir import read_json
from tests.hub_server import HubServer
from tests.job.hub.conftest import RESULT_ID, list_anew, list_apart

pytestmark = pytest.mark.system

REPO = "user/model"
LARGE = ["quants/m-Q4_K.gguf", "quants/m-Q8_0.gguf"]
SMALL = ["audit/Q8_0/rows.parquet", "plan/Q8_0.json", "protocol.toml", "report/retention.md"]
IN_ORDER = [*LARGE, *SMALL, "manifest.json", "README.md"]


def send(run: Path, repo: str = REPO) -> str:
    return publish(plan_publish(run, repo), Silent())


def actions(plan: PublishPlan) -> dict[str, str]:
    return {item.file.path: item.action for item in plan.items}


def test_a_plan_lists_everything_and_sends_nothing(hub: HubServer, run: Path) -> None:
    plan = plan_publish(run, REPO)
    assert actions(plan) == dict.fromkeys([*sorted([*LARGE, *SMALL]), "manifest.json", "README.md"], "send")
    assert (plan.commit, plan.last_commit, plan.bundle.result_id) == (None, None, RESULT_ID)
    assert [r for r in hub.requests if not r.startswith("GET")] == []


def test_everything_goes_up_the_card_last(hub: HubServer, run: Path) -> None:
    head = send(run)
    repo = hub.repos[REPO]
    assert hub.uploads == IN_ORDER
    assert repo.head == head
    assert {name: data for name, data in repo.files.items() if name != ".gitattributes"} == {
        name: (run / name).read_bytes() for name in IN_ORDER}


def test_each_commit_is_on_top_of_the_one_before(hub: HubServer, run: Path) -> None:
    send(run)
    assert len(hub.repos[REPO].commits) == 1 + len(LARGE) + 3
    assert all(RESULT_ID[:12] in message for _, message, _ in hub.repos[REPO].commits[1:])


def test_the_second_time_nothing_is_sent(hub: HubServer, run: Path) -> None:
    first = send(run)
    hub.requests.clear()
    assert set(actions(plan_publish(run, REPO)).values()) == {"keep"}
    assert send(run) == first
    assert [r for r in hub.requests if not r.startswith("GET")] == []


def test_a_failure_at_the_second_of_three_files_costs_only_that_file(hub: HubServer, run: Path) -> None:
    """Large uploads fail at random (huggingface_hub#3747)."""
    send_until_failure(hub, run, "PUT /lfs/", after=1)
    assert hub.uploads == [LARGE[0]]
    sent = len([r for r in hub.requests if r.startswith("PUT")])
    hub.faults.clear()
    send(run)
    assert hub.uploads == IN_ORDER
    assert len([r for r in hub.requests if r.startswith("PUT")]) == sent + 2  # the second model and the rows


def send_until_failure(hub: HubServer, run: Path, pattern: str, after: int) -> None:
    def fail_later(line: str) -> None:
        if len([r for r in hub.requests if r.startswith(pattern)]) > after and not hub.faults:
            hub.fail(pattern, times=1000)

    hub.on_request = fail_later
    with pytest.raises(EnvironmentFault, match=r"uploading quants/m-Q8_0\.gguf to user/model failed"):
        send(run)
    hub.on_request = lambda line: None


@pytest.mark.parametrize("pattern", ["PUT /lfs/", "POST .*/batch", "POST .*/preupload/", "POST .*/commit/"])
def test_an_error_that_passes_is_retried(hub: HubServer, run: Path, pattern: str) -> None:
    hub.fail(pattern, times=2)
    send(run)
    assert hub.uploads == IN_ORDER


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: HubServer, run: Path) -> None:
    hub.fail("POST .*/commit/", kind="lost", times=2)
    send(run)
    assert hub.uploads == IN_ORDER


def test_what_was_sent_is_held_against_the_hubs_hash(hub: HubServer, run: Path) -> None:
    hub.fail("PUT /lfs/", kind="flip")
    with pytest.raises(EnvironmentFault, match=r"expected the hub to hold quants/m-Q4_K\.gguf as it was sent, it lists another"):
        send(run)


def test_small_files_are_compared_too(hub: HubServer, run: Path) -> None:
    hub.add(REPO, {"protocol.toml": (run / "protocol.toml").read_bytes(), "plan/Q8_0.json": b"[]\n"})
    assert {name: a for name, a in actions(plan_publish(run, REPO)).items() if a != "send"} == {
        "protocol.toml": "keep", "plan/Q8_0.json": "replace"}


def test_another_repository_gets_everything(hub: HubServer, run: Path) -> None:
    """State of one repository made files be skipped in another (huggingface_hub#2254)."""
    send(run)
    send(run, "user/other")
    assert set(hub.repos["user/other"].files) == {*IN_ORDER, ".gitattributes"}


def test_state_is_kept_for_each_repository_but_the_listing_decides(hub: HubServer, run: Path) -> None:
    head = send(run)
    send(run, "user/other")
    states = [read_json(path) for path in sorted((run / "parts" / "publish").iterdir())]
    assert {state["repo_id"]: state["result_id"] for state in states} == {REPO: RESULT_ID, "user/other": RESULT_ID}
    hub.repos[REPO].add("somebody else", {"plan/Q8_0.json": b"changed"})
    plan = plan_publish(run, REPO)
    assert (plan.last_commit, plan.commit) == (head, hub.repos[REPO].head)
    assert [name for name, action in actions(plan).items() if action != "keep"] == ["plan/Q8_0.json"]


def test_a_change_by_somebody_else_meanwhile_stops_it(hub: HubServer, run: Path) -> None:
    def interfere(line: str) -> None:
        if "/commit/" in line and len(hub.repos[REPO].commits) == 2:
            hub.add(REPO, {"notes.txt": b"mine"}, "somebody else")

    hub.on_request = interfere
    with pytest.raises(EnvironmentFault, match=r"changed by somebody else meanwhile .*run the same command again"):
        send(run)
    assert hub.uploads == LARGE[:1]
    hub.on_request = lambda line: None
    send(run)
    assert hub.uploads == IN_ORDER


def test_remote_files_are_never_deleted(hub: HubServer, run: Path) -> None:
    hub.add(REPO, {"old/model.gguf": b"GGUF" * 500, "LICENSE": b"MIT"})
    send(run)
    assert {"old/model.gguf", "LICENSE"} < set(hub.repos[REPO].files)


def test_a_file_that_the_repository_ignores_is_told(hub: HubServer, run: Path) -> None:
    hub.add(REPO, {".gitignore": b"quants/m-Q4_K.gguf\n"})
    with pytest.raises(EnvironmentFault, match=r"hold quants/m-Q4_K\.gguf as it was sent, it lists none, perhaps for a \.gitig"):
        send(run)


def test_a_run_without_card_has_none(hub: HubServer, run: Path) -> None:
    (run / "README.md").unlink()
    list_anew(run)
    assert plan_publish(run, REPO).bundle.card is None
    send(run)
    assert hub.uploads[-1] == "manifest.json"


def test_a_card_in_the_report_stands_at_the_top_too(hub: HubServer, run: Path) -> None:
    (run / "README.md").rename(run / "report" / "README.md")
    list_anew(run)
    send(run)
    files = hub.repos[REPO].files
    assert files["README.md"] == files["report/README.md"]
    assert hub.uploads[-1] == "README.md"


def test_what_is_listed_apart_goes_up_too(hub: HubServer, run: Path) -> None:
    list_apart(run)
    send(run)
    files = hub.repos[REPO].files
    assert {"report/report.html", "report/speed.json", APART, "README.md"} <= set(files)
    assert hub.uploads[-2:] == ["manifest.json", "README.md"]
    assert "report/report.html" not in json.loads(files["manifest.json"])["files"]


def test_a_plan_needs_no_hub_and_sending_does(hub: HubServer, run: Path) -> None:
    hub.fail(".*", times=1000)
    plan = plan_publish(run, REPO)
    assert set(actions(plan).values()) == {"unknown"}
    with pytest.raises(EnvironmentFault, match="asking for user/model failed: HfHubHTTPError"):
        publish(plan, Silent())


@pytest.mark.parametrize(("endpoint", "fine"), [
    ("https://hub.example", True), ("http://127.0.0.1:8000/", True), ("http://[::1]:8000", True), ("http://localhost", True),
    ("http://hub.example", False), ("http://127.0.0.1.example", False), ("ftp://hub.example", False), ("hub.example", False)])
def test_tokens_go_over_https_alone(endpoint: str, fine: bool) -> None:
    if fine:
        assert check_endpoint(endpoint) == endpoint.rstrip("/")
        return
    with pytest.raises(InputError, match="expected an https address in HF_ENDPOINT"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a b", "a--b/c"])
def test_a_name_that_is_no_repositorys_is_refused(hub: HubServer, run: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected the name of a repository such as user/model"):
        plan_publish(run, name)


def test_a_missing_repository_is_told(hub: HubServer) -> None:
    with pytest.raises(InputError, match=r"expected a repository user/none at http://127\.0\.0\.1:[0-9]+, found none"):
        Hub("user/none").require_head()
