"""What importances are worth: the same tiers with a collected matrix, with importances of ones, and without any.

usage: python benchmarks/imatrix_gain.py BASE.gguf [--protocol wikitext2-quick-v1] [--set KEY=VALUE] [--tiers Q3_K_M,IQ2_S]

A tier's types are the same in every arm. Types such as IQ2_S cannot be written without importances at all; for them the honest
comparison is importances of ones, which tell the quantizer that every column counts the same. "none" hands over nothing, and is
printed where the types allow it: K-quants then weigh columns by the weights' own squares. KLD in nats, with the standard error by
article. The texts are found as in `quantkit run`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantkit.core.errors import PlanError
from quantkit.job.ladder import audit_files
from quantkit.job.progress import Silent
from quantkit.job.rundir import read_json
from quantkit.job.standalone import collect_to_file, quantize_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import ImatrixEntry, read_imatrix, write_imatrix
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.records import TierSummary


def write_ones(matrix: Path, target: Path) -> Path:
    """A matrix of the same entries in which every column counts the same."""
    held = read_imatrix(matrix)
    entries = {name: ImatrixEntry(in_sum2=np.full_like(entry.in_sum2, 1000), counts=np.full_like(entry.counts, 1000))
               for name, entry in held.entries.items()}
    write_imatrix(target, replace(held, entries=entries))
    return target


def make_files(base: Path, protocol: Protocol, tiers: Sequence[str], folder: Path) -> list[Path]:
    """Every tier in every arm that can be written; the file's stem says which."""
    collect_to_file(base, protocol, folder / "collected.gguf", Silent())
    collected, ones = folder / "collected.gguf", folder / "ones.gguf"
    arms = {"collected": collected, "ones": write_ones(collected, ones), "none": None}
    made = []
    for tier in tiers:
        first: dict[str, str] = {}
        for arm, matrix in arms.items():
            target = folder / f"{tier}.{arm}.gguf"
            try:
                quantize_to_file(base, protocol, tier, target, Silent(), imatrix=matrix)
            except PlanError:
                continue  # types that cannot be written without importances
            types = {tensor.name: tensor.type.name for tensor in read_header(target).tensors}
            first = first or types
            if types == first:
                made.append(target)
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--protocol", default="wikitext2-quick-v1")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--tiers", default="Q3_K_M,IQ2_S")
    args = parser.parse_args()
    protocol = load_protocol(args.protocol, args.settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_files(args.base, protocol, args.tiers.split(","), folder)
        run = audit_files(args.base, protocol, folder / "run", files, Silent()).folder
        print(f"{args.base.name}, {protocol.name}, eval_id {protocol.eval_id[:12]}, imatrix_id {protocol.imatrix_id[:12]}\n")
        print("| tier | importances | KLD | ± | ln PPL ratio | ± | same top |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        for file in files:
            summary = TierSummary.from_json(read_json(run.summary(file.stem))["summary"])
            tier, arm = file.stem.rsplit(".", 1)
            numbers = (summary.kld.value, summary.kld.se, summary.ln_ppl_ratio.value, summary.ln_ppl_ratio.se)
            cells = [tier, arm, *("" if n is None else f"{n:.5f}" for n in numbers), f"{summary.same_top_p.value or 0:.2%}"]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
