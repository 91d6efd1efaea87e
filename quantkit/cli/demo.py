"""`quantkit demo`: the main job on a bundled model and text, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.finish import finish_run
from quantkit.cli.options import PATH, engine_options, run_options

_MODEL = Path(__file__).parents[1] / "data" / "demo" / "tiny-qwen35-mtp-BF16.gguf"


@click.command()
@click.option("-o", "--output", type=PATH, default=Path("demo-run"), show_default=True, help="The run directory.")
@engine_options
def demo(output: Path, **engine: Any) -> None:
    """Make and measure a whole ladder of a bundled 6.7 M parameter model: a minute or two, no network."""
    from quantkit.job.ladder import run_ladder
    from quantkit.spec.protocol import load_protocol

    with stderr_progress() as progress:
        result = run_ladder(_MODEL, load_protocol("demo-v1"), output, None, progress, run_options(**engine, floors=True))
    finish_run(result)
