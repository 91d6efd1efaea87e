"""Every published number is computed again from its rows: summaries, verdicts between tiers, slices, noise floors, weights' KLD.

Another processor or numpy rounds exp and ln in the last bits: numbers that differ by no more than that pass, and it is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.core.stats import group_by
from quantkit.job.pairs import compute_slices, compute_verdicts, order_tiers
from quantkit.job.parts import read_parquet
from quantkit.job.refpack_audit import shortfall_of
from quantkit.job.verify_files import read_json_bounded
from quantkit.job.verify_findings import Findings
from quantkit.job.verify_records import Bundle, Text
from quantkit.job.verify_rows import TierRows
from quantkit.measure.noise import KernelSettings, summarize_floor
from quantkit.measure.numbers import STATISTICS
from quantkit.measure.summary import base_rows, estimate, summarize
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.protocol import Protocol
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.verdict_records import Floor, WeightsKld

ROUNDING = 1e-9  # relative
_NOTHING = 1e-13  # absolute; what is left of numbers that cancel


def check_summaries(bundle: Bundle, text: Text, read: Mapping[str, TierRows]) -> None:
    """The summary of every tier, and base's own."""
    findings = bundle.findings
    for tier, (rows, held) in read.items():
        name = bundle.name(text.run.summary(tier))
        with findings.reading("summaries", name, "numbers that the rows come to"):
            for key, again in (("summary", summarize(rows)), ("base_summary", summarize(base_rows(rows)))):
                compare_numbers(findings, "summaries", name, again.to_json(), held[key], key)
            if "ref" in held:
                _check_shortfall(bundle, text, tier, PackReference.from_json(held["ref"]))


def _check_shortfall(bundle: Bundle, text: Text, tier: str, ref: PackReference) -> None:
    """Measured against a reference pack: the shortfall is what the rows that it keeps whole come to."""
    again = shortfall_of(read_json_bounded(text.run.shortfall(tier)))
    computed = {"shortfall": again.value, "shortfall_se": again.se, "n_full": again.n_full}
    held = {"shortfall": ref.shortfall, "shortfall_se": ref.shortfall_se, "n_full": ref.n_full}
    compare_numbers(bundle.findings, "summaries", bundle.name(text.run.summary(tier)), computed, held, "ref")


def check_own_rows(bundle: Bundle, text: Text) -> None:
    """Noise floors and kld_weights, from rows of their own; read as all rows are."""
    named = {"base": bundle.facts["base"].get("sha256"), **{tier: record.get("sha256") for tier, record in bundle.tiers.items()}}
    for name, sha256 in named.items():
        floor, weights = bundle.name(text.run.floor(name)), bundle.name(text.run.weights(name))
        if bundle.is_sound(floor):
            with bundle.findings.reading("floors", floor, "the noise floor of a file"):
                _check_floor(bundle, text, name, sha256)
        if bundle.is_sound(weights):
            with bundle.findings.reading("kld_weights", weights, "what a tier's weights alone do"):
                _check_weights(bundle, text, name, sha256)


def _check_floor(bundle: Bundle, text: Text, name: str, sha256: object) -> None:
    findings, file = bundle.findings, bundle.name(text.run.floor(name))
    value = read_json_bounded(text.run.floor(name))
    floor = record_from_json(Floor, value)
    findings.equal("floors", file, f"the sha256 of {name},", sha256, floor.sha256)
    for kernel, held in zip(floor.kernels, value["kernels"], strict=True):
        path = text.run.floor_rows(name, kernel.kernel)
        if _is_there(bundle, "floors", bundle.name(path)):
            rows, _ = read_parquet(path, n_rows=floor.n_scored)
            settings = KernelSettings(kernel.kernel, kernel.flash_attn, kernel.use_extra_bufts, kernel.n_ubatch)
            again = summarize_floor(rows, settings, bundle.manifest.entries[bundle.name(path)].sha256)
            compare_numbers(findings, "floors", file, record_to_json(again), held, f"kernel {kernel.kernel}")


