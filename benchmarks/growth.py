"""Time of an audit as the work grows: over chunks, tiers, workers and vocabulary, one at a time from a middle case.

usage: python benchmarks/growth.py [--model tiny|smollm2|BASE.gguf] [--repeats 3] [--shared DIR] [--work DIR]

The middle case: 32 chunks of 512 (128 for the tiny model), two tiers, as many workers as cores. `fixed` is an audit of one chunk:
what starting, hashing and loading take. `per unit` is what remains after `fixed`, over chunks times models (base and tiers): it
would be the same in every row if time grew in proportion. Best of the repeats, since whatever disturbs only adds.
Vocabulary: scoring alone, on random logits, one core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from ladder import QUANTKIT, TIERS, parser_of, prepare, tier_files
from measured import Measured, run
from scoring import rate_of


class Case(NamedTuple):
    """What is varied."""

    n_chunk: int
    n_tier: int
    n_worker: int


def audit(args: argparse.Namespace, case: Case) -> Measured:
    """The quickest of some audits."""
    done = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            command = [*QUANTKIT, "audit", *tier_files(args)[:case.n_tier], "-b", args.base, "-p", "wikitext2-first16-v1",
                       "-o", Path(folder) / "run", "--corpus", args.text, "--workers", str(case.n_worker),
                       "--set", f"eval.n_chunk={case.n_chunk}"]
            done.append(run([command], Path(folder) / "log"))
    return min(done, key=lambda one: one.cpu_s)._replace(wall_s=min(one.wall_s for one in done))


def main() -> None:
    """One table for audits, one for vocabularies."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.job = "audit"
    prepare(args)
    cores = os.cpu_count() or 1
    middle = Case(128 if args.model == "tiny" else 32, 2, cores)
    cases = [*(middle._replace(n_chunk=middle.n_chunk * k // 4) for k in (1, 2, 4, 8)),
             *(middle._replace(n_tier=n) for n in (1, 4, len(TIERS))), middle._replace(n_worker=1)]
    print(f"{args.base.name}, chunks of 512, {cores} cores, best of {args.repeats}\n")
    print("| chunks | tiers | workers | wall s | CPU s | fixed CPU s | wall ms per unit | CPU ms per unit | peak MiB |")
    print("| -----: | ----: | ------: | -----: | ----: | ----------: | ---------------: | --------------: | -------: |")
    fixed: dict[tuple[int, int], Measured] = {}
    for case in cases:
        key = case.n_tier, case.n_worker
        if key not in fixed:
            fixed[key] = audit(args, case._replace(n_chunk=1))
        done, start = audit(args, case), fixed[key]
        units = (case.n_chunk - 1) * (case.n_tier + 1)
        wall_ms, cpu_ms = (1000 * (a - b) / units for a, b in zip(done[:2], start[:2], strict=True))
        print(f"| {case.n_chunk} | {case.n_tier} | {case.n_worker} | {done.wall_s:.2f} | {done.cpu_s:.2f} | {start.cpu_s:.2f} | "
              f"{wall_ms:.1f} | {cpu_ms:.1f} | {done.peak_bytes / 2**20:.0f} |", flush=True)
    print("\n| n_vocab | M float32 logits read a second, one core, base and two tiers |")
    print("| ------: | -----------------------------------------------------------: |")
    for n_vocab in (4096, 49_152, 151_936, 250_000):
        print(f"| {n_vocab} | {rate_of(n_vocab, 2) * 3 / 2:.0f} |", flush=True)


if __name__ == "__main__":
    main()
