"""What is computed from the rows of a whole table: verdicts between its tiers, and each tier's slices. Deterministic.

    audit/pairs.json           Verdicts; the family is all pairs, so it is made anew whenever a tier joins or leaves
    audit/tokens.json          the class of each token of the text, so that slices can be made again without a model
    audit/<tier>/slices.json   Slices

The rows are all that these depend on: whoever has the bundle can compute them again and compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quantkit.core.errors import InputError
from quantkit.core.files import sha256_file
from quantkit.core.stats import group_by
from quantkit.job.evaluation import Evaluation
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.refpack_pairs import compare_kld
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.measure.noise import compare_to_floors, mark_arithmetic
from quantkit.measure.slices import TOKEN_CLASSES, slice_rows
from quantkit.measure.verdict import PairStatistic, compare_pairs, letters
from quantkit.spec.json_records import record_from_json, record_to_json
from quantkit.spec.protocol import Protocol
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.verdict_records import Comparison, Floor, FloorVerdict, PairVerdict, Slices, Verdicts


def write_computed(run: RunFolder, protocol: Protocol, evaluation: Evaluation, tiers: Mapping[str, Any]) -> None:
    """Write verdicts and slices of all measured tiers of one text.

    Args:
        tiers: tier name to the record of its file, measured ones only.

    Raises:
        InputError: rows that cannot be read, or that are not of the same tokens and the same base.
    """
    if evaluation.token_classes:
        write_json(run.token_classes, _classes_to_json(evaluation))
    rows = {tier: read_parquet(run.rows(tier))[0] for tier in order_tiers(tiers)}
    for tier, own in rows.items():
        write_json(run.slices(tier), record_to_json(compute_slices(run, tier, own)))
    write_json(run.pairs, record_to_json(compute_verdicts(run, protocol, rows)))


def order_tiers(tiers: Mapping[str, Any]) -> list[str]:
    """Names by size, largest first, as in the table; of equal sizes by name and hash."""
    return sorted(tiers, key=lambda name: (-tiers[name]["size_bytes"], name, tiers[name]["sha256"]))


def compute_verdicts(run: RunFolder, protocol: Protocol, rows: Mapping[str, Rows]) -> Verdicts:
    """What the rows of a table say about its tiers.

    Args:
        rows: of all tiers, in the order of the table.

    Raises:
        InputError: rows that are not of the same tokens and the same base.
    """
    gate = protocol.gate
    margins: dict[PairStatistic, float] = {"kld": math.log1p(gate.equivalence_margin), "ln_ppl_ratio": gate.margins.ln_ppl_ratio,
                                           "same_top_p": gate.margins.same_top_p}
    n_looks = looks_of(run)
    floors = _floor_verdicts(run, protocol, rows)
    comparisons = []
    for statistic, margin in margins.items():
        if statistic == "kld":
            references = read_references(run, rows)
            pairs = _marked(compare_kld(rows, references, margin=margin, alpha=gate.alpha, n_looks=n_looks), rows, floors)
        else:
            pairs = compare_pairs(rows, statistic, margin=margin, alpha=gate.alpha, n_looks=n_looks)
        comparisons.append(Comparison(statistic=statistic, margin=margin, pairs=pairs, letters=letters(list(rows), pairs)))
    articles = group_by(next(iter(rows.values()))["article"])
    return Verdicts(
        tiers=tuple(rows), rows_sha256={tier: sha256_file(run.rows(tier)) for tier in rows}, n_article=articles.n_group,
        g_eff=articles.n_effective, alpha=gate.alpha, n_looks=n_looks, comparisons=tuple(comparisons),
        floor_factor=protocol.floors.factor, floors=floors)


def compute_slices(run: RunFolder, tier: str, rows: Rows) -> Slices:
    """Where a tier differs from base; by token too where the classes of the text's tokens are known."""
    return Slices(tier=tier, rows_sha256=sha256_file(run.rows(tier)), slices=slice_rows(rows, read_classes(run)))


def read_classes(run: RunFolder) -> dict[int, str] | None:
    """Token id to class, from the bundle; None where the text was never tokenized here."""
    held = read_json(run.token_classes)
    if held is None:
        return None
    try:
        return {int(i): name for name in TOKEN_CLASSES for i in held["classes"][name]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected token classes in {run.token_classes}, found something else ({error}): audit again") from error


def looks_of(run: RunFolder) -> int:
    """How many looks a screening of this run may take; 1 where it may not stop early."""
    held = read_json(run.screening)
    return int(held["n_looks"]) if isinstance(held, dict) else 1


def read_floor(run: RunFolder, name: str) -> Floor | None:
    """The noise floor of a tier, or of the base as `base`; None where it was not measured, or by another version."""
    try:
        return record_from_json(Floor, read_json(run.floor(name)))
    except (KeyError, TypeError):
        return None


def _classes_to_json(evaluation: Evaluation) -> dict[str, Any]:
    ids: dict[str, list[int]] = {name: [] for name in TOKEN_CLASSES}
    for i, name in sorted(evaluation.token_classes.items()):
        ids[name].append(i)
    return {"token_ids_sha256": evaluation.token_ids_sha256, "classes": ids}


def _floor_verdicts(run: RunFolder, protocol: Protocol, rows: Mapping[str, Rows]) -> tuple[FloorVerdict, ...]:
    """Each tier with a floor beside it, in the order of the table."""
    floors = {}
    for tier in rows:
        floor = read_floor(run, tier)
        if floor is not None:
            floors[tier] = {k.kernel: read_parquet(run.floor_rows(tier, k.kernel))[0] for k in floor.kernels}
    measured = {tier: rows[tier] for tier in floors}
    return compare_to_floors(measured, floors, factor=protocol.floors.factor, alpha=protocol.gate.alpha)


def _marked(pairs: tuple[PairVerdict, ...], rows: Mapping[str, Rows], floors: tuple[FloorVerdict, ...]) -> tuple[PairVerdict, ...]:
    floor = {verdict.tier: verdict.floor for verdict in floors}
    mean = {tier: float(np.mean(own["kld"])) for tier, own in rows.items()}
    return tuple(mark_arithmetic(pair, mean[pair.a], mean[pair.b], floor.get(pair.a), floor.get(pair.b)) for pair in pairs)


def read_references(run: RunFolder, tiers: Iterable[str]) -> dict[str, PackReference | None]:
    """The reference pack of each tier, None where it was measured against base itself.

    Raises:
        KeyError, TypeError: a summary's words about it cannot be read.
    """
    held = {tier: read_json(run.summary(tier)) or {} for tier in tiers}
    return {tier: PackReference.from_json(summary["ref"]) if "ref" in summary else None for tier, summary in held.items()}
