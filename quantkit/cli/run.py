"""`quantkit run`: the whole ladder in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.finish import finish_run
from quantkit.cli.options import (
    PATH,
    base_option,
    dask_options,
    engine_options,
    measure_options,
    open_dask,
    protocol_options,
    run_options,
)


@click.command()
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The run directory; an existing one is resumed.")
@click.option("--tiers", default="", metavar="A,B,...", help="Only these tiers of the protocol.")
@click.option("--imatrix", type=PATH, help="Use this importance matrix instead of collecting one.")
@click.option("--drop-files", is_flag=True, help="Delete each tier's file once it is measured, where disk is short.")
@measure_options
@engine_options
@dask_options
def run(base: Path, protocol: str, settings: tuple[str, ...], output: Path, tiers: str, dask: str | None, dask_resources: str,
        dask_fetch: str, **engine: Any) -> None:
    """Quantize every tier of a protocol and measure each against the BF16 file: plan, imatrix, quantize, audit, table."""
    from quantkit.job.ladder import run_ladder
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    names = [name.strip() for name in tiers.split(",") if name.strip()] or None
    with stderr_progress() as progress, open_dask(dask, dask_resources, dask_fetch) as elsewhere:
        result = run_ladder(base, loaded, output, names, progress, run_options(elsewhere=elsewhere, **engine))
    finish_run(result)
