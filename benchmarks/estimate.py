"""How long a ladder of a large model takes: constants measured here on a small one, carried over by arithmetic.

usage: python benchmarks/estimate.py SHAPE.gguf [--model smollm2] [--cores 16 64] [--n-chunk 592] [--n-ctx 512] [--repeats 3]

SHAPE.gguf needs only a header (`shared/models/make_shape27b.py` writes one). What is measured: CPU time of a decode on one core,
per weight and token, for the base and each tier; CPU time of scoring, per logit; of quantizing, per weight; of hashing, per byte.
What is assumed, and not measured: the same cost per weight and token in a large model; cores that add up (data-parallel workers,
memory bandwidth that suffices); weights that stay in memory. Of the experts of a layer only the used share counts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ladder import QUANTKIT, STOCK, TIERS, parser_of, prepare, tier_files
from measured import run
from scoring import rate_of

from quantkit.engine.chunk_time import time_chunk
from quantkit.engine.lockstep import tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import context_settings
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.protocol import load_protocol


class Constants(NamedTuple):
    """Measured costs on one core."""

    decode_ps: dict[str, float]  # a weight and token, by tier; "base" too
    quantize_ns: dict[str, float]  # a weight, by tier
    score_ns: float  # a tier's logit at the large model's vocabulary, seven tiers a group
    hash_ns: float  # a byte


def active_weights(model: ModelInfo) -> int:
    """Weights that a token passes through: the embedding is a lookup, of the experts only those that are used; no MTP block."""
    used = int(model.header.metadata.get(f"{model.architecture}.expert_used_count", 0) or 0)  # type: ignore[arg-type]
    total = 0
    for tensor in model.header.tensors:
        role = model.roles[tensor.name]
        if role == "mtp" or (role == "embedding" and not model.tied_embeddings):
            continue
        total += tensor.n_elements * used // model.n_expert if "_exps" in tensor.name and model.n_expert else tensor.n_elements
    return total


def measure(args: argparse.Namespace, n_vocab: int | None) -> Constants:
    """The constants, each the best of some repeats."""
    small = describe_model(read_header(args.base))
    spec = load_protocol("wikitext2-first16-v1").eval
    settings = context_settings(spec)
    decode: dict[str, float] = {}
    with WorkerPool(1) as pool:
        seen = pool.call("tokenize", tokenize, path=args.base, text=args.text.read_bytes()[:20_000])
        for name, path in {"base": args.base, **dict(zip(TIERS, tier_files(args), strict=True))}.items():
            best = min(pool.call("decode", time_chunk, path=path, settings=settings, offload=Offload(),
                                 tokens=seen.ids[:spec.n_ctx]).decode_s for _ in range(args.repeats))
            decode[name] = best / (active_weights(small) * spec.n_ctx) * 1e12
    quantize = {}
    for tier in TIERS:
        with tempfile.TemporaryDirectory() as folder:
            done = run([[*QUANTKIT, "quantize", "-b", args.base, "-p", STOCK, "-t", tier, "--imatrix", args.matrix, "-o",
                         Path(folder) / "q.gguf"]], Path(folder) / "log")
            quantize[tier] = done.cpu_s / small.n_params * 1e9
    data = os.urandom(1 << 26)
    start = time.process_time()
    hashlib.sha256(data).digest()
    hash_ns = (time.process_time() - start) / len(data) * 1e9
    return Constants(decode, quantize, 1e3 / rate_of(n_vocab or 4096, len(TIERS)), hash_ns)


def main() -> None:
    """Print what was measured, then what follows from it."""
    parser = parser_of(__doc__)
    parser.add_argument("shape", type=Path)
    parser.add_argument("--cores", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--n-chunk", type=int, default=592)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.job = "audit"
    prepare(args)
    large = describe_model(read_header(args.shape))
    found = measure(args, large.n_vocab)
    print(f"Measured on {args.base.name}, one core; scoring at n_vocab {large.n_vocab}: {found.score_ns:.2f} ns a tier's logit; "
          f"sha256: {found.hash_ns:.2f} ns a byte\n")
    weights, tokens = active_weights(large), args.n_chunk * args.n_ctx
    rows = args.n_chunk * (args.n_ctx - 1 - args.n_ctx // 2)
    print(f"Carried over to {args.shape.name}: {weights / 1e9:.2f} G weights a token, {args.n_chunk} chunks of {args.n_ctx}\n")
    heads = [f"audit h, {n} cores" for n in args.cores] + [f"quantize h, {n} cores" for n in args.cores]
    print("| | decode ps a weight and token | quantize ns a weight | audit core h | " + " | ".join(heads) + " |")
    print("| --- |" + " ---: |" * (3 + len(heads)))
    audits = {name: ps * 1e-12 * weights * tokens / 3600 for name, ps in found.decode_ps.items()}
    audits |= {tier: audits[tier] + found.score_ns * 1e-9 * rows * (large.n_vocab or 0) / 3600 for tier in TIERS}
    for name, audit in audits.items():
        ns = found.quantize_ns.get(name)
        made = ns * 1e-9 * large.n_params / 3600 if ns is not None else None
        cells = [f"{found.decode_ps[name]:.1f}", "" if ns is None else f"{ns:.1f}", f"{audit:.1f}",
                 *(f"{audit / n:.2f}" for n in args.cores), *("" if made is None else f"{made / n:.2f}" for n in args.cores)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    total = sum(audits.values())
    made = sum(ns * 1e-9 * large.n_params / 3600 for ns in found.quantize_ns.values())
    cells = ["", "", f"{total:.1f}", *(f"{total / n:.2f}" for n in args.cores), *(f"{made / n:.2f}" for n in args.cores)]
    print("| all | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
