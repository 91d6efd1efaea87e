"""The audit beside llama-perplexity's way: one pass for a base file of logits, then one pass per tier that reads it.

usage: python benchmarks/audit.py BASE.gguf TEXT Q.gguf [Q.gguf ...] [--n-chunk 16] [--pairs 3] [--llama-bin DIR]

Same files, chunks, threads and wait policy; the two ways alternate. Prints the median of each, and ratios pair by pair. Peak
memory is that of the largest single process; our workers are counted one by one, and so are llama.cpp's passes. Without
--llama-bin only our row is printed. TEXT is wiki.test.raw; the protocol is derived from wikitext2-first16-v1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from measured import Measured, measure


class Way(NamedTuple):
    """One way of doing the whole job once."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    written_bytes: int


def ours(args: argparse.Namespace, folder: Path) -> Way:
    """`quantkit audit` of all files, as a user starts it."""
    run = folder / "run"
    command = [sys.executable, "-m", "quantkit.cli.main", "audit", *args.tiers, "-b", args.base, "-p", "wikitext2-first16-v1",
               "-o", run, "--corpus", args.text, "--set", f"eval.n_chunk={args.n_chunk}"]
    done = check(measure(command, folder / "ours.log"), folder / "ours.log")
    written = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    return Way(done.wall_s, done.cpu_s, done.peak_bytes, written)


def llama(args: argparse.Namespace, folder: Path) -> Way:
    """llama-perplexity: --kl-divergence-base once, --kl-divergence per tier."""
    base_file = folder / "base.kld"
    common = [args.llama_bin / "llama-perplexity", "-f", args.text, "-c", "512", "--chunks", str(args.n_chunk), "-b", "512",
              "-t", str(os.cpu_count()), "--no-warmup"]
    passes = [[*common, "-m", args.base, "--kl-divergence-base", base_file]]
    passes += [[*common, "-m", tier, "--kl-divergence-base", base_file, "--kl-divergence"] for tier in args.tiers]
    done = [check(measure(command, folder / "llama.log"), folder / "llama.log") for command in passes]
    size = base_file.stat().st_size
    base_file.unlink()
    return Way(sum(d.wall_s for d in done), sum(d.cpu_s for d in done), max(d.peak_bytes for d in done), size)


def check(done: Measured, log: Path) -> Measured:
    """A benchmark of a failed command is none."""
    if done.exit_code != 0:
        sys.exit(f"expected exit code 0, got {done.exit_code}; the end of the log:\n{log.read_text(errors='replace')[-2000:]}")
    return done


def main() -> None:
    """Alternate the ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("tiers", type=Path, nargs="+")
    parser.add_argument("--n-chunk", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--llama-bin", type=Path)
    args = parser.parse_args()
    ways = {"quantkit": ours} | ({"llama-perplexity": llama} if args.llama_bin else {})
    results: dict[str, list[Way]] = {name: [] for name in ways}
    for i in range(args.pairs):
        for name in list(ways) if i % 2 == 0 else list(ways)[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(ways[name](args, Path(folder)))
    print(f"base and {len(args.tiers)} tiers, {args.n_chunk} chunks of 512, {os.cpu_count()} cores, median of {args.pairs}\n")
    print(f"{'way':18s} {'wall s':>8s} {'CPU s':>8s} {'peak MiB':>9s} {'written MiB':>12s}")
    for name, runs in results.items():
        middle = [statistics.median(values) for values in zip(*runs, strict=True)]
        print(f"{name:18s} {middle[0]:8.2f} {middle[1]:8.2f} {middle[2] / 2**20:9.0f} {middle[3] / 2**20:12.1f}")
    if args.llama_bin:
        pairs = list(zip(results["quantkit"], results["llama-perplexity"], strict=True))
        for i, what in enumerate(("wall", "CPU")):
            ratios = [a[i] / b[i] for a, b in pairs]
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{what} quantkit / llama-perplexity: {shown}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
