"""Collecting an importance matrix beside llama-imatrix: wall time, CPU time, peak memory.

usage: python benchmarks/imatrix.py BASE.gguf CALIBRATION.txt [--n-chunk 64] [--pairs 3] [--llama-bin DIR]

Same file, chunks of 512, threads and wait policy; the ways alternate. llama-imatrix runs with `--no-ppl -b 512`, which is its
fastest. `same matrices` leaves out what it leaves out, the output matrix and the MTP block; `complete` is what quantkit collects
by itself. Peak memory is that of all processes together, pages that they share counted once (PSS, sampled). Without --llama-bin
only our rows are printed. CALIBRATION.txt is the text of wikitext2-quick-v1, from which the protocol is derived.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from measured import Measured, measure

_SAMPLE_S = 0.05

Way = Callable[[argparse.Namespace, Path], Measured]


def complete(args: argparse.Namespace, folder: Path, *settings: str) -> Measured:
    """`quantkit imatrix`, as a user starts it."""
    options = [part for setting in (f"imatrix.n_chunk={args.n_chunk}", *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "quantkit.cli.main", "imatrix", "-b", args.base, "-p", "wikitext2-quick-v1", *options,
               "-o", folder / "ours.gguf", "--calibration", args.text]
    return run(command, folder / "log")


def same_matrices(args: argparse.Namespace, folder: Path) -> Measured:
    """The same, without what llama-imatrix does not collect."""
    return complete(args, folder, "imatrix.output=false", "imatrix.mtp=false")


def llama(args: argparse.Namespace, folder: Path) -> Measured:
    """llama-imatrix."""
    command = [args.llama_bin / "llama-imatrix", "-m", args.base, "-f", args.text, "-o", folder / "theirs.gguf", "-c", "512",
               "-b", "512", "-ub", "512", "--chunks", str(args.n_chunk), "-t", str(os.cpu_count()), "--no-ppl"]
    return run(command, folder / "log")


def run(command: Sequence[str | Path], log: Path) -> Measured:
    """Run a command; its peak memory is that of its processes together. A benchmark of a failed command is none."""
    ended, peak = threading.Event(), [0]

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            peak[0] = max(peak[0], sum(map(pss_bytes, descendants(os.getpid()))))

    sampler = threading.Thread(target=sample)
    sampler.start()
    done = measure(command, log)
    ended.set()
    sampler.join()
    done = done._replace(peak_bytes=peak[0] or done.peak_bytes)
    if done.exit_code != 0:
        sys.exit(f"expected exit code 0, got {done.exit_code}; the end of the log:\n{log.read_text(errors='replace')[-2000:]}")
    return done


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue  # gone since
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


def pss_bytes(pid: int) -> int:
    """The memory of a process, its share of what it has in common with others."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main() -> None:
    """Alternate the ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--n-chunk", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--llama-bin", type=Path)
    args = parser.parse_args()
    ways: dict[str, Way] = {"complete": complete, "same matrices": same_matrices}
    if args.llama_bin:
        ways["llama-imatrix"] = llama
    results: dict[str, list[Measured]] = {name: [] for name in ways}
    for i in range(args.pairs):
        for name in list(ways) if i % 2 == 0 else list(ways)[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(ways[name](args, Path(folder)))
    print(f"{args.base.name}, {args.n_chunk} chunks of 512, {os.cpu_count()} cores, median (best) of {args.pairs}\n")
    print(f"{'way':15s} {'wall s':>16s} {'CPU s':>16s} {'peak MiB':>9s}")
    for name, runs in results.items():
        walls, cpus = [run.wall_s for run in runs], [run.cpu_s for run in runs]
        print(f"{name:15s} {statistics.median(walls):8.2f} ({min(walls):.2f}) {statistics.median(cpus):8.2f} ({min(cpus):.2f})"
              f" {max(run.peak_bytes for run in runs) / 2**20:9.0f}")
    for name in ("complete", "same matrices") if args.llama_bin else ():
        pairs = list(zip(results[name], results["llama-imatrix"], strict=True))
        for what, of in (("wall", "wall_s"), ("CPU", "cpu_s")):
            ratios = [getattr(a, of) / getattr(b, of) for a, b in pairs]
            print(f"{what} {name} / llama-imatrix: {' '.join(f'{r:.2f}' for r in ratios)}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
