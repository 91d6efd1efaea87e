"""Peak memory of an audit as the context grows: the same number of tokens in chunks of 512 to 32,768.

usage: python benchmarks/contexts.py [--model tiny|smollm2|BASE.gguf] [--n-ctx 512 2048 8192 32768] [--shared DIR] [--work DIR]

One worker holds base and one tier, blocks of 512 positions. `KV cache` is what both contexts keep for n_ctx positions, from the
header; `rest` is the peak without it: weights, Python, compute buffers, a block of logits. `logits of a chunk` is what a tool holds
that keeps the scored half of a chunk before it scores (n_ctx / 2 x n_vocab x 4 bytes, for the base alone). Beside it stands
llama-perplexity's own peak for its first pass. Memory is of all processes of a way together, sampled (measured.py).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ladder import QUANTKIT, n_threads, parser_of, prepare
from llama_tools import llama_tools
from measured import Measured, run

from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import context_memory
from quantkit.spec.model import describe_model

N_TOKEN = 2 * 32_768  # llama-perplexity wants two chunks


def ours(args: argparse.Namespace, n_ctx: int) -> Measured:
    """Base and Q4_K_M, one worker."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*QUANTKIT, "audit", args.work / f"{args.base.stem}-Q4_K_M.gguf", "-b", args.base, "-p", "wikitext2-first16-v1",
                   "-o", Path(folder) / "run", "--corpus", args.text, "--workers", "1", "--set", f"eval.n_ctx={n_ctx}",
                   "--set", f"eval.n_chunk={N_TOKEN // n_ctx}", "--set", "eval.n_batch=512"]
        return run([command], Path(folder) / "log")


def theirs(args: argparse.Namespace, n_ctx: int) -> Measured:
    """The first pass, which writes the base file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [args.llama / "llama-perplexity", "-m", args.base, "-f", args.text, "-c", str(n_ctx), "-b", "512", "-t",
                   n_threads(), "--chunks", str(N_TOKEN // n_ctx), "--no-warmup", "--kl-divergence-base", Path(folder) / "base.kld"]
        return run([command], Path(folder) / "log")


def main() -> None:
    """One line for each context size."""
    parser = parser_of(__doc__)
    parser.add_argument("--n-ctx", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    args = parser.parse_args()
    args.job = "audit"
    prepare(args)
    args.llama = llama_tools()
    model = describe_model(read_header(args.base))
    print(f"{args.base.name} and Q4_K_M, {N_TOKEN} tokens, n_vocab {model.n_vocab}, MiB\n")
    print("| n_ctx | quantkit peak | KV cache | rest | logits of a chunk | llama-perplexity peak |")
    print("| ----: | ------------: | -------: | ---: | ----------------: | --------------------: |")
    for n_ctx in args.n_ctx:
        kv = 2 * context_memory(model, n_ctx).kv_bytes
        peak = ours(args, n_ctx).peak_bytes
        held = n_ctx // 2 * model.n_vocab * 4
        figures = [peak, kv, peak - kv, held, theirs(args, n_ctx).peak_bytes]
        print(f"| {n_ctx} | " + " | ".join(f"{figure / 2**20:.0f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
