"""How fast rows are scored: logits a second on one core, against plain float64, and the memory that it takes.

usage: python benchmarks/scoring.py [--vocab N ...] [--tiers N ...] [--seconds S]

`read` counts every float32 logit that is scored, the base's and the tiers'. `of tiers` counts the tiers' alone, while the base's
own pass stays in the time, so larger groups are faster. `plain` computes log-softmax of both rows in float64 with whole-row
temporaries; its rate is of the tiers' logits. `error` is the largest |kld − kld in 80-bit long double|.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from quantkit.measure.scoring import Logits, Scorer


def make_block(n_row: int, n_vocab: int, n_tier: int, seed: int = 0) -> tuple[Logits, npt.NDArray[np.int32], list[Logits]]:
    """Logits that look like a language model's: a broad bulk, and tiers a little off the base."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n_row, n_vocab), dtype=np.float32) * 3
    tiers = [base + rng.standard_normal((n_row, n_vocab), dtype=np.float32) * np.float32(0.05 * (i + 1)) for i in range(n_tier)]
    return base, rng.integers(0, n_vocab, n_row).astype(np.int32), tiers


def plain_kld(base: Logits, tiers: list[Logits], dtype: type[np.floating] = np.float64) -> list[npt.NDArray[np.floating]]:
    """KLD by the textbook, a log-softmax for every pair."""
    klds = []
    for tier in tiers:
        logs = []
        for logits in (base, tier):
            x = logits.astype(dtype)
            x = x - x.max(axis=1, keepdims=True)
            logs.append(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))
        klds.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1))
    return klds


def best_time_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest of as many runs as fit into the time, at least two."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that numpy had allocated at once during the work."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def rate_of(n_vocab: int, n_tier: int, seconds: float = 1.0) -> float:
    """Millions of the tiers' logits scored in a second."""
    base, targets, tiers = make_block(max(8, 2_000_000 // n_vocab), n_vocab, n_tier)
    return base.size * n_tier / best_time_s(lambda: Scorer().score(base, targets, tiers), seconds) / 1e6


def measure(n_vocab: int, n_tier: int, seconds: float) -> str:
    """One line of the table."""
    n_row = max(8, 2_000_000 // n_vocab)
    base, targets, tiers = make_block(n_row, n_vocab, n_tier)
    n_logits = n_row * n_vocab * n_tier

    def ours() -> object:
        return Scorer().score(base, targets, tiers)

    def plain() -> object:
        return plain_kld(base, tiers)

    exact = plain_kld(base[:2], [tier[:2] for tier in tiers], np.longdouble)
    got = Scorer().score(base[:2], targets[:2], [tier[:2] for tier in tiers]).tiers
    error = max(float(np.abs(a.kld - b).max()) for a, b in zip(got, exact, strict=True))
    rates = [n_logits / best_time_s(work, seconds) / 1e6 for work in (ours, plain)]
    peaks = [peak_bytes(work) / 2**20 for work in (ours, plain)]
    read = rates[0] * (n_tier + 1) / n_tier
    return (f"{n_vocab:>8} {n_tier:>5} {n_row:>5} {read:>6.0f} {rates[0]:>8.0f} {rates[1]:>6.0f} {peaks[0]:>8.1f} "
            f"{peaks[1]:>6.0f} {error:>8.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 49152, 151936, 250000])
    parser.add_argument("--tiers", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    print("millions of logits a second on one core")
    print(f"{'n_vocab':>8} {'tiers':>5} {'rows':>5} {'read':>6} {'of tiers':>8} {'plain':>6} {'peak MiB':>8} {'plain':>6} "
          f"{'error':>8}")
    for n_vocab in args.vocab:
        for n_tier in args.tiers:
            print(measure(n_vocab, n_tier, args.seconds), flush=True)


if __name__ == "__main__":
    main()
