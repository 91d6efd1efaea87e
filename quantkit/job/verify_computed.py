"""What is computed from rows beyond a tier's summary: verdicts between tiers, slices, noise floors. Each is computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.engine.pool import WorkerPool
from quantkit.job.pairs import compute_slices, compute_verdicts, order_tiers
from quantkit.job.verify_files import read_json_bounded
from quantkit.job.verify_records import Bundle
from quantkit.job.verify_rows import TierRows, compare_numbers, read_rows
from quantkit.measure.noise import KernelSettings, summarize_floor
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.protocol import Protocol
from quantkit.spec.verdict_records import Floor


def check_floors(bundle: Bundle) -> None:
    """The noise floor of every file that has one, from the rows of it against itself; read in a worker, as all rows are."""
    named = {"base": bundle.facts["base"].get("sha256"), **{tier: record.get("sha256") for tier, record in bundle.tiers.items()}}
    with WorkerPool(1) as pool:
        for name, sha256 in named.items():
            file = f"audit/{name}/floor.json"
            if bundle.is_sound(file):
                with bundle.findings.reading("floors", file, "the noise floor of a file"):
                    _check_floor(bundle, pool, name, sha256, file)


def _check_floor(bundle: Bundle, pool: WorkerPool, name: str, sha256: object, file: str) -> None:
    findings, run = bundle.findings, bundle.run
    value = read_json_bounded(run.path / file)
    floor = record_from_json(Floor, value)
    findings.equal("floors", file, f"the sha256 of {name},", sha256, floor.sha256)
    for kernel, held in zip(floor.kernels, value["kernels"], strict=True):
        path = run.floor_rows(name, kernel.kernel)
        rows_file = path.relative_to(run.path).as_posix()
        if not bundle.is_sound(rows_file):
            if rows_file not in bundle.manifest.entries:
                findings.fail("floors", rows_file, "the rows of a noise floor in the manifest's list", "none")
            continue
        rows, _ = pool.call(f"read floor {name}", read_rows, path=path, n_rows=floor.n_scored)
        settings = KernelSettings(kernel.kernel, kernel.flash_attn, kernel.use_extra_bufts, kernel.n_ubatch)
        again = summarize_floor(rows, settings, bundle.manifest.entries[rows_file].sha256)
        compare_numbers(findings, "floors", file, record_to_json(again), held, f"kernel {kernel.kernel}")


def check_computed(bundle: Bundle, protocol: Protocol, read: Mapping[str, TierRows]) -> None:
    """Verdicts between all tiers, and the slices of each."""
    findings, run = bundle.findings, bundle.run
    for tier, (rows, _) in read.items():
        name = f"audit/{tier}/slices.json"
        if bundle.is_sound(name):
            with findings.reading("slices", name, "slices that the rows come to"):
                _compare(bundle, "slices", name, record_to_json(compute_slices(run, tier, rows)))
    name = "audit/pairs.json"
    if not bundle.is_sound(name):
        return
    if read.keys() != bundle.tiers.keys():
        findings.note("verdicts", "not computed again: the rows of some tiers failed")
        return
    with findings.reading("verdicts", name, "verdicts that the rows come to"):
        rows_of = {tier: read[tier].rows for tier in order_tiers(bundle.tiers)}
        _compare(bundle, "verdicts", name, record_to_json(compute_verdicts(run, protocol, rows_of)))


def _compare(bundle: Bundle, check: str, name: str, computed: Any) -> None:
    compare_numbers(bundle.findings, check, name, computed, read_json_bounded(bundle.run.path / name), "")
