"""`quantkit audit`: measure files that are there, whoever made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.finish import finish_run
from quantkit.cli.options import PATH, base_option, engine_options, protocol_options, run_options


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="Q.gguf...")
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The run directory; one of this base and protocol grows.")
@engine_options
def audit(files: tuple[Path, ...], base: Path, protocol: str, settings: tuple[str, ...], output: Path, **engine: Any) -> None:
    """Measure quantized files of one model against its BF16 file, token by token."""
    from quantkit.job.ladder import audit_files
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        result = audit_files(base, loaded, output, files, progress, run_options(**engine))
    finish_run(result)
