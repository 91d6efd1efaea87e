"""`quantkit split`: a model as shards below a size."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.options import PATH


@click.command()
@click.argument("model", type=PATH)
@click.option("--max-size", default="50GB", show_default=True, metavar="SIZE",
              help="The largest file, such as 45GB or 20GiB; the hub takes 50GB, which is less than 50GiB.")
@click.option("-o", "--output", required=True, type=PATH, help="The shards' path without -00001-of-0000N.gguf.")
@click.option("--force", is_flag=True, help="Replace existing outputs.")
def split(model: Path, max_size: str, output: Path, force: bool) -> None:
    """Split MODEL by bytes into shards that llama.cpp loads from the first; every tensor is compared with its source.

    MODEL may be a shard of a split model, which is then dealt anew.
    """
    from quantkit.core.units import format_bytes, parse_bytes
    from quantkit.job.shards import split_file

    for shard in split_file(model, output, parse_bytes(max_size), force=force):
        click.echo(f"{shard.path}: {format_bytes(shard.size_bytes)}, {shard.n_tensors} tensors")
