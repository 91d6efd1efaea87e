"""`quantkit mtp`: the MTP head as a file, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, offload_options, protocol_options, read_offload
from quantkit.core.units import parse_bytes
from quantkit.job.mtp_check import MtpOptions

_F = TypeVar("_F", bound=Callable[..., Any])

_FORCE = click.option("--force", is_flag=True, help="Replace existing outputs.")
_RUN = click.option("-o", "--output", required=True, type=PATH, help="The run directory; one of this protocol grows.")
_CORPUS = click.option("--corpus", type=PATH, help="The text of the protocol's mtp.corpus, if it is not found by itself.")


def _engine_options(command: _F) -> _F:
    """Where the work runs; the check names the devices in its id."""
    return click.option("--memory", metavar="SIZE", help="Memory to plan for, such as 16GiB [default: 90 % of what is free].")(
        offload_options(command))


def _read_options(*, memory: str | None, n_gpu_layers: int, main_gpu: int, tensor_split: str) -> MtpOptions:
    return MtpOptions(offload=read_offload(n_gpu_layers, main_gpu, tensor_split),
                      memory_bytes=parse_bytes(memory) if memory else None)


@click.group()
def mtp() -> None:
    """Split, strip, graft and check MTP (NextN) heads."""


@mtp.command()
@click.argument("model", type=PATH)
@click.option("--trunk", required=True, type=PATH, help="The model without its head.")
@click.option("--head", required=True, type=PATH, help="The head, for `--spec-type draft-mtp -md`.")
@_FORCE
def split(model: Path, trunk: Path, head: Path, force: bool) -> None:
    """Write a model's trunk and its MTP head as two files, every tensor's bytes unchanged."""
    from quantkit.job.mtp_files import split_model

    for made in split_model(model, trunk, head, force=force):
        _tell(made.path, made.n_tensors, made.size_bytes)


@mtp.command()
@click.argument("model", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The model without its head.")
@_FORCE
def strip(model: Path, output: Path, force: bool) -> None:
    """Write a model without its MTP head."""
    from quantkit.job.mtp_files import strip_head

    made = strip_head(model, output, force=force)
    _tell(made.path, made.n_tensors, made.size_bytes)


@mtp.command()
@click.argument("trunk", type=PATH)
@click.argument("head", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The model with both.")
@_FORCE
def graft(trunk: Path, head: Path, output: Path, force: bool) -> None:
    """Write one model out of a trunk and the NextN blocks of a head."""
    from quantkit.job.mtp_files import graft_head

    made = graft_head(trunk, head, output, force=force)
    for note in made.notes:
        click.echo(note, err=True)
    _tell(made.path, made.n_tensors, made.size_bytes)


@mtp.command()
@click.argument("model", type=PATH)
@click.option("--head", type=PATH, help="The head's own file [default: the head inside MODEL].")
@click.option("-b", "--base", type=PATH, help="The BF16 GGUF: its head on the same trunk is the measure of this one.")
@protocol_options
@_RUN
@_CORPUS
@_engine_options
def check(model: Path, head: Path | None, base: Path | None, protocol: str, settings: tuple[str, ...], output: Path,
          corpus: Path | None, **engine: Any) -> None:
    """Check a head: alive, lossless, how much is accepted, how fast; exit 1 if it is dead or the text is not the trunk's."""
    from quantkit.job.mtp_check import require_passed
    from quantkit.job.mtp_standalone import check_file
    from quantkit.job.rundir import RunFolder
    from quantkit.report.mtp_report import write_mtp_report
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        result = check_file(model, head, base, loaded, output, corpus, progress, _read_options(**engine))
    for text in write_mtp_report(RunFolder(path=output)):
        click.echo(text)
    require_passed(result)


@mtp.command()
@click.argument("trunks", nargs=-1, type=PATH, metavar="[TRUNK.gguf...]")
@base_option
@protocol_options
@_RUN
@_CORPUS
@_engine_options
def matrix(trunks: tuple[Path, ...], base: Path, protocol: str, settings: tuple[str, ...], output: Path, corpus: Path | None,
           **engine: Any) -> None:
    """Check every trunk (or the run's tiers) with the base's head at each type of the protocol: one table, one plot."""
    from quantkit.job.mtp_standalone import matrix_files
    from quantkit.job.rundir import RunFolder
    from quantkit.report.mtp_matrix import write_matrix
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        cells = matrix_files(base, trunks, loaded, output, corpus, progress, _read_options(**engine))
    click.echo(write_matrix(RunFolder(path=output), cells))


def _tell(path: Path, n_tensors: int, size_bytes: int) -> None:
    from quantkit.core.units import format_bytes

    click.echo(f"{path}: {n_tensors} tensors, {format_bytes(size_bytes)}")