def _check_weights(bundle: Bundle, text: Text, name: str, sha256: object) -> None:
    findings, file, path = bundle.findings, bundle.name(text.run.weights(name)), text.run.weights_rows(name)
    value = read_json_bounded(text.run.weights(name))
    held = record_from_json(WeightsKld, value)
    findings.equal("kld_weights", file, f"the sha256 of {name},", sha256, held.sha256)
    if not _is_there(bundle, "kld_weights", bundle.name(path)):
        return
    findings.equal("kld_weights", file, "rows_sha256", bundle.manifest.entries[bundle.name(path)].sha256, held.rows_sha256)
    rows, _ = read_parquet(path, n_rows=held.n_scored)
    chunks, articles = group_by(rows["chunk"]), group_by(rows["article"])
    for key in ("kld", "same_top_p"):
        again = estimate(rows, STATISTICS[key], chunks, articles)
        compare_numbers(findings, "kld_weights", file, record_to_json(again), value[key], key)


def _is_there(bundle: Bundle, check: str, name: str) -> bool:
    if name not in bundle.manifest.entries:
        bundle.findings.fail(check, name, "the rows of a number in the manifest's list", "none")
    return bundle.is_sound(name)


def check_computed(bundle: Bundle, text: Text, protocol: Protocol, read: Mapping[str, TierRows]) -> None:
    """Verdicts between all tiers, and the slices of each."""
    findings, run = bundle.findings, text.run
    for tier, (rows, _) in read.items():
        name = bundle.name(run.slices(tier))
        if bundle.is_sound(name):
            with findings.reading("slices", name, "slices that the rows come to"):
                again = record_to_json(compute_slices(run, tier, rows))
                compare_numbers(findings, "slices", name, again, read_json_bounded(run.slices(tier)), "")
    name = bundle.name(run.pairs)
    if not bundle.is_sound(name):
        return
    if read.keys() != bundle.tiers.keys() or any(failure.file.startswith("audit/") for failure in findings.failures):
        findings.note("verdicts", "not computed again: rows or records that they are made of failed")
        return
    with findings.reading("verdicts", name, "verdicts that the rows come to"):
        rows_of = {tier: read[tier].rows for tier in order_tiers(bundle.tiers)}
        again = record_to_json(compute_verdicts(run, protocol, rows_of))
        compare_numbers(findings, "verdicts", name, again, read_json_bounded(run.pairs), "")


def compare_numbers(findings: Findings, check: str, name: str, computed: Any, held: Any, where: str) -> None:
    """Hold a record against the one computed anew; numbers may differ by rounding, and then it is told."""
    largest = 0.0
    for path, expected, found in _leaves(computed, held, where):
        findings.count(check)
        if type(expected) is type(found) and expected == found:
            continue
        if isinstance(expected, float) and isinstance(found, float) and math.isclose(expected, found, rel_tol=ROUNDING,
                                                                                     abs_tol=_NOTHING):
            largest = max(largest, abs(expected - found) / max(abs(expected), abs(found)))
        else:
            findings.fail(check, name, f"{path} {expected!r}", repr(found))
    if largest:
        findings.note(check, f"numbers of {name} differ from those of this machine by rounding, at most {largest:.0e} of their "
                             "size")


def _leaves(computed: Any, held: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of values with their place; a missing or an added key, or another kind, is a pair that cannot agree."""
    if isinstance(computed, dict) and isinstance(held, dict):
        for key in dict.fromkeys([*computed, *held]):
            yield from _leaves(computed.get(key, "nothing of that name"), held.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(computed, list) and isinstance(held, list) and len(computed) == len(held):
        for i, (a, b) in enumerate(zip(computed, held, strict=True)):
            yield from _leaves(a, b, f"{where}[{i}]")
    else:
        yield where, computed, held
