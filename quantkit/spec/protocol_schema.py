"""A protocol: everything that can change a published number, in one file. Schema 1.

The records mirror the TOML key by key. Equal parts have equal ids, whatever the protocols are called:

    eval_id       evaluation, with its texts by content: rows may be compared when eval_id, base hash and token hash agree;
                  of a screening also when it stops
    plan_id       ladder, rules and tiers
    imatrix_id    calibration, with its text by content
    mtp_id        the check of the MTP head, with its text by content
    protocol_id   the four, and floors, sequential, search, gate, refpack

An id is the sha256 of the canonical JSON of its part. Names and titles are in no id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.core.files import sha256_json
from quantkit.spec.protocol_parts import (
    Corpus,
    EvalSpec,
    FloorSpec,
    GateSpec,
    ImatrixSpec,
    MtpSpec,
    PlanSpec,
    RefpackSpec,
    SearchSpec,
    SequentialSpec,
    by_name,
)
from quantkit.spec.protocol_values import Word

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A whole protocol. `derived` holds the settings that made it from another one; it is empty in a published one."""

    schema: Literal[1]
    name: Word
    title: str
    derived: tuple[str, ...]
    corpora: tuple[Corpus, ...]
    eval: EvalSpec
    floors: FloorSpec
    sequential: SequentialSpec
    imatrix: ImatrixSpec
    plan: PlanSpec
    mtp: MtpSpec
    search: SearchSpec
    gate: GateSpec
    refpack: RefpackSpec

    def corpus(self, name: str) -> Corpus:
        """The text of that name.

        Raises:
            ProtocolError: there is none; lists those there are.
        """
        return by_name(self.corpora, name, "corpora")

    @property
    def until(self) -> str | None:
        """When a screening stops, such as `kld_rse=0.02`; None of a protocol that measures all its chunks."""
        return next((mark.removeprefix("until=") for mark in self.derived if mark.startswith("until=")), None)

    @property
    def eval_id(self) -> str:
        """Of the evaluation and its texts: rows of equal eval_id, base hash and token hash may be compared."""
        texts = [self.corpus(name).content() for name in self.eval.corpora]
        screening = {} if self.until is None else {"until": self.until}
        return _part_id("eval", {**dataclasses.asdict(self.eval), "corpora": texts, **screening})

    @property
    def plan_id(self) -> str:
        """Of the ladder."""
        return _part_id("plan", dataclasses.asdict(self.plan))

    @property
    def imatrix_id(self) -> str:
        """Of the calibration and its text."""
        return _part_id("imatrix", {**dataclasses.asdict(self.imatrix), "corpus": self.corpus(self.imatrix.corpus).content()})

    @property
    def mtp_id(self) -> str:
        """Of the check of the MTP head and its text."""
        return _part_id("mtp", {**dataclasses.asdict(self.mtp), "corpus": self.corpus(self.mtp.corpus).content()})

    @property
    def protocol_id(self) -> str:
        """Of the four ids and the parts that have none."""
        second = self.search.second_corpus
        return _part_id("protocol", {
            "eval_id": self.eval_id, "plan_id": self.plan_id, "imatrix_id": self.imatrix_id, "mtp_id": self.mtp_id,
            "floors": dataclasses.asdict(self.floors),
            "sequential": dataclasses.asdict(self.sequential),
            "search": {**dataclasses.asdict(self.search), "second_corpus": self.corpus(second).content() if second else None},
            "gate": dataclasses.asdict(self.gate),
            "refpack": dataclasses.asdict(self.refpack),
        })

    def ids(self) -> dict[str, str]:
        """All five, by name, in the order of `protocols/LOCK`."""
        return {"protocol_id": self.protocol_id, "eval_id": self.eval_id, "plan_id": self.plan_id,
                "imatrix_id": self.imatrix_id, "mtp_id": self.mtp_id}


def _part_id(part: str, content: Mapping[str, Any]) -> str:
    return sha256_json({"schema": SCHEMA, "part": part, **content})
