"""Sizes of reference packs and what they lose: bytes a row beside llama-perplexity's base file, KLD beside the whole one.

usage: python benchmarks/refpack.py model BASE.gguf TEXT Q.gguf [Q.gguf ...] [--n-chunk 4] [--mass M ...] [--sharpen NATS]
       python benchmarks/refpack.py synthetic [--n-vocab 248320] [--entropy 1.7] [--rows 512] [--mass M ...]

`model` decodes spread chunks of 512 tokens in this process. --sharpen multiplies all logits by one factor, found so that base's
mean entropy becomes what is asked for: distributions of a small model, as sharp as a large one's. `synthetic` draws rows of base in
random order of tokens, shaped as SmolLM2-135M's are: ln p = −a·(ln rank + 2.5·rank/n_vocab), the first token's with normal noise of
2.4 nats (rows differ in how sure they are, not in how the rest falls off), a as the mean entropy wants it. Its tiers are base with
noise that is twice as strong, in variance, ten nats down.

    ids, tail     mean tokens a row that are kept, and mean probability of the others
    bytes         of heads, whole rows (every 64th) and numbers, a row; 1/2V and 1/4V: beside 2 and 4 bytes a logit
    own           largest |KLD| of base against its own pack
    short         (whole KLD − pack's) / whole KLD, over all rows; est: what the rows kept whole say of it, with its error
    weights       error of the pack's KLD from the rounding of weights, as a share of the whole KLD
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import numpy.typing as npt

from quantkit.measure.refpack import (
    EncodedRow,
    HeadRule,
    decode_chunk,
    encode_block,
    encode_heads,
    encode_tails,
    estimate_shortfall,
    is_full,
    score_packed,
)
from quantkit.measure.scoring import Ints, Logits, Scorer
from quantkit.spec.refpack_records import PACK_ROW_DTYPE

FULL_EVERY = 64


class Chunk(NamedTuple):
    """Logits of base and of the tiers, and the tokens that follow."""

    base: Logits
    targets: Ints
    tiers: list[Logits]


class Sums:
    """What all chunks at one mass come to, tier by tier."""

    def __init__(self, mass: float, n_tier: int) -> None:
        self.rule = HeadRule(mass=mass, max_ids=32768, full_every=FULL_EVERY)
        self.n_bytes = self.n_rows = 0
        self.own = 0.0
        self.numbers: list[npt.NDArray[np.void]] = []
        self.whole: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(n_tier)]
        self.pack: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(n_tier)]
        self.exact: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(n_tier)]
        self.tails: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(n_tier)]

    def add(self, scorer: Scorer, index: int, chunk: Chunk) -> None:
        """Encode a chunk, hold base and the tiers against it."""
        n_row, n_vocab = chunk.base.shape
        full = is_full(index, np.arange(n_row), n_row, FULL_EVERY)
        rows = encode_block(scorer, chunk.base, chunk.targets, full, self.rule)
        heads, tails = encode_heads(rows), encode_tails(rows)
        numbers = np.concatenate([row.numbers for row in rows])
        packed = decode_chunk(numbers, heads, tails, full, n_vocab)
        own = score_packed(scorer, packed, 0, chunk.base, chunk.targets)
        self.own = max(self.own, float(np.abs(own.kld).max()), float(np.abs(own.tail_kld[full]).max(initial=0)))
        self.n_bytes += len(heads) + len(tails) + numbers.nbytes
        self.n_rows += n_row
        self.numbers.append(numbers)
        exact = scorer.score(chunk.base, chunk.targets, chunk.tiers).tiers
        for i, tier in enumerate(chunk.tiers):
            scores = score_packed(scorer, packed, 0, tier, chunk.targets)
            self.whole[i].append(exact[i].kld)
            self.pack[i].append(scores.kld)
            self.exact[i].append(exact_bucket_kld(chunk.base, tier, rows))
            self.tails[i].append(scores.tail_kld)

    def lines(self, names: list[str], n_vocab: int) -> Iterator[str]:
        """The table's lines."""
        numbers = np.concatenate(self.numbers)
        n_bytes = self.n_bytes / self.n_rows
        yield (f"mass {self.rule.mass:<7g} {numbers['n_head'].mean():>7.0f} ids, tail {numbers['tail_mass'].mean():.2e}, "
               f"{n_bytes:>7.0f} bytes a row = 1/{2 * n_vocab / n_bytes:.1f} of 2V, 1/{4 * n_vocab / n_bytes:.1f} of 4V; "
               f"own {self.own:g}")
        for i, name in enumerate(names):
            whole, pack, exact = (np.concatenate(part[i]) for part in (self.whole, self.pack, self.exact))
            tails = np.concatenate(self.tails[i])
            kept, kld = np.isfinite(tails), float(whole.mean())
            est = estimate_shortfall(float(numbers["tail_mass"].mean()), numbers["tail_mass"][kept], tails[kept])
            shown = "none" if est.value is None or est.se is None else f"{est.value / kld:.4%} ± {est.se / kld:.4%}"
            yield (f"    {name:28s} KLD {kld:.3e}  short {(kld - pack.mean()) / kld:.4%}  est {shown}  "
                   f"weights {(pack - exact).mean() / kld:+.1e}")


def exact_bucket_kld(base: Logits, tier: Logits, rows: list[EncodedRow]) -> npt.NDArray[np.float64]:
    """Head and one bucket with weights that are not rounded, by the textbook."""
    out = np.empty(len(base))
    for i, row in enumerate(rows):
        logs = []
        for logits in (base[i].astype(np.float64), tier[i].astype(np.float64)):
            x = logits - logits.max()
            logs.append(x - np.log(np.exp(x).sum()))
        p, q = (np.exp(log[row.ids]) for log in logs)
        rest = [float(np.exp(np.delete(log, row.ids)).sum()) for log in logs]
        tail = rest[0] * (np.log(rest[0]) - np.log(rest[1])) if rest[0] > 0 else 0.0
        out[i] = float((p * (np.log(p) - np.log(q))).sum() + tail)
    return out


