"""What the published intervals really cover: texts are drawn again and again, and it is counted how often the truth is inside.

usage: python benchmarks/coverage.py [RUN ...] [--rows FOLDER] [--shared FOLDER] [--smollm2 BF16.gguf] [--draws 2000] [--seed 1]

Every RUN is a run directory; its articles are drawn with replacement, so that the numbers of its own text are the truth. Without
any, the test model and its four stock tiers are audited over the whole of WikiText-2's test split (some minutes), into --rows,
where a second start finds them. --smollm2 adds a second model: four tiers of it over 128 spread chunks. Two synthetic sources
follow, whose articles are new in every draw: with the correlations of a language model's rows, and with twice as much.

Intervals come from the functions that summaries and verdicts call. Cells are percent over all tiers of the source, worst tier in
parentheses; the nominal level is 95 %. `iid` and `chunk` are what treating tokens, or chunks, as independent would have covered.
Redrawing chunks instead of articles would pass those two: it makes the dependence go away that breaks them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from redraw import KLD_LEVELS, MEANS, Source, Spread, Text, design_chunks, real_source, rows_of_run, synthetic_source

from quantkit.core.stats import Floats, Groups, group_by, quantile_limits, student_quantile
from quantkit.job.session import RunResult
from quantkit.measure.articles import screening_order
from quantkit.measure.numbers import STATISTICS
from quantkit.measure.summary import estimate_mean, too_few
from quantkit.measure.verdict import PairStatistic, compare_means

DESIGNS = (("all", 0), ("spread", 200), ("spread", 64), ("spread", 32), ("spread", 16), ("spread", 8),
           ("first", 200), ("first", 64), ("first", 16))
QUANTILE_DESIGNS = (("all", 0), ("spread", 64), ("spread", 16))
PAIR_STATISTICS: tuple[PairStatistic, ...] = ("kld", "ln_ppl_ratio", "same_top_p")
MARGIN = float(np.log(1.05))
LOOKS = (32, 64, 128, 256)
_NOT_PUBLISHED = " (not published)"


class Cell:
    """Counts of one number under one design, by tier or pair: how often the truth was inside, and in how many draws."""

    def __init__(self) -> None:
        self.inside: dict[str, int] = defaultdict(int)
        self.tried: dict[str, int] = defaultdict(int)
        self.n_none = 0

    def add(self, name: str, truth: float, lo: float | None, hi: float | None) -> None:
        """Count one interval; one that is not there counts apart."""
        if lo is None or hi is None:
            self.n_none += 1
            return
        self.tried[name] += 1
        self.inside[name] += lo <= truth <= hi

    def shares(self) -> list[float]:
        """Coverage of each tier or pair with 100 intervals at least, percent."""
        return [100 * self.inside[name] / n for name, n in self.tried.items() if n >= 100]

    def __str__(self) -> str:
        shares = self.shares()
        if not shares:
            return "none"
        worst = max(shares, key=lambda share: abs(share - 95))
        n_tried = sum(self.tried.values())
        missing = f" -{self.n_none / (self.n_none + n_tried):.0%}" if self.n_none else ""
        return f"{np.mean(shares):.1f} ({worst:.1f}){missing}"


class Key(NamedTuple):
    """A line and a column of a table."""

    line: str
    design: str


Cells = dict[Key, Cell]


def count_means(cells: Cells, source: Source, text: Text, design: str) -> None:
    """Intervals of one drawn text under one design: means by article, and kld by iid and by chunk as others do it."""
    articles, chunks = group_by(text.articles), group_by(np.arange(len(text.chunks)))
    for name, tier in text.tiers.items():
        truth = source.truths[name].numbers
        for statistic in MEANS:
            got = estimate_mean(tier.means[statistic][text.chunks], STATISTICS[statistic], chunks, articles)
            cells[Key(statistic, design)].add(name, truth[statistic], got.lo, got.hi)
            if statistic == "kld" and got.value is not None:
                n = text.n_scored * len(text.chunks)
                iid = float(np.sqrt((tier.squares["kld"][text.chunks].mean() - got.value**2) / (n - 1)))
                for line, se in (("kld, iid", iid), ("kld, chunk", got.se_chunk)):
                    reach = None if se is None else student_quantile(0.975, 1e9) * se
                    ends = (None, None) if reach is None else (got.value - reach, got.value + reach)
                    cells[Key(line, design)].add(name, truth["kld"], *ends)
    for a, b in combinations(text.tiers, 2):
        for statistic in PAIR_STATISTICS:
            observed = observe({name: text.tiers[name].means[statistic][text.chunks] for name in (a, b)}, statistic)
            verdict = compare_means(observed, statistic, articles, margin=MARGIN)[0]
            x, y = (source.truths[name].numbers[statistic] for name in (a, b))
            true = float(np.log(x / y)) if statistic == "kld" else x - y
            cells[Key(f"pair: {statistic}", design)].add(f"{a} {b}", true, verdict.lo, verdict.hi)


def observe(means: dict[str, Floats], statistic: PairStatistic) -> dict[str, Floats]:
    """What verdicts compare: agreement instead of flips."""
    return {name: 1 - x for name, x in means.items()} if statistic == "same_top_p" else means


def count_quantiles(cells: Cells, source: Source, text: Text, design: str) -> None:
    """Woodruff's limits of one drawn text under one design."""
    articles = group_by(text.articles)
    if too_few(articles) is not None:
        return
    t = student_quantile(0.975, max(1.0, articles.n_effective_whole - 1))
    for name, tier in text.tiers.items():
        truth = source.truths[name].quantiles
        for kind, ranked in tier.tokens.items():
            levels = [q for own, q in truth if own == kind]
            for q, (lo, hi) in zip(levels, ranked.limits(text.chunks, articles, levels, t), strict=True):
                line = f"{kind} quantile {q:g}" + ("" if 0.01 <= q <= 0.99 else _NOT_PUBLISHED)
                cells[Key(line, design)].add(name, truth[kind, q], lo, hi)


