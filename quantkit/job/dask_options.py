"""Where the tasks of a run go, as it was asked for: judged before anything is connected to.

Dask unpickles what it receives, so whoever can speak to a scheduler, or pose as one, runs code. It is spoken with over TLS, where
both sides show certificates, or on this machine alone.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from quantkit.core.errors import InputError
from quantkit.engine.settings import Offload

_DEFAULT_PORT = 8786


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskOptions:
    """A scheduler, and what its workers are asked for.

    Attributes:
        resources: abstract resources of Dask that each task takes; empty for those that the offload implies.
        fetch_from: `user/model` or `user/model@revision`: where a worker gets model files that it does not find; "" for nowhere.
    """

    scheduler: str
    resources: Mapping[str, float]
    fetch_from: str = ""


def read_dask(scheduler: str, resources: str = "", fetch_from: str = "") -> DaskOptions:
    """The options as one record.

    Raises:
        InputError: an address that is neither TLS nor on this machine, or resources that are not NAME=NUMBER.
    """
    return DaskOptions(scheduler=check_scheduler(scheduler), resources=parse_resources(resources), fetch_from=fetch_from)


def check_scheduler(address: str) -> str:
    """The address with its scheme and port; Dask's own port where none is given.

    Raises:
        InputError: not an address, or one that is neither TLS nor on this machine.
    """
    full = address if "://" in address else f"tcp://{address}"
    try:
        parts = urlsplit(full)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORT
    except ValueError:
        host, port = "", 0
    if not host or parts.path.strip("/") or parts.scheme not in ("tcp", "tls"):
        raise InputError("expected the address of a Dask scheduler for --dask, such as tls://host:8786 or tcp://127.0.0.1:8786, "
                         f"got {address!r}: give it as the scheduler printed it")
    if not is_trusted(full):
        raise InputError("expected a Dask scheduler that is reached over TLS (tls://host:port) or on this machine "
                         f"(tcp://127.0.0.1:port, ::1, localhost), got {address}: Dask executes what it is sent; give the "
                         "scheduler certificates, or start one here")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}"


def is_trusted(address: str) -> bool:
    """Whether an address with a scheme is one of TLS, or of this machine."""
    parts = urlsplit(address)
    return parts.scheme == "tls" or (parts.scheme == "tcp" and _is_loopback(parts.hostname or ""))


def parse_resources(text: str) -> dict[str, float]:
    """`GPU=1,DISK=2` as numbers by name; nothing for an empty text.

    Raises:
        InputError: a part that is not NAME=NUMBER, with a positive number.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, number = part.partition("=")
        try:
            amount = float(number) if sign and name.strip() else 0.0
        except ValueError:
            amount = 0.0
        if not (amount > 0 and math.isfinite(amount)):
            raise InputError(f"expected resources such as GPU=1 for --dask-resources, got {text!r}: write a name "
                             "and an amount each")
        found[name.strip()] = amount
    return found


def task_resources(options: DaskOptions, offload: Offload) -> dict[str, float]:
    """What each task takes: as asked for, or one GPU for every device that layers are offloaded to."""
    if options.resources or not offload.n_gpu_layers:
        return dict(options.resources)
    return {"GPU": float(max(1, sum(share > 0 for share in offload.tensor_split)))}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if host != "localhost":
        return False
    try:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False