def decode_chunks(paths: list[Path], text: bytes, n_chunk: int) -> Iterator[Chunk]:
    """Spread chunks of 512 tokens, all models side by side."""
    from quantkit.engine.lockstep import Block, Seat
    from quantkit.engine.model import Model
    from quantkit.engine.settings import ContextSettings, Offload
    from quantkit.measure.articles import chunk_indices

    settings = ContextSettings(n_ctx=512, n_batch=512, n_ubatch=512, type_k="F16", type_v="F16", flash_attn=True,
                               use_extra_bufts=False, n_threads=os.cpu_count() or 1)
    vocabulary = Model(paths[0], vocab_only=True)
    ids = vocabulary.tokenize(text)
    vocabulary.close()
    seats = [Seat(path, settings, Offload(), 255) for path in paths]
    for chunk in chunk_indices("spread", n_chunk, len(ids) // 512):
        tokens = ids[chunk * 512:(chunk + 1) * 512]
        base, *tiers = [seat.decode(tokens, Block(0, 512, 256, 511)).copy() for seat in seats]
        yield Chunk(base, tokens[257:512], tiers)


def entropy_of(logits: Logits, factor: float) -> float:
    """Mean entropy of softmax(factor · logits), nats."""
    scaled = (logits * np.float32(factor)).astype(np.float32)
    return float(Scorer().score(scaled, np.zeros(len(logits), np.int32), ()).base.entropy.mean())


def sharpen(chunks: list[Chunk], nats: float) -> list[Chunk]:
    """All logits times the factor that gives base this mean entropy."""
    sample = np.concatenate([chunk.base[::8] for chunk in chunks])
    low, high = 0.1, 20.0
    for _ in range(25):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if entropy_of(sample, middle) > nats else (low, middle)
    factor = np.float32(low)
    return [Chunk(c.base * factor, c.targets, [tier * factor for tier in c.tiers]) for c in chunks]


def draw_chunk(rng: np.random.Generator, fall: npt.NDArray[np.float64], firsts: npt.NDArray[np.float64],
               noises: list[float]) -> Chunk:
    """Rows with this fall-off and these first logits, in random order, and noisy tiers."""
    base = np.stack([rng.permutation(np.concatenate([[first], fall[1:]])) for first in firsts]).astype(np.float32)
    grown = 1 - 0.04 * (base - base.max(axis=1, keepdims=True))
    noise = rng.standard_normal(base.shape, dtype=np.float32) * grown
    return Chunk(base, np.argmax(base, axis=1).astype(np.int32), [base + np.float32(size) * noise for size in noises])


def draw_chunks(n_vocab: int, nats: float, n_rows: int, noises: list[float]) -> Iterator[Chunk]:
    """Synthetic chunks of 64 rows."""
    rng = np.random.default_rng(11)
    rank = np.arange(1, n_vocab + 1)
    fall = -(np.log(rank) + 2.5 * rank / n_vocab)
    firsts = rng.normal(0, 2.4, n_rows)

    def entropy(a: float, first: float) -> float:
        x = np.concatenate([[first], a * fall[1:]])
        log_p = x - np.log(np.exp(x).sum())
        return float(-(np.exp(log_p) * log_p).sum())

    low, high = 1.0, 10.0
    for _ in range(20):
        middle = (low + high) / 2
        mean = float(np.mean([entropy(middle, first) for first in firsts[:128]]))
        low, high = (middle, high) if mean > nats else (low, middle)
    for i in range(0, n_rows, 64):
        yield draw_chunk(rng, low * fall, firsts[i:i + 64], noises)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    model, synthetic = ways.add_parser("model"), ways.add_parser("synthetic")
    for way in (model, synthetic):
        way.add_argument("--mass", type=float, nargs="+", default=[0.99, 0.999, 0.9999])
    model.add_argument("base", type=Path)
    model.add_argument("text", type=Path)
    model.add_argument("tiers", type=Path, nargs="+")
    model.add_argument("--n-chunk", type=int, default=4)
    model.add_argument("--sharpen", type=float)
    synthetic.add_argument("--n-vocab", type=int, default=248_320)
    synthetic.add_argument("--entropy", type=float, default=1.7)
    synthetic.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    if args.way == "model":
        names = [path.name for path in args.tiers]
        chunks: Iterator[Chunk] = decode_chunks([args.base, *args.tiers], args.text.read_bytes(), args.n_chunk)
        if args.sharpen:
            chunks = iter(sharpen(list(chunks), args.sharpen))
    else:
        noises = [0.01, 0.03, 0.1]
        names = [f"noise {noise}" for noise in noises]
        chunks = draw_chunks(args.n_vocab, args.entropy, args.rows, noises)
    sums, scorer, n_vocab = [Sums(mass, len(names)) for mass in args.mass], Scorer(), 0
    for i, chunk in enumerate(chunks):
        n_vocab = chunk.base.shape[1]
        for own in sums:
            own.add(scorer, i, chunk)
    entropy = np.concatenate(sums[0].numbers)["entropy"]
    print(f"n_vocab {n_vocab}, {sums[0].n_rows} rows, entropy {entropy.mean():.2f} nats (median {np.median(entropy):.2f}), "
          f"{PACK_ROW_DTYPE.itemsize} bytes of numbers a row\n")
    for own in sums:
        print("\n".join(own.lines(names, n_vocab)))


if __name__ == "__main__":
    main()
