"""Options that several verbs share, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from quantkit.core.errors import InputError
from quantkit.core.units import parse_bytes
from quantkit.engine.settings import Offload
from quantkit.job.audit import AuditOptions, Elsewhere
from quantkit.job.sequential import parse_until
from quantkit.job.session import RunOptions

_F = TypeVar("_F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


def base_option(command: _F) -> _F:
    """-b/--base."""
    return click.option("-b", "--base", required=True, type=PATH, help="The BF16 GGUF, or the first part of a split one.")(command)


def protocol_options(command: _F) -> _F:
    """-p/--protocol and --set."""
    for option in (
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                     help="Derive a protocol: another value for one key. It has its own ids and is marked in every table."),
        click.option("-p", "--protocol", required=True, metavar="NAME|FILE", help="A published protocol or a .toml file."),
    ):
        command = option(command)
    return command


def engine_options(command: _F) -> _F:
    """How the work is spread; nothing here moves a number on the CPU."""
    for option in (
        click.option("--workers", "n_workers", type=click.IntRange(0), default=0,
                     help="Worker processes [default: cores / the protocol's threads]."),
        click.option("--memory", metavar="SIZE", help="Memory to plan for, such as 16GiB [default: 90 % of what is free]."),
        click.option("--corpus", type=PATH, help="The evaluation text, if it is not found by itself; its hash is checked."),
        click.option("--calibration", type=PATH, help="The calibration text, if it is not found by itself; its hash is checked."),
    ):
        command = option(command)
    return offload_options(command)


def offload_options(command: _F) -> _F:
    """Where layers go; a protocol may fix it."""
    for option in (
        click.option("--n-gpu-layers", type=int, default=0, show_default=True, help="Layers to offload; recorded with the result."),
        click.option("--main-gpu", type=int, default=0, show_default=True, help="The device for what is not split."),
        click.option("--tensor-split", metavar="A,B,...", default="", help="Shares of the devices."),
    ):
        command = option(command)
    return command


def dask_options(command: _F) -> _F:
    """Base and tiers run on the workers of a Dask cluster."""
    for option in (
        click.option("--dask", metavar="SCHEDULER",
                     help="Run base and tiers on the workers of this Dask scheduler: tls://host:port, or tcp:// on this machine."),
        click.option("--dask-resources", metavar="NAME=N,...", default="",
                     help="Dask resources that a task takes [default: GPU=1 for each device, where layers are offloaded]."),
        click.option("--dask-fetch", metavar="USER/MODEL[@REVISION]", default="",
                     help="Where workers get model files that are not on a path they share with this machine."),
    ):
        command = option(command)
    return command


@contextmanager
def open_dask(scheduler: str | None, resources: str, fetch: str) -> Iterator[Elsewhere | None]:
    """The cluster that the options name; None where they name none.

    Raises:
        InputError: options that are not sound, or no scheduler to use them with.
        EnvironmentFault: the cluster cannot be reached.
    """
    from quantkit.job.dask_cluster import connect
    from quantkit.job.dask_options import read_dask

    if scheduler is None and (resources or fetch):
        raise InputError("expected --dask with a scheduler beside --dask-resources or --dask-fetch, got none: add it")
    with connect(read_dask(scheduler, resources, fetch) if scheduler is not None else None) as cluster:
        yield cluster


def measure_options(command: _F) -> _F:
    """What is measured beside rows, on request: each takes further passes."""
    for option in (
        click.option("--kld-weights", "weights", is_flag=True,
                     help="Each tier's weights alone, written as F32 and run in base's F32 arithmetic; 8 bytes a weight of disk."),
        click.option("--floors", is_flag=True,
                     help="Noise floors: base and each tier against themselves in the other arithmetic that the protocol lists."),
    ):
        command = option(command)
    return command


def read_offload(n_gpu_layers: int, main_gpu: int, tensor_split: str) -> Offload:
    """Offload options as one record.

    Raises:
        InputError: shares that are not numbers.
    """
    try:
        shares = tuple(float(share) for share in tensor_split.split(",")) if tensor_split else ()
    except ValueError as error:
        raise InputError(f"expected shares such as 3,1 for --tensor-split, got {tensor_split!r}: write one number "
                         "a device") from error
    return Offload(n_gpu_layers=n_gpu_layers, main_gpu=main_gpu, tensor_split=shares)


def run_options(*, n_workers: int, memory: str | None, corpus: Path | None, calibration: Path | None, n_gpu_layers: int,
                main_gpu: int, tensor_split: str, imatrix: Path | None = None, drop_files: bool = False, floors: bool = False,
                weights: bool = False, until: str | None = None, elsewhere: Elsewhere | None = None) -> RunOptions:
    """The engine options, and what is measured, as one record."""
    return RunOptions(n_workers=n_workers, corpus=corpus, calibration=calibration, imatrix=imatrix, drop_files=drop_files,
                      floors=floors, weights=weights, until=parse_until(until) if until else None,
                      offload=read_offload(n_gpu_layers, main_gpu, tensor_split),
                      audit=AuditOptions(memory_bytes=parse_bytes(memory) if memory else None, elsewhere=elsewhere))