def check_quantiles(source: Source, seed: int) -> None:
    """The benchmark's way to a quantile's limits must be the published one."""
    text = source.draw(np.random.default_rng(seed))
    text = text.take(np.arange(0, len(text.chunks), 4))
    tokens = np.repeat(text.articles, text.n_scored)
    for tier in text.tiers.values():
        for kind, ranked in tier.tokens.items():
            quick = ranked.limits(text.chunks, group_by(text.articles), KLD_LEVELS, 2.1)
            for q, ends in zip(KLD_LEVELS, quick, strict=True):
                slow = quantile_limits(ranked.tokens[text.chunks].reshape(-1), q, group_by(tokens), 2.1)
                for mine, published in zip(ends, slow[:2], strict=True):
                    assert mine == published or (mine and published and abs(mine / published - 1) < 1e-9), (kind, q, ends, slow)


def coverage(source: Source, n_draw: int, seed: int) -> Cells:
    """All counts of one source."""
    cells: Cells = defaultdict(Cell)
    rng = np.random.default_rng(seed)
    for _ in range(n_draw):
        text = source.draw(rng)
        for rule, n in DESIGNS:
            chunks = design_chunks(rule, n, len(text.chunks))
            if chunks is None:
                continue
            part = text.take(chunks)
            design = f"{rule} {n}" if n else rule
            count_means(cells, source, part, design)
            if (rule, n) in QUANTILE_DESIGNS:
                count_quantiles(cells, source, part, design)
    return cells


# False verdicts, and looks.


def equal_tiers(source: Source, text: Text, factor: float = 1.0) -> dict[str, Floats]:
    """Chunk means of kld, each tier's scaled to one truth: every pair is equal in the long run, its dependence is as it was.

    Every second tier is further scaled by `factor`.
    """
    return {name: tier.means["kld"][text.chunks] / source.truths[name].numbers["kld"] * (factor if i % 2 else 1.0)
            for i, (name, tier) in enumerate(text.tiers.items())}


def is_told_apart(observed: dict[str, Floats], articles: Groups, n_looks: int = 1) -> bool:
    """Whether any pair of the family gets "better" or "worse"."""
    verdicts = compare_means(observed, "kld", articles, margin=MARGIN, n_looks=n_looks)
    return any(verdict.verdict.startswith(("better", "worse")) for verdict in verdicts)


class FalseVerdicts(NamedTuple):
    """Shares of texts, 0 to 1: any pair of equal tiers told apart; with looks; tiers at the margin called equivalent."""

    apart: dict[str, float]
    with_looks: float
    equivalent: float


def false_verdicts(source: Source, n_draw: int, seed: int) -> FalseVerdicts:
    """How often a table of equal tiers is wrong about any pair."""
    rng = np.random.default_rng(seed)
    apart: dict[str, int] = defaultdict(int)
    n_looked = n_equal = 0
    for i in range(n_draw):
        text = source.draw(rng)
        for rule, n in (("all", 0), ("spread", 64), ("spread", 16)):
            chunks = design_chunks(rule, n, len(text.chunks))
            if chunks is not None:
                part = text.take(chunks)
                apart[f"{rule} {n}" if n else rule] += is_told_apart(equal_tiers(source, part), group_by(part.articles))
        looks = parts_of_looks(text, seed=i)
        n_looked += any(is_told_apart(equal_tiers(source, part), group_by(part.articles), len(looks)) for part in looks)
        two = dict(list(equal_tiers(source, text, factor=1.05).items())[:2])
        n_equal += "equivalent" in compare_means(two, "kld", group_by(text.articles), margin=MARGIN)[0].verdict
    return FalseVerdicts({name: n / n_draw for name, n in apart.items()}, n_looked / n_draw, n_equal / n_draw)


