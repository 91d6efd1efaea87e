"""`quantkit audit`: measure files that are there, whoever made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.finish import finish_run
from quantkit.cli.options import PATH, engine_options, measure_options, protocol_options, run_options


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="Q.gguf...")
@click.option("-b", "--base", type=PATH, help="The BF16 GGUF, or the first part of a split one; not needed with --ref.")
@click.option("--ref", type=PATH, help="A reference pack in place of the base: KLD is then a lower bound, all else is exact.")
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The run directory; one of this base and protocol grows.")
@measure_options
@click.option("--until", metavar="kld_rse=X|pairs",
              help="Screening: stop at the first look of the protocol where every tier's mean KLD is known to X of itself, or "
                   "every pair of neighbours is decided. A derived protocol; its rows stand beside no others.")
@engine_options
def audit(files: tuple[Path, ...], base: Path | None, ref: Path | None, protocol: str, settings: tuple[str, ...], output: Path,
          **engine: Any) -> None:
    """Measure quantized files of one model against its BF16 file, or a reference pack of it, token by token."""
    from quantkit.job.ladder import audit_files
    from quantkit.job.refpack_audit import audit_with_pack
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        if ref is not None:
            if engine["floors"] or engine["weights"] or engine["until"]:
                raise click.UsageError("--floors, --kld-weights and --until need the base: give -b without --ref.")
            result = audit_with_pack(ref, loaded, output, files, progress, run_options(**engine), base=base)
        elif base is not None:
            result = audit_files(base, loaded, output, files, progress, run_options(**engine))
        else:
            raise click.UsageError("Missing option '-b' / '--base', or '--ref' with a reference pack.")
    finish_run(result)
