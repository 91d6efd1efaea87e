"""Verification without an engine: what a stranger may find in a bundle, and what a hostile one may try."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quantkit import __version__
from quantkit.core.errors import CheckFailed, InputError
from quantkit.core.files import pretty_json
from quantkit.job.manifest import APART, list_files, refresh_files, result_id_of, seal_of
from quantkit.job.parts import read_parquet, write_parquet
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.verify import verify_bundle
from quantkit.job.verify_findings import Verification
from tests.job.bundles import base_rows_of, make_bundle, tier_rows

pytestmark = pytest.mark.system


def no_report(run: RunFolder) -> Mapping[str, bytes]:
    return {}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = base_rows_of()
    return make_bundle(tmp_path_factory.mktemp("a stranger's") / "run", {"A": rows, "B": tier_rows(rows, kld_factor=2)})


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle", symlinks=True))


def failures(bundle: Path, result_id: str | None = None) -> list[tuple[str, str]]:
    """File and check of every failure."""
    return [(f.file, f.check) for f in verify_bundle(bundle, no_report, result_id).failures]


def only_failure(bundle: Path) -> str:
    (failure,) = verify_bundle(bundle, no_report).failures
    return f"{failure.file}: expected {failure.expected}, found {failure.found}"


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], object], *, relist: bool = False) -> None:
    """Change the manifest and give it a fitting id and seal, as someone would who wants to be believed."""
    path = bundle / "manifest.json"
    facts = json.loads(path.read_bytes())
    change(facts)
    if relist:
        facts["files"] = list_files(bundle, facts["tiers"])
    facts["result_id"] = result_id_of(facts)
    path.write_bytes(pretty_json({**facts, "seal": seal_of(facts)}))
    if relist:
        refresh_files(RunFolder(path=bundle))


def test_a_whole_bundle_passes_in_a_real_worker(bundle: Path) -> None:
    verification = verify_bundle(bundle, no_report, read_json(bundle / "manifest.json")["result_id"])
    assert verification.failures == ()
    counts = {check.name: check.n_checked for check in verification.checks}
    assert counts["files"] == len(read_json(bundle / "manifest.json")["files"])
    for name in ("manifest", "result id", "protocol", "references", "rows", "base's columns", "summaries", "slices", "verdicts"):
        assert counts[name] > 0
    notes = {check.name: check.notes for check in verification.checks}
    assert notes["tier files"] == ("not in the bundle: A, B",)
    assert notes["plans"] == ("A came without a plan", "B came without a plan")
    verification.require("it")


def test_no_bundle_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a bundle, found no manifest.json in"):
        verify_bundle(tmp_path, no_report)


def test_missing_added_and_changed_files_are_named(bundle: Path) -> None:
    (bundle / "audit" / "A" / "slices.json").unlink()
    (bundle / "audit" / "pairs.json").write_bytes((bundle / "audit" / "pairs.json").read_bytes() + b" ")
    (bundle / "quants").mkdir()
    (bundle / "quants" / "extra.gguf").write_bytes(b"GGUF")
    assert failures(bundle) == [("audit/A/slices.json", "files"), ("audit/pairs.json", "files"), ("quants/extra.gguf", "files")]


def test_what_is_no_part_of_a_bundle_may_lie_beside_it(bundle: Path) -> None:
    for name in ("run.json", ".lock", "logs/native.log", "parts/audit/x.rows", ".gitattributes", ".cache/hub/x", "label.json"):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text("x")
    assert failures(bundle) == []


def test_links_and_pipes_are_told_and_not_opened(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x")
    moved = tmp_path / "slices.json"
    (bundle / "audit" / "A" / "slices.json").rename(moved)
    (bundle / "audit" / "A" / "slices.json").symlink_to(moved)
    (bundle / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(bundle / "pipe")
    found = {f.file: f.found for f in verify_bundle(bundle, no_report).failures}
    assert found == {"audit/A/slices.json": "a link", "linked": "a link", "pipe": "a device, pipe or socket"}


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "audit/../../x.json", "a\\b.json", "audit//x.json"])
def test_names_that_lead_out_of_the_folder_are_refused(bundle: Path, name: str) -> None:
    rewrite(bundle, lambda facts: facts["files"].update({name: {"sha256": "0" * 64, "size_bytes": 1}}))
    assert failures(bundle) == [("manifest.json", "manifest")]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1, "files": 3}',
                                     b'{"result_id": "x", "files": {}}'])
def test_a_damaged_manifest_is_one_failure(bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    assert failures(bundle) == [("manifest.json", "manifest")]


@pytest.mark.parametrize("key", ["protocol", "base", "tiers", "build", "libraries", "imatrix", "token_ids_sha256", "corpus",
                                 "seal"])
@pytest.mark.parametrize("value", [None, 3, [], "x", {}])
def test_a_manifest_of_another_shape_gives_failures_and_no_traceback(bundle: Path, key: str, value: object) -> None:
    facts = json.loads((bundle / "manifest.json").read_bytes())
    facts[key] = value
    if key != "seal":
        facts["seal"] = seal_of(facts)
    (bundle / "manifest.json").write_bytes(pretty_json(facts))
    harmless = (key, value) in [("libraries", {}), ("imatrix", None)]  # nothing is known of libraries; there is no matrix
    assert verify_bundle(bundle, no_report).passed == harmless


def test_numbers_that_were_made_up_are_caught_though_every_hash_fits(bundle: Path) -> None:
    """A summary that tells of a smaller KLD, in a manifest rebuilt around it."""
    path = bundle / "audit" / "A" / "summary.json"
    summary = read_json(path)
    summary["summary"]["kld"]["value"] *= 0.9
    path.write_bytes(pretty_json(summary))
    published = read_json(bundle / "manifest.json")["result_id"]
    sha256 = list_files(bundle, {})["audit/A/summary.json"]["sha256"]
    rewrite(bundle, lambda facts: facts["tiers"]["A"].update(summary_sha256=sha256), relist=True)
    assert only_failure(bundle).startswith("audit/A/summary.json: expected summary.kld.value ")
    assert ("manifest.json", "result id") in failures(bundle, published)


def test_rows_that_were_made_up_are_caught_by_a_published_id_alone(bundle: Path, tmp_path: Path) -> None:
    """Everything computed again around other rows is a bundle of its own, and has another id."""
    rows = base_rows_of()
    other = make_bundle(tmp_path / "other", {"A": tier_rows(rows, kld_factor=0.5), "B": tier_rows(rows, kld_factor=2)})
    published = read_json(bundle / "manifest.json")["result_id"]
    assert failures(other) == []
    assert failures(other, published) == [("manifest.json", "result id")]


def test_rounding_of_another_machine_is_told_and_passes(bundle: Path) -> None:
    path = bundle / "audit" / "A" / "summary.json"
    summary = read_json(path)
    summary["summary"]["kld"]["value"] *= 1 + 1e-15
    path.write_bytes(pretty_json(summary))
    sha256 = list_files(bundle, {})["audit/A/summary.json"]["sha256"]
    rewrite(bundle, lambda facts: facts["tiers"]["A"].update(summary_sha256=sha256), relist=True)
    verification = verify_bundle(bundle, no_report)
    assert verification.passed
    (note,) = next(check.notes for check in verification.checks if check.name == "summaries")
    assert note.startswith("numbers of audit/A/summary.json differ from those of this machine by rounding")


def change_rows(bundle: Path, tier: str, column: str, index: int, value: float) -> None:
    """Change a number in the rows, and every record that follows from it but the summary."""
    path = bundle / "audit" / tier / "rows.parquet"
    rows, metadata = read_parquet(path)
    rows[column][index] = value
    write_parquet(path, rows, metadata)
    sha256 = list_files(bundle, {})[f"audit/{tier}/rows.parquet"]["sha256"]
    summary = read_json(bundle / "audit" / tier / "summary.json")
    (bundle / "audit" / tier / "summary.json").write_bytes(pretty_json({**summary, "rows_sha256": sha256}))
    listed = list_files(bundle, {})
    rewrite(bundle, lambda facts: facts["tiers"][tier].update(
        rows_sha256=sha256, summary_sha256=listed[f"audit/{tier}/summary.json"]["sha256"]), relist=True)


@pytest.mark.parametrize(("column", "value", "check"), [
    ("nll_base", 3.0, "base's columns"), ("token", 7.0, "base's columns"), ("kld", 5.0, "summaries"), ("top1_q", -5.0, "summaries"),
    ("pos", 3.0, "rows"), ("chunk", 9.0, "rows"), ("article", 9.0, "rows"), ("kld", float("nan"), "rows"),
])
def test_a_changed_number_in_the_rows_is_caught(bundle: Path, column: str, value: float, check: str) -> None:
    change_rows(bundle, "B", column, 100, value)
    assert check in {found for _, found in failures(bundle)}


def test_rows_of_another_tier_are_not_taken_for_this_ones(bundle: Path) -> None:
    for name in ("rows.parquet", "summary.json"):
        shutil.copyfile(bundle / "audit" / "A" / name, bundle / "audit" / "B" / name)
    rewrite(bundle, lambda facts: facts["tiers"]["B"].update(
        {key: facts["tiers"]["A"][key] for key in ("rows_sha256", "summary_sha256")}), relist=True)
    expected = {"q_sha256", "audit_id", "sha256", "tier"}
    found = {f.expected.split()[0] for f in verify_bundle(bundle, no_report).failures if f.check == "rows"}
    assert expected <= found


@pytest.mark.parametrize("content", [b"PAR1" + bytes(100) + b"PAR1", b"", b"not parquet", "flip"])
def test_damaged_parquet_is_one_failure_of_one_file(bundle: Path, content: bytes | str) -> None:
    """In a real worker: what a decoder does with such bytes is its own affair."""
    path = bundle / "audit" / "B" / "rows.parquet"
    data = path.read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else data[:2000] + bytes([data[2000] ^ 255]) + data[2001:])
    sha256 = list_files(bundle, {})["audit/B/rows.parquet"]["sha256"]
    rewrite(bundle, lambda facts: facts["tiers"]["B"].update(rows_sha256=sha256), relist=True)
    found = verify_bundle(bundle, no_report).failures
    assert {f.check for f in found} <= {"rows", "base's columns", "summaries", "verdicts", "slices", "references"}
    assert any(f.file.startswith("audit/B/") for f in found)


def test_parquet_that_unpacks_without_end_is_refused_before_it_is_unpacked(bundle: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = bundle / "audit" / "B" / "rows.parquet"
    rows, metadata = read_parquet(path)
    n = 20_000_000
    table = pa.table({name: pa.array([0], pa.int32() if rows.dtype[name].kind == "i" else pa.float64()).take(pa.array([0] * 8))
                      for name in rows.dtype.names or ()})
    big = pa.concat_tables([table] * (n // 8 // 1000)).replace_schema_metadata(metadata)
    pq.write_table(big, path, compression="zstd")
    sha256 = list_files(bundle, {})["audit/B/rows.parquet"]["sha256"]
    rewrite(bundle, lambda facts: facts["tiers"]["B"].update(rows_sha256=sha256), relist=True)
    found = [f.found for f in verify_bundle(bundle, no_report).failures if f.file == "audit/B/rows.parquet"]
    assert any(f"has {len(big)} rows, expected the {len(rows)} of its chunks" in text for text in found)


def test_a_report_is_made_again_and_compared(bundle: Path) -> None:
    (bundle / "report").mkdir()
    (bundle / "report" / "retention.md").write_text("one\ntwo\n")
    rewrite(bundle, lambda facts: None, relist=True)

    def verification(text: str) -> Verification:
        return verify_bundle(bundle, lambda run: {"report/retention.md": text.encode(), "report/other.md": b"x"})

    assert verification("one\ntwo\n").passed
    notes = {check.name: check.notes for check in verification("one\ntwo\n").checks}
    assert notes["report"] == ("report/other.md is not in the bundle",)
    (failure,) = verification("one\nthree\n").failures
    assert (failure.file, failure.found) == ("report/retention.md", "line 2: two")


def test_a_card_may_stand_at_the_top_as_a_repository_shows_it(bundle: Path) -> None:
    (bundle / "report").mkdir()
    (bundle / "report" / "README.md").write_text("# A card\n")
    rewrite(bundle, lambda facts: None, relist=True)
    (bundle / "README.md").write_text("# A card\n")
    assert failures(bundle) == []
    (bundle / "report" / "README.md").unlink()
    assert failures(bundle) == []
    (bundle / "README.md").write_text("# B card\n")
    assert failures(bundle) == [("report/README.md", "files")]


def test_what_names_a_machine_is_listed_apart_and_held_all_the_same(bundle: Path) -> None:
    before = read_json(bundle / "manifest.json")
    (bundle / "report").mkdir()
    (bundle / "report" / "speed.json").write_text("[]")
    assert failures(bundle) == [("report/speed.json", "files")]  # nothing lists it
    rewrite(bundle, lambda facts: None, relist=True)
    assert read_json(bundle / "manifest.json") == before
    assert failures(bundle) == []
    (bundle / "report" / "speed.json").write_text("[1]")
    assert failures(bundle) == [("report/speed.json", "files")]
    (bundle / "report" / "speed.json").write_text("[]")
    listing, entry = read_json(bundle / APART), {"sha256": "0" * 64, "size_bytes": 1}
    lies = [({name: entry}, listing["result_id"]) for name in ("audit/A/rows.parquet", "plan/new.json", "../report/report.html")]
    for files, result_id in [*lies, (listing["files"], "0" * 64)]:
        (bundle / APART).write_bytes(pretty_json({"result_id": result_id, "files": files}))
        assert (APART, "manifest") in failures(bundle)
    (bundle / APART).write_bytes(b"[" * 100_000)
    assert (APART, "manifest") in failures(bundle)


def test_a_failed_verification_is_an_error_with_its_first_failure(bundle: Path) -> None:
    (bundle / "protocol.toml").unlink()
    with pytest.raises(CheckFailed, match=r"it does not verify: protocol.toml: expected a file of \d+ bytes, found nothing"):
        verify_bundle(bundle, no_report).require("it")


def test_a_report_of_another_version_is_not_made_again(bundle: Path) -> None:
    rewrite(bundle, lambda facts: facts.update(quantkit="9.9.9"))
    verification = verify_bundle(bundle, lambda run: {"report/retention.md": b"x"})
    assert verification.passed
    assert {check.name: check.notes for check in verification.checks}["report"] == (
        f"not made again: written by quantkit 9.9.9, this is {__version__}",)
