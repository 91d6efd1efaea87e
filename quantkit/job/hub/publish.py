"""Publish a run: what would go up, and sending it so that an interruption costs only what was on its way.

    large files one commit each, then all small ones, then the manifest, then the card; each commit on top of the one before

What is missing is decided by the hub's own listing, size and hash of each file, never by what was sent before: state that is kept
locally has made other tools skip files in a new repository. After each commit the listing must hold what was sent and everything
that was there before. Remote files are replaced, never deleted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from quantkit.core.errors import EnvironmentFault
from quantkit.core.files import FolderLock
from quantkit.core.units import MIB
from quantkit.job.hub.bundle import Bundle, BundleFile, check_bundle, read_bundle
from quantkit.job.hub.client import Hub, RemoteFile, is_same
from quantkit.job.progress import Progress
from quantkit.job.rundir import RunFolder, read_json, write_json

Action = Literal["send", "replace", "keep", "unknown"]

_ALONE_FROM_BYTES = MIB
_PER_COMMIT = 100
_ATTEMPTS = 3
_WAIT_S = 2.0


class PublishItem(NamedTuple):
    """A file of the bundle, and what publishing would do with it."""

    file: BundleFile
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """What publishing would do. `commit` is the repository's head, None where it does not exist yet.

    `last_commit` is where this run left the repository the last time, None before that. With a `fault` the hub could not be asked,
    and what is in the repository is unknown.
    """

    bundle: Bundle
    repo_id: str
    endpoint: str
    commit: str | None
    last_commit: str | None
    items: tuple[PublishItem, ...]
    fault: EnvironmentFault | None


def plan_publish(folder: Path, repo_id: str) -> PublishPlan:
    """Check a run's bundle and compare it with a repository; nothing is sent.

    Raises:
        InputError: a bundle that cannot be published, see `check_bundle`; an impossible name or endpoint.
    """
    bundle = read_bundle(folder)
    check_bundle(bundle)
    hub = Hub(repo_id)
    state = read_json(_state_path(bundle, hub))
    last = state.get("commit") if isinstance(state, dict) else None
    head, fault, remote = None, None, {}
    try:
        head = hub.head()
        remote = hub.list_files(head) if head else {}
    except EnvironmentFault as error:
        fault = error
    items = tuple(PublishItem(file, "unknown" if fault else _action(file, remote)) for file in bundle.all_files)
    return PublishPlan(bundle=bundle, repo_id=repo_id, endpoint=hub.endpoint, commit=head, last_commit=last, items=items,
                       fault=fault)


def publish(plan: PublishPlan, progress: Progress) -> str:
    """Send what a plan says, verify it by the hub's listing; returns the last commit.

    Raises:
        EnvironmentFault: the hub failed, or somebody else changed the repository meanwhile; the same command goes on from there.
    """
    if plan.fault is not None:
        raise plan.fault
    hub, bundle = Hub(plan.repo_id), plan.bundle
    head = plan.commit
    if head is None:
        hub.create()
        head = hub.require_head()
    remote = hub.list_files(head)
    progress.start(f"publish to {plan.repo_id}", len(bundle.all_files))
    with FolderLock(bundle.folder):
        for step in _steps(bundle):
            todo = [file for file in step if _action(file, remote) != "keep"]
            if todo:
                head, remote = _send(hub, todo, head, remote, f"{_title(todo)} of {bundle.result_id[:12]}", progress)
                write_json(_state_path(bundle, hub), {"repo_id": hub.repo_id, "endpoint": hub.endpoint,
                                                      "result_id": bundle.result_id, "commit": head})
            progress.advance(len(step))
    progress.finish()
    return head


def _action(file: BundleFile, remote: Mapping[str, RemoteFile]) -> Action:
    if file.path not in remote:
        return "send"
    return "keep" if is_same(remote[file.path], file.local, file.size_bytes, file.sha256) else "replace"


def _steps(bundle: Bundle) -> Iterator[list[BundleFile]]:
    """Files by commit. The manifest comes after what it lists, the card after everything."""
    small = [file for file in bundle.files if file.size_bytes < _ALONE_FROM_BYTES]
    yield from ([file] for file in bundle.files if file.size_bytes >= _ALONE_FROM_BYTES)
    yield from (small[i:i + _PER_COMMIT] for i in range(0, len(small), _PER_COMMIT))
    yield [bundle.manifest]
    if bundle.card:
        yield [bundle.card]


def _send(hub: Hub, files: Sequence[BundleFile], parent: str, before: Mapping[str, RemoteFile], message: str,
          progress: Progress) -> tuple[str, dict[str, RemoteFile]]:
    """One commit, sent again after a failure unless the hub has it already: the answer may have been what was lost."""
    for attempt in range(1, _ATTEMPTS + 1):
        fault = None
        try:
            hub.commit({file.path: file.local for file in files}, message, parent)
        except EnvironmentFault as error:
            fault = error
        head = hub.require_head()
        if head != parent or fault is None:
            after = hub.list_files(head)
            _check_sent(files, before, after, fault)
            return head, after
        if attempt == _ATTEMPTS:
            raise fault
        progress.note(f"{fault}; trying again")
        time.sleep(_WAIT_S * attempt)
    raise AssertionError("the loop ends by itself")


def _check_sent(files: Sequence[BundleFile], before: Mapping[str, RemoteFile], after: Mapping[str, RemoteFile],
                fault: EnvironmentFault | None) -> None:
    """The listing holds what was sent, by size and hash, and everything else as it was."""
    sent = {file.path for file in files}
    missing = [file.path for file in files if not is_same(after.get(file.path), file.local, file.size_bytes, file.sha256)]
    if missing and fault is not None:
        raise EnvironmentFault(f"the repository was changed by somebody else meanwhile ({fault}): run the same command again to "
                               "go on from there") from fault
    if missing:
        found = "lists another size or hash" if missing[0] in after else "lists none, perhaps for a .gitignore in the repository"
        raise EnvironmentFault(f"expected the hub to hold {missing[0]} as it was sent, it {found}: run the same command again")
    if other := sorted(name for name, file in before.items() if name not in sent and after.get(name) != file):
        raise EnvironmentFault(f"the repository was changed by somebody else meanwhile, {other[0]} is not as it was: run the same "
                               "command again to go on from there")


def _title(files: Sequence[BundleFile]) -> str:
    return files[0].path if len(files) == 1 else f"{len(files)} files"


def _state_path(bundle: Bundle, hub: Hub) -> Path:
    """One state for each repository: the same run may be published to several."""
    key = hashlib.sha256(f"{hub.endpoint} {hub.repo_id}".encode()).hexdigest()[:16]
    return RunFolder(path=bundle.folder).record("publish", key)
