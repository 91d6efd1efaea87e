"""Searched plans beside llama.cpp's own mixes and the guarded ladder, on report chunks, as whole files.

usage: python benchmarks/search.py BASE.gguf -o FOLDER [-p PROTOCOL] [--tiers A,B] [--imatrix FILE] [--set KEY=VALUE ...]

Searches every tier's stock bytes, then quantizes all three plans of each tier with the ordinary quantizer and scores the files in
one lockstep pass over the report chunks, which no search saw. Intervals are 95 %, by article. Times and load stand beside it.
A run that was stopped goes on.

SmolLM2-135M (`python -m tests.workload BASE.gguf`), four tiers in about 1,000 passes of a chunk of 512 tokens:

    python benchmarks/search.py BASE.gguf -o FOLDER --tiers Q5_K_M,Q4_K_M,Q3_K_M,IQ2_S --set search.n_band=2 \\
        --set search.search_n_chunk=4 --set search.select_n_chunk=4 --set search.report_n_chunk=24 --set gate.min_n_chunk=24 \\
        --set search.second_n_chunk=8 --set imatrix.n_chunk=16
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from quantkit.cli.bars import stderr_progress
from quantkit.engine.lockstep import close_group, open_audit, score, tokenize
from quantkit.engine.pool import WorkerPool
from quantkit.job.corpus import read_corpus
from quantkit.job.evaluation import context_settings, default_workers, read_subject
from quantkit.job.ladder import RunOptions
from quantkit.job.plans import resolve_tier
from quantkit.job.progress import Progress
from quantkit.job.quantize import prepare_importances, quantize_tier
from quantkit.job.search import SearchOutcome, search
from quantkit.job.search_budget import StockPlans, Want
from quantkit.measure.articles import assign_chunks, find_articles
from quantkit.measure.numbers import Rows
from quantkit.measure.summary import summarize
from quantkit.spec.imatrix_file import read_imatrix
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.records import Estimate, TierSummary


def write_files(pool: WorkerPool, base: Path, protocol: Protocol, done: SearchOutcome, imatrix: Path, folder: Path,
                progress: Progress) -> dict[tuple[str, str], Path]:
    """Stock, guarded and searched file of each tier; those that lie there are taken."""
    subject, matrix = read_subject(base, "base"), read_imatrix(imatrix)
    lengths = matrix.lengths()
    stock = StockPlans(pool, subject.model, protocol, lengths)
    files = {}
    for proposal in done.result.proposals:
        name = proposal.tier.removeprefix("search-")
        searched = load_protocol(done.files[proposal.tier])
        plans: dict[str, Plan] = {
            "stock": stock.plan(protocol.plan.tier(name).ftype),
            "guarded": resolve_tier(pool, subject.model, protocol, protocol.plan.tier(name), lengths),
            "searched": resolve_tier(pool, subject.model, searched, searched.plan.tiers[0], lengths)}
        for kind, plan in plans.items():
            path = files[name, kind] = folder / f"{name}-{kind}.gguf"
            if not path.exists():
                ready = prepare_importances(imatrix, matrix, sorted(plan.overrides()), protocol.imatrix.zero_floor)
                quantize_tier(pool, subject.model, plan, path, ready, progress)
    return files


def measure(pool: WorkerPool, base: Path, files: dict[tuple[str, str], Path], protocol: Protocol,
            done: SearchOutcome) -> dict[tuple[str, str], TierSummary]:
    """Score all files in one lockstep pass over the report chunks."""
    corpus = protocol.corpus(protocol.eval.corpora[0])
    text = read_corpus(corpus)
    seen = pool.call("tokenize", tokenize, path=base, text=text)
    chunks = np.array(done.result.report_chunks)
    settings = context_settings(protocol.eval)
    articles = assign_chunks(find_articles(text, corpus.documents), seen.ends, settings.n_ctx, chunks)
    pool.broadcast("open", open_audit, base=base, tiers=tuple(files.values()), settings=settings, offload=RunOptions().offload,
                   tokens=seen.ids)
    rows: dict[tuple[str, str], list[Rows]] = {key: [] for key in files}
    for item in pool.stream("score", score, [{"chunks": (int(chunk),)} for chunk in chunks]):
        article = articles[int(np.flatnonzero(chunks == item.chunk)[0])]
        for key, own in zip(files, item.tiers, strict=True):
            own["article"] = article
            rows[key].append(own)
    pool.broadcast("close", close_group)
    return {key: summarize(np.concatenate(own)) for key, own in rows.items()}


def interval(x: Estimate) -> str:
    """A value with its interval."""
    ends = f" [{x.lo:.5f}, {x.hi:.5f}]" if x.lo is not None else ""
    return f"{x.value:.5f}{ends}"


def print_table(done: SearchOutcome, files: dict[tuple[str, str], Path], found: dict[tuple[str, str], TierSummary]) -> None:
    """One row a file; a searched one with its change against stock."""
    print("| tier | plan | file bytes | KLD [95 %] | against stock | 99.9 % KLD | same top % | ln ratio | label |")
    print("|---|---|---:|---|---:|---:|---:|---:|---|")
    changes = {}
    for proposal in done.result.proposals:
        name = proposal.tier.removeprefix("search-")
        base = found[name, "stock"].kld.value or 0.0
        for kind in ("stock", "guarded", "searched"):
            s = found[name, kind]
            change = (s.kld.value or 0.0) / base - 1
            if kind == "searched":
                changes[name] = change
            print(f"| {name} | {kind} | {files[name, kind].stat().st_size:,} | {interval(s.kld)} | {change:+.1%} | "
                  f"{s.kld_quantile(0.999).value:.4f} | {100 * (s.same_top_p.value or 0):.2f} | {s.ln_ppl_ratio.value:+.5f} | "
                  f"{proposal.label if kind == 'searched' else ''} |")
    inner = [change for name, change in changes.items() if name not in ("Q6_K", "IQ1_M")]
    if inner:
        print(f"\nmedian change of KLD at stock bytes, {len(inner)} tiers without Q6_K and IQ1_M: {statistics.median(inner):+.1%}")


def print_additivity(done: SearchOutcome, found: dict[tuple[str, str], TierSummary]) -> None:
    """What the costs predict of each searched plan, beside what was measured of it on each set of chunks."""
    print("\n| tier | KLD predicted | search chunks | selection | report | second text, against stock | bytes of budget |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for proposal in done.result.proposals:
        name = proposal.tier.removeprefix("search-")
        selected = next(c.kld for c in proposal.candidates if c.name == proposal.chosen)
        second = next((o for o in proposal.obligations if "second text" in o.name), None)
        change = f"{second.proposal / second.incumbent - 1:+.1%}" if second else "n/a"
        print(f"| {name} | {proposal.predicted_kld:.5f} | {proposal.search_kld:.5f} | {selected:.5f} | "
              f"{found[name, 'searched'].kld.value:.5f} | {change} | {proposal.tensor_bytes / proposal.budget_bytes:.3%} |")
    for proposal in done.result.proposals:
        for o in proposal.obligations:
            if o.verdict in ("not shown", "worse", "not compared"):
                needed = f", about {o.n_article_needed} articles would settle it" if o.n_article_needed else ""
                print(f"\n{proposal.tier}: {o.name} {o.verdict}{needed}", end="")
    print()


def main() -> None:
    """Search, write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("-p", "--protocol", default="wikitext2-quick-v1")
    parser.add_argument("--tiers", default="Q6_K,Q5_K_M,Q4_K_M,Q3_K_M,IQ2_S,IQ1_M")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    args = parser.parse_args()
    protocol = load_protocol(args.protocol, args.settings)
    wants = [Want(kind="match", tier=name) for name in args.tiers.split(",")]
    with stderr_progress() as progress:
        load, start = os.getloadavg()[0], time.perf_counter()
        done = search(args.base, protocol, args.output / "run", wants, progress, RunOptions(imatrix=args.imatrix))
        wall = time.perf_counter() - start
        (args.output / "files").mkdir(parents=True, exist_ok=True)
        with WorkerPool(default_workers(context_settings(protocol.eval), RunOptions().offload)) as pool:
            matrix = args.output / "run" / "imatrix.gguf"
            files = write_files(pool, args.base, protocol, done, matrix, args.output / "files", progress)
            found = measure(pool, args.base, files, protocol, done)
    total = time.perf_counter() - start
    print(f"search of {len(wants)} budgets: {wall:.0f} s, with files written and measured {total:.0f} s, load {load:.1f} at its "
          f"start and {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores; {done.result.n_trials} of {done.result.n_pairs} "
          f"pairs measured on {len(done.result.search_chunks)} chunks; {len(done.result.report_chunks)} report chunks\n")
    print_table(done, files, found)
    print_additivity(done, found)


if __name__ == "__main__":
    main()
