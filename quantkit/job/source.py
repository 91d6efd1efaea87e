"""Keep where a foreign file is from, and read it again."""

from __future__ import annotations

import dataclasses

from quantkit.job.evaluation import Subject
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.source_facts import FileSource, describe_source


def keep_source(run: RunFolder, tier: Subject) -> None:
    """Write source/<tier>.json; a tier with a plan needs none. A place on the hub that was known of the same bytes stays known."""
    if run.plan(tier.name).exists():
        return
    found, held = describe_source(tier.model, tier.sha256), read_source(run, tier.name)
    if held is not None and held.sha256 == found.sha256 and found.repository is None and found.revision is None:
        found = dataclasses.replace(found, repository=held.repository, revision=held.revision)
    write_json(run.source(tier.name), record_to_json(found))


def read_source(run: RunFolder, tier: str) -> FileSource | None:
    """Where a tier's file is from; None where there is no record, or one of another version."""
    try:
        return record_from_json(FileSource, read_json(run.source(tier)))
    except (KeyError, OverflowError, TypeError):
        return None
