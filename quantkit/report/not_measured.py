"""What a report must not be taken for, and how its reader can check it."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from quantkit.report.escape import base_name
from quantkit.report.run_data import RunData


def not_measured(data: RunData) -> list[str]:
    """What this run does not tell, one sentence each."""
    header = data.header
    lines = ["Answers to questions, tool use, or any benchmark: the numbers compare the tiers with the base on "
             f"{header.corpus_name}.",
             f"Text longer than {header.n_ctx:,} tokens, other languages and other kinds of text than this one."]
    if header.n_article < 12:
        lines.append(f"What other articles would show, beyond a guess: there are {header.n_article}.")
    if data.verdicts is None:
        lines.append("Which tiers are told apart pair by pair: no paired tests were run.")
    if not data.floors:
        lines.append("How much of a KLD is arithmetic alone: no noise floor was measured.")
    if not data.slices:
        lines.append("Where in the text a tier differs: no slices were made.")
    if not data.mtp:
        lines.append("What an MTP head accepts on these tiers.")
    if not data.speeds:
        lines.append("How fast the tiers are: none was timed.")
    if data.base is None or not data.base.memory:
        lines.append("Memory: the header's numbers were not at hand.")
    lines.append(f"Other arithmetic than {header.backend} with llama.cpp {header.llama_commit}: on another backend the same files "
                 "have other numbers.")
    return lines


class Step(NamedTuple):
    """One thing to do, and the command that does it."""

    what: str
    command: str | None


def verify_steps(data: RunData) -> list[Step]:
    """How to check a report, the quickest first."""
    protocol = "protocol.toml" if data.header.derived else data.header.protocol_name
    base = shlex.quote(base_name(data.header.base_file))
    return [Step("Everything that is published, against its manifest and this result:",
                 f"quantkit verify RUN --id {data.header.result_id}"),
            Step("Files and numbers made again from the base:", f"quantkit verify RUN -b {base} --regenerate --remeasure 8"),
            Step("One file alone, whoever made it:", f"quantkit audit FILE.gguf -b {base} -p {shlex.quote(protocol)} -o CHECK")]
