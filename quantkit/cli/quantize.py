"""`quantkit quantize`: one tier to one file."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, protocol_options


@click.command()
@base_option
@protocol_options
@click.option("-t", "--tier", required=True, help="The tier, by its name in the protocol.")
@click.option("-o", "--output", required=True, type=PATH, help="The new GGUF.")
@click.option("--imatrix", type=PATH, help="Importance matrix, llama.cpp's GGUF or legacy format.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def quantize(base: Path, protocol: str, settings: tuple[str, ...], tier: str, output: Path, imatrix: Path | None,
             force: bool) -> None:
    """Write one tier: planned completely, validated against its plan and its source, and only then put in place."""
    from quantkit.core.units import format_bytes
    from quantkit.job.standalone import quantize_to_file
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        made = quantize_to_file(base, loaded, tier, output, progress, imatrix=imatrix, force=force)
    click.echo(f"{output}: {format_bytes(made.size_bytes)}, sha256 {made.sha256}")
