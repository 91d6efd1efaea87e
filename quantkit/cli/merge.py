"""`quantkit merge`: the shards of a model as one file."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("shard", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The new GGUF.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def merge(shard: Path, output: Path, force: bool) -> None:
    """Merge the split model that SHARD is any part of; every tensor is compared with its source."""
    from quantkit.core.units import format_bytes
    from quantkit.job.shards import merge_file

    merged = merge_file(shard, output, force=force)
    click.echo(f"{merged.path}: {format_bytes(merged.size_bytes)}, {merged.n_tensors} tensors")