def parts_of_looks(text: Text, seed: int) -> list[Text]:
    """What a screening sees at each look, all chunks at the last."""
    order = screening_order(len(text.chunks), seed)
    return [text.take(np.sort(order[:n])) for n in (*(n for n in LOOKS if n < len(order)), len(order))]


def stopped_coverage(source: Source, target: float, n_draw: int, seed: int) -> tuple[dict[float, Cell], float]:
    """Coverage of kld where each tier stops at the first look with se / value below a target, by level; mean share of chunks."""
    rng = np.random.default_rng(seed)
    cells: dict[float, Cell] = {0.95: Cell(), 0.97: Cell()}
    shares = []
    for i in range(n_draw):
        text = source.draw(rng)
        looks = parts_of_looks(text, seed=i)
        for name, tier in text.tiers.items():
            for part in looks:
                x, articles = tier.means["kld"][part.chunks], group_by(part.articles)
                got = estimate_mean(x, STATISTICS["kld"], group_by(part.chunks), articles)
                if part is looks[-1] or (got.se is not None and got.value and got.se / got.value < target):
                    break
            shares.append(len(part.chunks) / len(text.chunks))
            for level, cell in cells.items():
                got = estimate_mean(x, STATISTICS["kld"], group_by(part.chunks), articles, level)
                cell.add(name, source.truths[name].numbers["kld"], got.lo, got.hi)
    return cells, float(np.mean(shares))


# Printing.


def table(cells: Cells) -> Iterator[str]:
    """The counts as markdown, a line a number and a column a design."""
    designs = [f"{rule} {n}" if n else rule for rule, n in DESIGNS]
    lines = list(dict.fromkeys(key.line for key in cells))
    yield "| Interval of | " + " | ".join(designs) + " |"
    yield "| :--- | " + " | ".join(["---:"] * len(designs)) + " |"
    for line in sorted(lines, key=lambda line: (line.startswith("pair"), "quantile" in line)):
        yield f"| {line} | " + " | ".join(str(cells[Key(line, d)]) if Key(line, d) in cells else "" for d in designs) + " |"


def outside(cells: Cells, low: float = 93.0, high: float = 97.0) -> list[str]:
    """Published intervals whose coverage, the mean over tiers, is not what it should be."""
    found = []
    for key, cell in cells.items():
        shares = cell.shares()
        is_published = not key.line.startswith("kld, ") and not key.line.endswith(_NOT_PUBLISHED)
        if shares and is_published and not low <= float(np.mean(shares)) <= high:
            found.append(f"{key.line}, {key.design}: {np.mean(shares):.1f}")
    return found


def report(source: Source, n_draw: int, seed: int, n_tier: int) -> list[str]:
    """Everything about one source, printed; returns the published intervals that miss 93 to 97 %."""
    check_quantiles(source, seed)
    print(f"\n## {source.name}\n")
    cells = coverage(source, n_draw, seed)
    print("\n".join(table(cells)), flush=True)
    wrong = false_verdicts(source, n_draw, seed + 1)
    n_pair = n_tier * (n_tier - 1) // 2
    print(f"\nEqual tiers, any of {n_pair} pair(s) told apart: "
          + ", ".join(f"{name} {share:.1%}" for name, share in wrong.apart.items())
          + f"; with looks at {', '.join(map(str, LOOKS))} and all: {wrong.with_looks:.1%}. "
          f"A difference of exactly the margin called equivalent (all): {wrong.equivalent:.1%}.")
    target = 0.03
    stopped, share = stopped_coverage(source, target, n_draw, seed + 2)
    print(f"Stopped at se/kld < {target}, after {share:.0%} of the chunks on average: "
          + ", ".join(f"{level:.0%} intervals cover {cell}" for level, cell in stopped.items()) + ".", flush=True)
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
    parser.add_argument("--draws", type=int, default=2000)
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
                (synthetic_source("synthetic, twice as much", Spread(0.3, 0.24, 0.5)), 2)]
    print(f"{args.draws} draws, Monte Carlo error of one tier's cell {100 * (0.95 * 0.05 / args.draws) ** 0.5:.1f} points; "
          f"cells: mean over tiers (worst tier) -share of draws without an interval")
    missed = [line for source, n_tier in sources for line in report(source, args.draws, args.seed, n_tier)]
    print("\nPublished intervals whose coverage is outside of 93 to 97 %: " + ("; ".join(missed) or "none"))


if __name__ == "__main__":
    main()
