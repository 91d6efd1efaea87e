"""`quantkit imatrix`: collect importances over a protocol's calibration text."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, protocol_options


@click.command()
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The matrix, in llama.cpp's GGUF format.")
@click.option("--calibration", type=PATH, help="The calibration text, if it is not found by itself; its hash is checked.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def imatrix(base: Path, protocol: str, settings: tuple[str, ...], output: Path, calibration: Path | None, force: bool) -> None:
    """Collect an importance matrix that covers every matrix of the model, the MTP block included."""
    from quantkit.job.standalone import collect_to_file
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        matrix = collect_to_file(base, loaded, output, progress, calibration=calibration, force=force)
    click.echo(f"{output}: {len(matrix.entries)} entries, {matrix.chunk_count} chunks of {matrix.chunk_size} tokens")
