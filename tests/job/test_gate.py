"""The gate over whole bundles, without an engine: labels, refusals, and a store that moves whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import CheckFailed, InputError, NoSpace
from quantkit.core.files import pretty_json
from quantkit.job.gate import GateResult, gate_runs, gate_store
from quantkit.job.manifest import refresh_files
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.smoke import SmokeRecord
from quantkit.job.verify import verify_bundle
from quantkit.measure.numbers import Rows
from quantkit.spec.protocol import Protocol, load_protocol
from tests.faults.mounts import grow, small_disk
from tests.job.bundles import base_rows_of, make_bundle, tier_rows

pytestmark = pytest.mark.system


def no_report(run: RunFolder) -> Mapping[str, bytes]:
    return {}


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    """The demo's, with margins that rows from a generator can hold or break."""
    return load_protocol("demo-v1", ["gate.margins.same_top_p=0.004"])


@pytest.fixture(scope="module")
def rows() -> Rows:
    return base_rows_of()


@pytest.fixture(scope="module")
def runs(protocol: Protocol, rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An incumbent of two tiers, and candidates."""
    folder = tmp_path_factory.mktemp("runs")
    better, worse, mixed = (tier_rows(rows, kld_factor=0.8), tier_rows(rows, kld_factor=1.3),
                            tier_rows(rows, kld_factor=0.8, flips=200))
    made = {
        "incumbent": ({"A": rows, "B": rows}, {}),
        "equal": ({"A": rows, "B": rows}, {"A": 99_999}),  # another file with the same rows, one byte less
        "better": ({"A": better, "B": rows}, {}),
        "best": ({"A": tier_rows(rows, kld_factor=0.6), "B": rows}, {}),
        "larger": ({"A": better, "B": rows}, {"A": 100_001}),
        "worse": ({"A": rows, "B": worse}, {}),
        "mixed": ({"A": mixed, "B": rows}, {}),
        "tiers at odds": ({"A": better, "B": worse}, {}),
        "smaller": ({"A": rows, "B": rows}, {"A": 90_000}),
        "one tier": ({"A": better}, {}),
        "three tiers": ({"A": better, "B": rows, "C": rows}, {}),
    }
    return {name: make_bundle(folder / name, tiers, sizes=sizes, protocol=protocol) for name, (tiers, sizes) in made.items()}


def gate(runs: Mapping[str, Path], name: str, protocol: Protocol) -> GateResult:
    return gate_runs(runs[name], runs["incumbent"], protocol, no_report)


@pytest.mark.parametrize(("name", "label", "commits"), [
    ("better", "strict progress", True), ("smaller", "strict progress", True), ("equal", "no progress", False),
    ("worse", "protected regression", False), ("mixed", "incomparable", False), ("tiers at odds", "incomparable", False),
    ("larger", "incomparable", False), ("one tier", "incomparable", False),
])
def test_labels(runs: Mapping[str, Path], protocol: Protocol, name: str, label: str, commits: bool) -> None:
    result = gate(runs, name, protocol)
    assert (result.label, result.commits, result.moved) == (label, commits, False)


def test_a_smaller_kld_does_not_buy_a_worse_same_top_p(runs: Mapping[str, Path], protocol: Protocol) -> None:
    verdicts = {(j.tier, j.obligation.name): j.obligation.verdict for j in gate(runs, "mixed", protocol).obligations}
    assert (verdicts["A", "kld_mean"], verdicts["A", "same_top_p"]) == ("better", "worse")


def test_ranks_count_margins_to_perfect_and_a_commit_takes_from_them(runs: Mapping[str, Path], protocol: Protocol) -> None:
    ranks = {j.obligation.name: (j.incumbent_rank, j.candidate_rank) for j in gate(runs, "better", protocol).obligations
             if j.tier == "A"}
    assert ranks["kld_mean"] == (50, 50 - 11)  # ln 0.8 is 11 margins of ln 1.02
    assert ranks["valid"] == (0, 0)
    assert ranks["size_bytes"] == (1000, 1000)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def snapshot(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != ".lock"}


def test_a_store_moves_to_a_better_candidate_and_keeps_others(runs: Mapping[str, Path], protocol: Protocol, store: Path) -> None:
    first = gate_store(runs["mixed"], runs["incumbent"], protocol, store, no_report)
    assert (first.label, first.moved) == ("incomparable", False)
    incumbent = snapshot(store / "current")
    assert read_json(store / "rejected" / first.candidate / "label.json")["label"] == "incomparable"

    second = gate_store(runs["better"], None, protocol, store, no_report)
    assert (second.label, second.moved, second.n_commits) == ("strict progress", True, 1)
    assert (store / "current").resolve().name == second.candidate
    assert snapshot(store / "bundles" / first.incumbent) == incumbent
    assert verify_bundle(store / "current", no_report, second.candidate).passed
    assert verify_bundle(store / "rejected" / first.candidate, no_report, first.candidate).passed
    label = read_json(store / "current" / "label.json")
    assert label["first_rank_sum"] == read_json(store / "bundles" / first.incumbent / "label.json")["first_rank_sum"]
    assert sum(sum(own.values()) for own in label["ranks"].values()) < label["first_rank_sum"]

    third = gate_store(runs["incumbent"], None, protocol, store, no_report)
    assert (third.label, third.moved) == ("protected regression", False)
    assert (store / "current").resolve().name == second.candidate


def test_a_rejected_candidate_leaves_the_incumbent_bit_identical(runs: Mapping[str, Path], protocol: Protocol, store: Path) -> None:
    gate_store(runs["equal"], runs["incumbent"], protocol, store, no_report)
    before = snapshot(store / "current")
    for name in ("worse", "mixed", "tiers at odds", "larger"):
        result = gate_store(runs[name], None, protocol, store, no_report)
        assert not result.moved
        assert (store / "rejected" / result.candidate / "audit" / "A" / "rows.parquet").exists()
    assert snapshot(store / "current") == before


def test_max_commits_caps_the_number(runs: Mapping[str, Path], rows: Rows, tmp_path: Path, store: Path) -> None:
    capped = load_protocol("demo-v1", ["gate.max_commits=1"])
    made = {name: make_bundle(tmp_path / name, {"A": tier_rows(rows, kld_factor=factor)}, protocol=capped)
            for name, factor in (("first", 1.0), ("second", 0.8), ("third", 0.6))}
    assert gate_store(made["second"], made["first"], capped, store, no_report).moved
    result = gate_store(made["third"], None, capped, store, no_report)
    assert (result.label, result.commits, result.moved) == ("strict progress", False, False)
    assert result.reason == "1 commits were made, and there can be 1"
    assert read_json(store / "rejected" / result.candidate / "label.json")["reason"] == result.reason


def test_a_dry_run_writes_nothing(runs: Mapping[str, Path], protocol: Protocol, store: Path) -> None:
    result = gate_store(runs["better"], runs["incumbent"], protocol, store, no_report, dry_run=True)
    assert (result.commits, result.moved, store.exists()) == (True, False, False)
    gate_store(runs["equal"], runs["incumbent"], protocol, store, no_report)
    before = snapshot(store)
    assert gate_store(runs["better"], None, protocol, store, no_report, dry_run=True).commits
    assert snapshot(store) == before


def test_a_candidate_that_does_not_verify_leaves_only_a_label(runs: Mapping[str, Path], rows: Rows, protocol: Protocol,
                                                              tmp_path: Path, store: Path) -> None:
    broken = make_bundle(tmp_path / "broken", {"A": tier_rows(rows, kld_factor=0.5), "B": rows}, protocol=protocol)
    (broken / "audit" / "A" / "summary.json").write_text("{}")
    result = gate_store(broken, runs["incumbent"], protocol, store, no_report)
    assert (result.label, result.moved) == ("protected regression", False)
    assert result.obligations[0].obligation.reason == "audit/A/summary.json does not verify"
    assert [p.name for p in (store / "rejected" / result.candidate).iterdir()] == ["label.json"]


def test_an_incumbent_that_does_not_verify_protects_nothing(rows: Rows, protocol: Protocol, tmp_path: Path,
                                                            runs: Mapping[str, Path]) -> None:
    broken = make_bundle(tmp_path / "broken", {"A": rows, "B": rows}, protocol=protocol)
    (broken / "protocol.toml").write_text("")
    with pytest.raises(CheckFailed, match=r"broken does not verify: protocol.toml: expected .* bytes, found 0 bytes"):
        gate_runs(runs["better"], broken, protocol, no_report)


def test_what_cannot_be_compared_is_refused(runs: Mapping[str, Path], protocol: Protocol, tmp_path: Path, store: Path) -> None:
    with pytest.raises(InputError, match="got C in the candidate: a tier that nothing stands against"):
        gate(runs, "three tiers", protocol)
    with pytest.raises(InputError, match="got eval_id"):
        gate(runs, "better", load_protocol("demo-v1", ["eval.seed=2"]))
    with pytest.raises(InputError, match="at least 65 chunks for a gate, got 64"):
        gate(runs, "better", load_protocol("demo-v1", ["gate.min_n_chunk=65"]))
    others = make_bundle(tmp_path / "others", {"A": base_rows_of(seed=1), "B": base_rows_of(seed=1)}, protocol=protocol)
    with pytest.raises(InputError, match="another token in the candidate"):
        gate_runs(others, runs["incumbent"], protocol, no_report)
    with pytest.raises(InputError, match="expected the first incumbent for the new store"):
        gate_store(runs["better"], None, protocol, store, no_report)


def test_a_store_keeps_its_rules_and_its_incumbent(runs: Mapping[str, Path], protocol: Protocol, store: Path) -> None:
    gate_store(runs["equal"], runs["incumbent"], protocol, store, no_report)
    loose = load_protocol("demo-v1", ["gate.margins.same_top_p=0.5"])
    with pytest.raises(InputError, match=r"expected the rules that .* was begun with"):
        gate_store(runs["better"], None, loose, store, no_report)
    with pytest.raises(InputError, match="expected the store's current bundle as the incumbent"):
        gate_store(runs["better"], runs["mixed"], protocol, store, no_report)


def test_one_tier_alone_is_compared_where_the_others_are_the_same_files(runs: Mapping[str, Path], protocol: Protocol,
                                                                        store: Path) -> None:
    result = gate_store(runs["better"], runs["incumbent"], protocol, store, no_report, ["A"])
    assert {j.tier for j in result.obligations} == {"A"}
    assert result.moved
    assert read_json(store / "current" / "label.json")["ranks"].keys() == {"A", "B"}
    with pytest.raises(InputError, match="expected every tier but A as in the incumbent, got another B"):
        gate_runs(runs["tiers at odds"], runs["incumbent"], protocol, no_report, ["A"])
    with pytest.raises(InputError, match="expected a tier of the incumbent"):
        gate_runs(runs["better"], runs["incumbent"], protocol, no_report, ["Z"])


SMOKE = SmokeRecord(schema=1, file="f", sha256="", prompt="p", n_predict=32, template="none", through="in-process", n_tokens=32,
                    ended=False, valid_utf8=True, repeat_share=0.0, looped=False, text="t", served_text=None, passed=True,
                    failures=())


@pytest.mark.parametrize(("incumbent", "candidate", "verdict"), [
    (None, None, "not compared"), (None, True, "not compared"), (None, False, "worse"), (True, True, "not worse"),
    (True, None, "worse"), (True, False, "worse"), (False, True, "better"), (False, False, "not worse"),
])
def test_smoke_tests_that_passed_failed_or_were_not_made(rows: Rows, protocol: Protocol, tmp_path: Path, incumbent: bool | None,
                                                         candidate: bool | None, verdict: str) -> None:
    made = []
    for name, passed in (("incumbent", incumbent), ("candidate", candidate)):
        run = make_bundle(tmp_path / name, {"A": rows}, protocol=protocol)
        if passed is not None:
            sha256 = read_json(run / "manifest.json")["tiers"]["A"]["sha256"]
            record = dataclasses.replace(SMOKE, passed=passed, sha256=sha256, failures=() if passed else ("no tokens",))
            (run / "smoke").mkdir()
            (run / "smoke" / "A.json").write_bytes(pretty_json(record.to_json()))
            refresh_files(RunFolder(path=run))
        made.append(run)
    found = {j.obligation.name: j.obligation.verdict for j in gate_runs(made[1], made[0], protocol, no_report).obligations}
    assert found["smoke"] == verdict


def test_the_label_is_json_with_every_number(runs: Mapping[str, Path], protocol: Protocol) -> None:
    label = json.loads(json.dumps(gate(runs, "mixed", protocol).to_json(protocol), allow_nan=False))
    assert [o["name"] for o in label["obligations"] if o["tier"] == "B"] == [
        "valid", "smoke", "size_bytes", "kld_mean", "kld_p999", "same_top_p", "ln_ppl_ratio", "acceptance_rate"]
    assert (label["n_commits"], label["max_commits"]) == (0, protocol.gate.max_commits)
    assert label["first_rank_sum"] == sum(sum(tier.values()) for tier in [
        {o["name"]: o["incumbent_rank"] for o in label["obligations"] if o["tier"] == t} for t in "AB"])


def test_rows_of_the_generator_are_what_the_tests_take_them_for(rows: Rows) -> None:
    assert (len(np.unique(rows["chunk"])), len(np.unique(rows["article"]))) == (64, 16)


@pytest.mark.parametrize(("unit", "step"), [("n_page", 16), ("n_inode", 2)])
def test_a_store_on_a_disk_that_is_full_at_every_write(runs: Mapping[str, Path], protocol: Protocol, tmp_path: Path, unit: str,
                                                       step: int) -> None:
    """`current` leads to nothing, to the first bundle or to the second, and to a whole one; nothing half made is left."""
    expected = gate_store(runs["better"], runs["incumbent"], protocol, tmp_path / "elsewhere", no_report)
    faults = []
    with small_disk(tmp_path / "disk", **{unit: step}) as disk:
        store = disk / "store"
        for n in range(2, 200):
            try:
                made = gate_store(runs["better"], None if (store / "current").exists() else runs["incumbent"], protocol, store,
                                  no_report)
                break
            except NoSpace as error:
                faults.append(str(error))
            if store.exists():
                assert [path.name for path in store.rglob(".*") if path.name != ".lock"] == []
            if (store / "current").exists():
                assert verify_bundle(store / "current", no_report, expected.incumbent).passed
            grow(disk, **{unit: n * step})
        assert (made.label, made.moved, made.candidate) == ("strict progress", True, expected.candidate)
        assert snapshot(store) == snapshot(tmp_path / "elsewhere")
    assert len(faults) > 10
    assert all(re.fullmatch("the disk is full (while writing|at) .*: free some space and run again", fault) for fault in faults)
