"""Several runs on one base: whether their rows may stand side by side, and the paired tests between all of their files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.core.errors import InputError
from quantkit.core.stats import group_by
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.refpack_pairs import compare_kld
from quantkit.measure.verdict import PairStatistic, compare_pairs, letters
from quantkit.spec.protocol import Protocol
from quantkit.spec.refpack_records import PackReference
from quantkit.spec.verdict_records import Comparison, Verdicts


def check_comparable(runs: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse runs whose rows are not of the same base, tokens and evaluation.

    Args:
        runs: name of a run to what must agree, by its name for people.

    Raises:
        InputError: names everything that differs, and in which runs.
    """
    names = list(runs)
    faults = []
    for what in runs[names[0]]:
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(runs[name][what], []).append(name)
        if len(found) > 1:
            told = "; ".join(f"{value[:16]} in {', '.join(members)}" for value, members in found.items())
            faults.append(f"{what}: {told}")
    if faults:
        raise InputError("expected runs of one base, one text and one evaluation, got other values of " + " / ".join(faults)
                         + ": only rows over the same tokens against the same base can stand on one table; audit the files again "
                           "under one protocol")


def compare_files(rows: Mapping[str, Path], protocol: Protocol, references: Mapping[str, PackReference | None]) -> Verdicts:
    """Paired tests between all files of a table, whoever made them; the family is all pairs.

    Args:
        rows: name of a file to its rows, in the order of the table.
        protocol: whose margins and α hold.
        references: the reference pack that a file was measured against; None where it was base itself.

    Raises:
        InputError: rows of other tokens.
    """
    read: dict[str, Rows] = {name: read_parquet(path)[0] for name, path in rows.items()}
    gate = protocol.gate
    margins: Sequence[tuple[PairStatistic, float]] = (("kld", math.log1p(gate.equivalence_margin)),
                                                      ("ln_ppl_ratio", gate.margins.ln_ppl_ratio),
                                                      ("same_top_p", gate.margins.same_top_p))
    comparisons = []
    for statistic, margin in margins:
        pairs = (compare_kld(read, references, margin=margin, alpha=gate.alpha) if statistic == "kld"
                 else compare_pairs(read, statistic, margin=margin, alpha=gate.alpha))
        comparisons.append(Comparison(statistic=statistic, margin=margin, pairs=pairs, letters=letters(list(read), pairs)))
    articles = group_by(next(iter(read.values()))["article"])
    return Verdicts(tiers=tuple(read), rows_sha256={}, n_article=articles.n_group, g_eff=articles.n_effective, alpha=gate.alpha,
                    n_looks=1, comparisons=tuple(comparisons), floor_factor=protocol.floors.factor, floors=())
