"""Verification of a real run: every byte of it counts; files and rows come out the same a second time."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.errors import CheckFailed, InputError
from quantkit.core.files import pretty_json
from quantkit.engine.lockstep import read_build
from quantkit.engine.pool import WorkerPool
from quantkit.job import regenerate
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.manifest import APART, list_files, refresh_files, result_id_of, seal_of
from quantkit.job.parts import read_parquet, write_parquet
from quantkit.job.progress import Silent
from quantkit.job.regenerate import Rechecked, RecheckOptions, recheck
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.verify import verify_bundle
from quantkit.job.verify_findings import Findings, Verification
from quantkit.report.run_report import render_report, write_report
from quantkit.spec.gguf_header import read_header
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.engine

TIERS = ["Q8_0", "Q4_K_M"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("a model") / "model-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.fixture(scope="module")
def original(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a report."""
    run = tmp_path_factory.mktemp("runs") / "run"
    result = run_ladder(base, load_protocol("demo-v1"), run, TIERS, Silent(), RunOptions(n_workers=2, floors=True, weights=True))
    assert all(isinstance(error, CheckFailed) for error in result.failed.values())  # random weights answer nothing sensible
    write_report(result.folder.path)
    return result.folder.path


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def verify(bundle: Path) -> Verification:
    return verify_bundle(bundle, render_report)


def test_a_run_verifies_and_so_does_a_bundle_without_its_models(bundle: Path) -> None:
    assert verify(bundle).failures == ()
    shutil.rmtree(bundle / "quants")
    relist(bundle)
    verification = verify(bundle)
    assert verification.failures == ()
    assert {check.name: check.notes for check in verification.checks}["tier files"] == ("not in the bundle: Q4_K_M, Q8_0",)


def test_one_changed_byte_of_any_file_fails_and_names_it(bundle: Path) -> None:
    rng = random.Random(5)
    names = ["manifest.json", *read_json(bundle / "manifest.json")["files"], APART, *read_json(bundle / APART)["files"]]
    assert {"report/report.html", "report/speed.json"} <= set(names)
    assert len(names) > 20
    for name in names:
        path = bundle / name
        data = path.read_bytes()
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1:])
        found = {failure.file for failure in verify(bundle).failures}
        path.write_bytes(data)
        assert name in found, f"byte {at} of {name}"
    assert verify(bundle).passed


def relist(bundle: Path) -> None:
    """A manifest that fits the files again."""
    facts = read_json(bundle / "manifest.json")
    facts["files"] = list_files(bundle, {})
    facts["result_id"] = result_id_of(facts)
    (bundle / "manifest.json").write_bytes(pretty_json({**facts, "seal": seal_of(facts)}))
    refresh_files(RunFolder(path=bundle))


def test_a_model_of_other_types_is_caught_though_every_hash_fits(bundle: Path) -> None:
    shutil.copyfile(bundle / "quants" / "model-Q8_0.gguf", bundle / "quants" / "model-Q4_K_M.gguf")
    facts = read_json(bundle / "manifest.json")
    facts["tiers"]["Q4_K_M"].update({key: facts["tiers"]["Q8_0"][key] for key in ("sha256", "size_bytes", "bpw", "bpw_core")})
    (bundle / "manifest.json").write_bytes(pretty_json(facts))
    relist(bundle)
    found = [f"{f.check}: expected {f.expected}, found {f.found}" for f in verify(bundle).failures]
    assert any(text.startswith("tier files: expected the plan's types") and "Q8_0 instead of Q5_K" in text for text in found)
    assert any(text.startswith("plans: expected bpw of the manifest") for text in found)


def again(bundle: Path, base: Path, **options: object) -> tuple[Rechecked, Verification]:
    settings = RecheckOptions(**{"regenerate": False, "n_remeasure": 0, "seed": 3, **options})  # type: ignore[arg-type]
    findings = Findings()
    rechecked = recheck(bundle, base, settings, findings, Silent())
    assert not (bundle / "parts" / "verify").exists()
    return rechecked, findings.result(None)


def test_files_and_rows_come_out_the_same(bundle: Path, base: Path) -> None:
    rechecked, verification = again(bundle, base, regenerate=True, n_remeasure=5)
    assert verification.failures == ()
    assert rechecked.same_build
    assert [(made.tier, made.identical) for made in rechecked.regenerated] == [("Q4_K_M", True), ("Q8_0", True)]
    assert [(m.tier, m.n_rows, m.n_rows_differ, m.max_kld_difference) for m in rechecked.remeasured] == [
        ("Q4_K_M", 5 * 63, 0, 0.0), ("Q8_0", 5 * 63, 0, 0.0)]
    assert verify(bundle).passed  # nothing of it is left in the bundle


def test_a_bundle_without_models_is_measured_from_files_made_again(bundle: Path, base: Path) -> None:
    shutil.rmtree(bundle / "quants")
    relist(bundle)
    rechecked, verification = again(bundle, base, regenerate=True, n_remeasure=2, tiers=("Q8_0",))
    assert verification.failures == ()
    assert [(m.tier, m.n_rows_differ) for m in rechecked.remeasured] == [("Q8_0", 0)]
    rechecked, verification = again(bundle, base, n_remeasure=2, tiers=("Q8_0",))
    assert rechecked.remeasured == ()
    assert verification.checks[0].notes == ("Q8_0 is not in the bundle; --regenerate makes it",)


