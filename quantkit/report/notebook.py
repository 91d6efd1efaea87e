"""A run as pandas DataFrames, for notebooks.

    import quantkit
    run = quantkit.load_run("my-run")
    run.tiers.plot.scatter("size_bytes", "kld_mean", logy=True)

    tiers   one row a file, the base first: the columns of retention.csv
    rows    one row a scored token and tier: tier, then the columns of `spec.records.ROW_DTYPE`
    pairs   one row a statistic and pair of tiers: the fields of `spec.verdict_records.PairVerdict`
    plan    one row a tensor and tier: tier, ftype, the fields of `spec.plan_records.PlanRow`, and its kind as the pictures have it
    slices  one row a slice and tier: tier, then kind, name, n_scored, share, kld_share, flip_share, kld, same_top_p with errors
    mtp     one row a tier: what its MTP head accepts
    Units: bytes, nats, fractions. A number that is not defined is missing (NaN, or None among texts), never 0. A frame of what was
    not measured has its columns and no row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from quantkit.job.parts import read_parquet
from quantkit.report.run_data import RunData, read_run
from quantkit.report.table import COLUMNS
from quantkit.spec.blocks import kind_of
from quantkit.spec.plan_records import PlanRow
from quantkit.spec.records import ROW_DTYPE, Estimate
from quantkit.spec.verdict_records import PairVerdict

DataFrame: TypeAlias = Any  # pandas.DataFrame: loaded where a frame is made, never on import

_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(PlanRow))
_PAIR_FIELDS = tuple(field.name for field in dataclasses.fields(PairVerdict))
_ESTIMATE_PARTS = ("value", "se", "lo", "hi")
_SLICE_FIELDS = ("kind", "name", "lo", "hi", "n_scored", "n_article", "share", "kld_share", "flip_share")
_MTP_FIELDS = ("tier", "status", "reason", "file", "head_type", "head_bytes", "n_draft", "n_drafted", "n_accepted",
               "acceptance_rate", "acceptance_rate_se", "mean_accepted_len", "teacher_forced_acceptance",
               "teacher_forced_acceptance_se", "problems")


def load_run(path: str | Path) -> Run:
    """The run in a folder, or the published bundle of one; its frames are made when they are asked for.

    Raises:
        InputError: no run there, or none with a measured tier.
    """
    return Run(read_run(Path(path)))


class Run:
    """One run. See the module for what the frames hold."""

    def __init__(self, data: RunData) -> None:
        self.data = data

    def __repr__(self) -> str:
        header = self.data.header
        return f"<Run of {header.base_file}: {', '.join(row.tier for row in self.data.tiers)}; result {header.result_id[:12]}>"

    @property
    def result_id(self) -> str:
        """Hash of everything that was measured."""
        return self.data.header.result_id

    @cached_property
    def tiers(self) -> DataFrame:
        """One row a file, the base first, then by size."""
        return _frame({name: [read(row) for row in self.data.rows] for name, read in COLUMNS.items()})

    @cached_property
    def rows(self) -> DataFrame:
        """One row a scored token and tier; the largest of the frames."""
        import pandas as pd

        frames = []
        for row in self.data.tiers:
            rows, _ = read_parquet(self.data.run.rows(row.tier))
            frames.append(pd.DataFrame({"tier": row.tier, **{name: rows[name] for name in ROW_DTYPE.names or ()}}))
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def pairs(self) -> DataFrame:
        """One row a statistic and pair of tiers; empty where no pair was tested."""
        verdicts = self.data.verdicts
        records = [dataclasses.asdict(pair) for c in (verdicts.comparisons if verdicts else ()) for pair in c.pairs]
        return _records(records, _PAIR_FIELDS)

    @cached_property
    def plan(self) -> DataFrame:
        """One row a tensor and tier, in the order of the file; none of a tier that came without a plan."""
        records = [{"tier": plan.tier, "ftype": plan.ftype, **dataclasses.asdict(row), "n_elements": row.n_elements,
                    "kind": kind_of(row.name, row.role)}
                   for tier in self.data.tiers if (plan := self.data.plans.get(tier.tier)) for row in plan.rows]
        return _records(records, ("tier", "ftype", *_PLAN_FIELDS, "n_elements", "kind"))

    @cached_property
    def slices(self) -> DataFrame:
        """One row a slice and tier."""
        records = [{"tier": one.tier, **{name: getattr(part, name) for name in _SLICE_FIELDS}, **_estimate("kld", part.kld),
                    **_estimate("same_top_p", part.same_top_p)} for one in self.data.slices for part in one.slices]
        return _records(records, ("tier", *_SLICE_FIELDS, *_estimate("kld", None), *_estimate("same_top_p", None)))

    @cached_property
    def mtp(self) -> DataFrame:
        """One row a tier whose MTP head was checked."""
        records = []
        for result in self.data.mtp:
            head, teacher = result.head, result.teacher_forced_acceptance
            own = {name: getattr(result, name) for name in _MTP_FIELDS if hasattr(result, name)}
            records.append({
                **own, "head_type": head.type if head else None, "head_bytes": head.block_bytes if head else None,
                "teacher_forced_acceptance": teacher.value if teacher else None,
                "teacher_forced_acceptance_se": teacher.se if teacher else None, "problems": "; ".join(result.problems)})
        return _records(records, _MTP_FIELDS)


def _estimate(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """`kld`, `kld_se`, `kld_lo`, `kld_hi`."""
    return {name if part == "value" else f"{name}_{part}": getattr(estimate, part, None) for part in _ESTIMATE_PARTS}


def _records(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> DataFrame:
    rows = list(records)
    return _frame({name: [row[name] for row in rows] for name in columns})


def _frame(columns: Mapping[str, list[Any]]) -> DataFrame:
    """A frame whose numbers are numbers: an undefined one is NaN, so that a column of them stays float64."""
    import pandas as pd

    made = {}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        is_float = bool(known) and len(known) < len(values) and all(type(value) in {int, float} for value in known)
        made[name] = pd.Series(values, dtype="float64" if is_float else None)
    return pd.DataFrame(made)
