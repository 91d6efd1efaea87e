"""`quantkit imatrix`: collect importances over a protocol's calibration text; merge matrices, show what is in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, offload_options, protocol_options, read_offload
from quantkit.cli.output import format_option

if TYPE_CHECKING:
    from quantkit.job.imatrix_report import ImatrixReport

_FORCE = click.option("--force", is_flag=True, help="Replace an existing output.")


class _CollectByDefault(click.Group):
    """`quantkit imatrix -b ...` means `quantkit imatrix collect -b ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default subcommand before options that are not the group's own."""
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["collect", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_CollectByDefault)
def imatrix() -> None:
    """Collect an importance matrix, merge two, or show one.

    `quantkit imatrix -b BASE -p PROTOCOL -o FILE` collects; `quantkit imatrix collect --help` has its options.
    """


@imatrix.command()
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The matrix, in llama.cpp's GGUF format.")
@click.option("--calibration", type=PATH, help="The calibration text, if it is not found by itself; its hash is checked.")
@click.option("--corpus", type=PATH, help="The evaluation text, to prove that the two are apart; its hash is checked.")
@offload_options
@_FORCE
def collect(base: Path, protocol: str, settings: tuple[str, ...], output: Path, calibration: Path | None, corpus: Path | None,
            force: bool, **devices: Any) -> None:
    """Collect a matrix that covers every matrix of the model, the MTP block included. A killed collection is resumed."""
    from quantkit.job.standalone import collect_to_file
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        matrix = collect_to_file(base, loaded, output, progress, calibration=calibration, corpus=corpus,
                                 offload=read_offload(**devices), force=force)
    _tell(output, matrix)


@imatrix.command()
@click.argument("first", type=PATH, metavar="A")
@click.argument("second", type=PATH, metavar="B")
@click.option("-o", "--output", required=True, type=PATH, help="The matrix of both texts.")
@_FORCE
def merge(first: Path, second: Path, output: Path, force: bool) -> None:
    """Add the sums and counts of A and B, two matrices of one model over different texts."""
    from quantkit.core.files import refuse_overwrite
    from quantkit.job.foreign import read_imatrix
    from quantkit.spec.imatrix_file import merge as merge_matrices
    from quantkit.spec.imatrix_file import write_imatrix

    refuse_overwrite(output, [first, second], force=force)
    merged = merge_matrices(read_imatrix(first), read_imatrix(second))
    write_imatrix(output, merged)
    _tell(output, merged)


@imatrix.command()
@click.argument("file", type=PATH, metavar="F")
@click.option("-b", "--base", type=PATH, help="The model that it is for: shows which of its matrices have an entry.")
@format_option
@click.option("--plot", type=PATH, metavar="F.png", help="Draw importance by layer and role.")
@_FORCE
def show(file: Path, base: Path | None, output_format: str, plot: Path | None, force: bool) -> None:
    """Show what is in F: coverage, thin entries, zeros, the most and the least important tensors."""
    from quantkit.core.files import refuse_overwrite, write_atomic
    from quantkit.job.imatrix_report import read_report

    if plot is not None:
        refuse_overwrite(plot, [file, *([base] if base else [])], force=force)
    report = read_report(file, base)
    click.echo(_render(report, output_format), nl=False)
    if plot is not None:
        from quantkit.report.imatrix_plot import draw_importances

        write_atomic(plot, draw_importances(report.tensors, f"Importances in {file.name}", report.origin).png)


def _render(report: ImatrixReport, output_format: str) -> str:
    from quantkit.cli.imatrix_table import as_csv, as_json, as_markdown

    return {"md": as_markdown, "json": as_json, "csv": as_csv}[output_format](report)


def _tell(path: Path, matrix: Any) -> None:
    click.echo(f"{path}: {len(matrix.entries)} entries, {matrix.chunk_count} chunks of {matrix.chunk_size} tokens")