def test_the_seed_chooses_the_chunks(bundle: Path, base: Path) -> None:
    def chosen(seed: int) -> tuple[int, ...]:
        return again(bundle, base, n_remeasure=3, tiers=("Q8_0",), seed=seed)[0].remeasured[0].chunks

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_rows_that_were_not_measured_are_found(bundle: Path, base: Path) -> None:
    path = bundle / "audit" / "Q8_0" / "rows.parquet"
    rows, metadata = read_parquet(path)
    rows["kld"] *= 0.5
    write_parquet(path, rows, metadata)
    rechecked, verification = again(bundle, base, n_remeasure=2, tiers=("Q8_0",))
    assert [failure.file for failure in verification.failures] == ["audit/Q8_0/rows.parquet"]
    assert rechecked.remeasured[0].n_rows_differ > 100
    assert rechecked.remeasured[0].kld_recorded == pytest.approx(0.5 * rechecked.remeasured[0].kld_found)


@pytest.fixture
def other_build(bundle: Path) -> Path:
    """A bundle that says another build made it; its Q4_K_M has one weight group of another scale."""
    facts = read_json(bundle / "manifest.json")
    facts["build"]["system_info"] = "CPU : NEON = 1"
    path = bundle / "quants" / "model-Q4_K_M.gguf"
    tensor = next(t for t in read_header(path).tensors if t.type.name == "Q4_K")
    data = bytearray(path.read_bytes())
    data[tensor.offset + 16] ^= 1  # a quantized weight of the first block
    path.write_bytes(data)
    facts["tiers"]["Q4_K_M"]["sha256"] = list_files(bundle, {})["quants/model-Q4_K_M.gguf"]["sha256"]
    (bundle / "manifest.json").write_bytes(pretty_json(facts))
    relist(bundle)
    return bundle


def test_another_build_is_told_with_the_tensors_that_differ(other_build: Path, base: Path) -> None:
    rechecked, verification = again(other_build, base, regenerate=True, n_remeasure=2, tiers=("Q4_K_M",))
    assert not rechecked.same_build
    (made,) = rechecked.regenerated
    assert made.differences is not None
    (difference,) = made.differences
    assert not made.identical
    assert 0 < difference.relative_difference < 0.01
    assert rechecked.remeasured[0].n_rows_differ > 0
    assert verification.failures == ()
    for check in verification.checks:
        assert "another build, so other bits are to be expected: system_info CPU" in check.notes[-1]


def test_the_same_build_must_give_the_same_bytes(other_build: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_json(other_build / "manifest.json")
    with WorkerPool(1) as pool:
        facts["build"]["system_info"] = pool.call("build", read_build, n_gpu_layers=0).system_info
    (other_build / "manifest.json").write_bytes(pretty_json(facts))
    _, verification = again(other_build, base, regenerate=True, tiers=("Q4_K_M",))
    assert [failure.file for failure in verification.failures] == ["quants/model-Q4_K_M.gguf"]


def test_a_file_that_was_not_made_from_the_base_fails_with_any_build(other_build: Path, base: Path) -> None:
    path = other_build / "quants" / "model-Q4_K_M.gguf"
    tensor = next(t for t in read_header(path).tensors if t.type.name == "Q4_K")
    data = bytearray(path.read_bytes())
    block = np.frombuffer(data, np.uint8, tensor.size_bytes, tensor.offset).copy().reshape(-1, 144)
    data[tensor.offset:tensor.offset + tensor.size_bytes] = block[::-1].tobytes()  # blocks in another order
    path.write_bytes(data)
    _, verification = again(other_build, base, regenerate=True, tiers=("Q4_K_M",))
    (failure,) = verification.failures
    assert (failure.file, failure.expected.split()[0]) == ("quants/model-Q4_K_M.gguf", tensor.name)


def test_another_base_or_tier_is_refused(bundle: Path, base: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other-BF16.gguf", n_embd=256, n_ff=256, seed=1)[0]
    with pytest.raises(InputError, match=r"expected the base of .* with sha256 .*, got .* with sha256"):
        again(bundle, other, regenerate=True)
    with pytest.raises(InputError, match=r"expected a tier of the bundle \(Q4_K_M, Q8_0\), got Q2_K"):
        again(bundle, base, regenerate=True, tiers=("Q2_K",))


def test_a_plan_that_the_protocol_does_not_come_to_is_found(bundle: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = load_protocol("demo-v1", ["plan.tiers[Q4_K_M].default=Q5_K"])
    monkeypatch.setattr(regenerate, "load_protocol", lambda path: other)
    _, verification = again(bundle, base, regenerate=True, tiers=("Q4_K_M",))
    assert [failure.file for failure in verification.failures] == ["plan/Q4_K_M.json"]


def test_a_bundle_that_fails_is_an_error(bundle: Path) -> None:
    (bundle / "imatrix.gguf").unlink()
    verification = verify(bundle)
    with pytest.raises(CheckFailed, match=r"run does not verify: imatrix.gguf: expected a file of"):
        verification.require("run")
