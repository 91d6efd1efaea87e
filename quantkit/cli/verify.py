"""`quantkit verify`: re-check a bundle, one's own or a downloaded one."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli.options import PATH
from quantkit.cli.output import Cell, format_option, json_text, render_table, visible

if TYPE_CHECKING:
    from quantkit.job.regenerate import Rechecked
    from quantkit.job.verify_findings import Verification


@click.command()
@click.argument("run", type=PATH)
@click.option("--id", "result_id", metavar="RESULT_ID", help="The result id that was published: catches a bundle of other numbers.")
@click.option("--regenerate", is_flag=True, help="Quantize again from the base and compare bytes.")
@click.option("--remeasure", "n_remeasure", type=click.IntRange(0), default=0, metavar="N",
              help="Measure N random chunks again and compare rows.")
@click.option("--seed", type=click.IntRange(0), help="Chooses the N chunks [default: random, printed].")
@click.option("--tier", "tiers", multiple=True, metavar="T", help="Regenerate or remeasure only this tier; may be repeated.")
@click.option("-b", "--base", type=PATH, help="The BF16 GGUF, for --regenerate and --remeasure.")
@click.option("--ref", type=PATH, help="A reference pack in place of the BF16 GGUF, for --remeasure.")
@click.option("--corpus", type=PATH, help="The evaluation text, if it is not found by itself; its hash is checked.")
@click.option("--workers", "n_workers", type=click.IntRange(0), default=0, help="Worker processes [default: cores / threads each].")
@click.option("--memory", metavar="SIZE", help="Memory to plan for, such as 16GiB [default: 90 % of what is free].")
@format_option
def verify(run: Path, result_id: str | None, regenerate: bool, n_remeasure: int, seed: int | None, tiers: tuple[str, ...],
           base: Path | None, ref: Path | None, corpus: Path | None, n_workers: int, memory: str | None,
           output_format: str) -> None:
    """Check every hash, size, id, plan, number and table of a bundle; needs neither the base nor the tiers' files.

    Exit 1 where anything is not what it should be.
    """
    from quantkit.core.errors import InputError
    from quantkit.core.units import parse_bytes
    from quantkit.job.verify import verify_bundle
    from quantkit.report.run_report import render_report

    again = regenerate or n_remeasure > 0
    if again != (base is not None or ref is not None):
        raise InputError("expected -b BASE with --regenerate or --remeasure, or --ref PACK with --remeasure, and without "
                         "them none: leave -b away")
    if ref is not None and (regenerate or base is not None):
        raise InputError("expected --ref PACK alone with --remeasure, got -b BASE or --regenerate with it: quantizing needs the "
                         "base, and with that a pack says nothing more; leave one of them away")
    verification = verify_bundle(run, render_report, result_id)
    rechecked = None
    if verification.passed and again:
        from quantkit.cli.bars import stderr_progress
        from quantkit.job.regenerate import RecheckOptions, recheck
        from quantkit.job.remeasure_pack import remeasure_with_pack
        from quantkit.job.verify_findings import Findings

        seed = secrets.randbelow(1 << 31) if seed is None else seed
        if n_remeasure:
            click.echo(f"remeasuring {n_remeasure} chunks chosen with --seed {seed}", err=True)
        findings = Findings()
        options = RecheckOptions(regenerate=regenerate, n_remeasure=n_remeasure, seed=seed, tiers=tiers or None, corpus=corpus,
                                 n_workers=n_workers, memory_bytes=parse_bytes(memory) if memory else None)
        with stderr_progress() as progress:
            if base is not None:
                rechecked = recheck(run, base, options, findings, progress)
            elif ref is not None:
                rechecked = remeasure_with_pack(run, ref, options, findings, progress)
        verification = verification.plus(findings.result(verification.result_id))
    click.echo(_render(verification, rechecked, seed, output_format), nl=False)
    verification.require(str(run))


def _render(verification: Verification, rechecked: Rechecked | None, seed: int | None, output_format: str) -> str:
    if output_format == "json":
        return json_text({"passed": verification.passed, **asdict(verification), "seed": seed,
                          "rechecked": asdict(rechecked) if rechecked else None})
    columns = ["Check", "Checked", "Failed", "Notes"]
    rows: list[list[Cell]] = [[c.name, c.n_checked, c.n_failed, "; ".join(c.notes)] for c in verification.checks]
    if output_format == "csv":
        for failure in verification.failures:
            click.echo(visible(f"{failure.file}: expected {failure.expected}, found {failure.found}"), err=True)
        return render_table(columns, rows, "csv")
    parts = [render_table(columns, rows, "md")]
    if verification.failures:
        parts.append(render_table(["File", "Check", "Expected", "Found"],
                                  [[f.file, f.check, f.expected, f.found] for f in verification.failures], "md"))
    if rechecked is not None:
        parts += _recheck_tables(rechecked)
    parts.append(f"result {visible(verification.result_id or 'unknown')}: "
                 + ("verified\n" if verification.passed else f"{len(verification.failures)} failures\n"))
    return "\n".join(parts)


def _recheck_tables(rechecked: Rechecked) -> list[str]:
    parts = []
    if rechecked.regenerated:
        rows: list[list[Cell]] = []
        for made in rechecked.regenerated:
            worst = max(made.differences or (), key=lambda d: d.relative_difference, default=None)
            rows.append([made.tier, "identical" if made.identical else "different",
                         None if made.differences is None else len(made.differences),
                         worst.relative_difference if worst else None, worst.name if worst else None])
        parts.append(render_table(["Regenerated", "Bytes", "Tensors that differ", "Largest relative difference", "Of"], rows, "md"))
    if rechecked.remeasured:
        parts.append(render_table(
            ["Remeasured", "Chunks", "Rows", "Rows that differ", "Largest Δ KLD", "Largest Δ nll", "Other top tokens",
             "Mean KLD recorded", "Mean KLD found"],
            [[m.tier, len(m.chunks), m.n_rows, m.n_rows_differ, m.max_kld_difference, m.max_nll_q_difference, m.n_top1_q_differ,
              m.kld_recorded, m.kld_found] for m in rechecked.remeasured], "md"))
    return parts
