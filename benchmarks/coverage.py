"""What the published intervals really cover: texts are drawn again and again, and it is counted how often the truth is inside.

usage: python benchmarks/coverage.py [RUN ...] [--rows FOLDER] [--shared FOLDER] [--smollm2 BF16.gguf] [--draws 4000] [--seed 1]

Every RUN is a run directory; its articles are drawn with replacement, so that the numbers of its own text are the truth. Without
any, the test model and its four stock tiers are audited over the whole of WikiText-2's test split (some minutes), into --rows,
where a second start finds them. --smollm2 adds a second model: four tiers of it over 128 spread chunks. Two synthetic sources
follow, whose articles are new in every draw: with the correlations of a language model's rows, and with twice as much; and two
whose articles have heavy tails, on both sides or of hard ones.

Cells are percent over all tiers of the source, worst tier in
parentheses; the nominal level is 95 %. `iid` and `chunk` are what treating tokens, or chunks, as independent would have covered.
Redrawing chunks instead of articles would pass those two: it makes the dependence go away that breaks them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from coverage_counts import check, coverage, false_verdicts, stopped_coverage
from coverage_draws import DESIGNS, LOOKS, NOT_PUBLISHED, Cells, Key, collect
from redraw import Source, Spread, real_source, rows_of_run, synthetic_source

from quantkit.job.session import RunResult

# Printing.


def table(cells: Cells) -> Iterator[str]:
    """The counts as markdown, a line a number and a column a design."""
    lines = list(dict.fromkeys(key.line for key in cells))
    yield "| Interval of | " + " | ".join(DESIGNS) + " |"
    yield "| :--- | " + " | ".join(["---:"] * len(DESIGNS)) + " |"
    for line in sorted(lines, key=lambda line: (line.startswith("pair"), "quantile" in line)):
        yield f"| {line} | " + " | ".join(str(cells[Key(line, d)]) if Key(line, d) in cells else "" for d in DESIGNS) + " |"


def outside(cells: Cells) -> list[str]:
    """Published intervals of a tier or a pair whose coverage is not what it should be."""
    return [f"{key.line}, {key.design}: {found}" for key, cell in cells.items()
            if not key.line.startswith("kld, ") and not key.line.endswith(NOT_PUBLISHED) for found in cell.outside()]


def report(source: Source, n_draw: int, seed: int, n_tier: int) -> list[str]:
    """Everything about one source, printed; returns the published intervals that miss 93 to 97 %."""
    check(source, seed)
    print(f"\n## {source.name}\n")
    drawn, cells = collect(source, n_draw, seed)
    print("\n".join(table(coverage(source, drawn, cells))), flush=True)
    wrong = false_verdicts(source, drawn)
    print(f"\nEqual tiers, any of {n_tier * (n_tier - 1) // 2} pair(s) told apart: "
          + ", ".join(f"{name} {share:.1%}" for name, share in wrong.apart.items())
          + f"; with looks at {', '.join(map(str, LOOKS))} and all: {wrong.with_looks:.1%}. "
          f"A difference of exactly the margin called equivalent (all): {sum(wrong.equivalent) / len(wrong.equivalent):.1%} "
          f"({max(wrong.equivalent):.1%}).")
    target = 0.03
    print(f"Stopped at se/kld < {target}: "
          + ", ".join(f"{level:.0%} intervals cover {cell}" for level, cell in stopped_coverage(source, drawn, target).items())
          + ".", flush=True)
    return [f"{source.name}: {cell}" for cell in outside(cells)]


# Where rows come from.


def measured_rows(folder: Path, base: Path, tiers: Sequence[Path]) -> Path:
    """A run directory with the audit of some files over the whole text; one that is there is resumed."""
    from quantkit.job.ladder import audit_files
    from quantkit.job.progress import Silent
    from quantkit.spec.protocol import load_protocol

    return finished(audit_files(base, load_protocol("wikitext2-stock-v1"), folder, tiers, Silent()))


def ladder_rows(folder: Path, base: Path) -> Path:
    """A run directory with four stock tiers of a model over 128 spread chunks; one that is there is resumed."""
    from quantkit.job.ladder import run_ladder
    from quantkit.job.progress import Silent
    from quantkit.spec.protocol import load_protocol

    settings = ("eval.chunks=spread", "eval.n_chunk=128", "imatrix.corpus=calibration.txt", "imatrix.n_chunk=16")
    protocol = load_protocol("wikitext2-stock-v1", settings)
    return finished(run_ladder(base, protocol, folder, ["Q8_0", "Q4_K_M", "Q3_K_M", "IQ2_S"], Silent()))


def finished(result: RunResult) -> Path:
    """The run's folder; a benchmark of a run without its rows is none. What else failed (a smoke test) moves no row."""
    missing = [tier for tier in result.failed if not result.folder.rows(tier).exists()]
    if missing:
        sys.exit("\n".join(f"{tier}: {result.failed[tier]}" for tier in missing))
    return result.folder.path


def main() -> None:
    """Draw, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--rows", type=Path, default=Path("coverage-rows"))
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("QUANTKIT_SHARED", "../shared")))
    parser.add_argument("--smollm2", type=Path, metavar="BF16.gguf")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    runs = list(args.runs)
    if not runs:
        os.environ.setdefault("QUANTKIT_CORPUS_DIR", str(args.shared / "corpus"))
        oracle = sorted((args.shared / "oracle").glob("stock-*.gguf"))
        runs.append(measured_rows(args.rows / "tiny", args.shared / "models" / "tiny-qwen35-mtp-BF16.gguf", oracle))
        if args.smollm2:
            runs.append(ladder_rows(args.rows / "smollm2", args.smollm2))
    sources = [(real_source(run.name, rows), len(rows)) for run in runs for rows in [rows_of_run(run)]]
    sources += [(synthetic_source("synthetic, correlated as measured", Spread(0.15, 0.12, 0.3)), 2),
                (synthetic_source("synthetic, twice as much", Spread(0.3, 0.24, 0.5)), 2),
                (synthetic_source("synthetic, tails on both sides", Spread(0.2, 0.12, 0.3, "laplace")), 2),
                (synthetic_source("synthetic, a tail of hard articles", Spread(0.2, 0.12, 0.3, "exponential")), 2)]
    print(f"{args.draws} draws, Monte Carlo error of one tier's cell {100 * (0.95 * 0.05 / args.draws) ** 0.5:.1f} points; "
          f"cells: mean over tiers (worst tier) -share of draws without an interval")
    missed = [line for source, n_tier in sources for line in report(source, args.draws, args.seed, n_tier)]
    print("\nPublished intervals that cover less than 93 or more than 97 %:\n" + ("\n".join(missed) or "none"))


if __name__ == "__main__":
    main()
