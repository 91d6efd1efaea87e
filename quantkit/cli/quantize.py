"""`quantkit quantize`: tiers to files, and nothing else."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, protocol_options


@click.command()
@base_option
@protocol_options
@click.option("-t", "--tier", "tiers", multiple=True, help="A tier, by its name in the protocol; repeatable [default: all].")
@click.option("-o", "--output", required=True, type=PATH, help="The new GGUF; of several tiers, the folder for them.")
@click.option("--imatrix", type=PATH, help="Importance matrix, llama.cpp's GGUF or legacy format.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def quantize(base: Path, protocol: str, settings: tuple[str, ...], tiers: tuple[str, ...], output: Path, imatrix: Path | None,
             force: bool) -> None:
    """Write tiers: planned completely, validated against their plans and their source, and only then put in place."""
    from quantkit.core.units import format_bytes
    from quantkit.job.plans import choose_tiers
    from quantkit.job.session import tier_file_name
    from quantkit.job.standalone import quantize_to_files
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    names = [tier.name for tier in choose_tiers(loaded, tiers or None)]
    into = len(names) > 1 or output.is_dir()
    targets = {name: output / tier_file_name(base, name) if into else output for name in names}
    with stderr_progress() as progress:
        made = quantize_to_files(base, loaded, targets, progress, imatrix=imatrix, force=force)
    for tier in made:
        click.echo(f"{targets[tier.tier]}: {format_bytes(tier.size_bytes)}, sha256 {tier.sha256}")
