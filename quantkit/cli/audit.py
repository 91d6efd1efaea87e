"""`quantkit audit`: measure files that are there, whoever made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.finish import finish_run
from quantkit.cli.options import PATH, dask_options, engine_options, measure_options, open_dask, protocol_options, run_options


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="Q.gguf...")
@click.option("-b", "--base", type=PATH, help="The BF16 GGUF, or the first part of a split one; not needed with --ref.")
@click.option("--ref", "refs", multiple=True, type=PATH,
              help="A reference pack in place of the base: KLD is then a lower bound, all else is exact. Of several texts each has "
                   "a pack of its own: repeat it.")
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The run directory; one of this base and protocol grows.")
@measure_options
@click.option("--until", metavar="kld_rse=X|pairs",
              help="Screening: stop at the first look of the protocol where every tier's mean KLD is known to X of itself, or "
                   "every pair of neighbours is decided. A derived protocol; its rows stand beside no others.")
@engine_options
@dask_options
def audit(files: tuple[Path, ...], base: Path | None, refs: tuple[Path, ...], protocol: str, settings: tuple[str, ...],
          output: Path, dask: str | None, dask_resources: str, dask_fetch: str, **engine: Any) -> None:
    """Measure quantized files of one model against its BF16 file, or a reference pack of it, token by token."""
    from quantkit.job.ladder import audit_files
    from quantkit.job.refpack_audit import audit_with_packs
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    if refs and dask is not None:
        raise click.UsageError("--dask needs the base, which stands beside every tier: give -b without --ref.")
    with stderr_progress() as progress, open_dask(dask, dask_resources, dask_fetch) as elsewhere:
        if refs:
            if engine["floors"] or engine["weights"] or engine["until"]:
                raise click.UsageError("--floors, --kld-weights and --until need the base: give -b without --ref.")
            result = audit_with_packs(refs, loaded, output, files, progress, run_options(**engine), base=base)
        elif base is not None:
            result = audit_files(base, loaded, output, files, progress, run_options(elsewhere=elsewhere, **engine))
        else:
            raise click.UsageError("Missing option '-b' / '--base', or '--ref' with a reference pack.")
    finish_run(result)
