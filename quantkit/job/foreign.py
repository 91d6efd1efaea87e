"""Files from strangers, read in a process that may die.

The rule: a file that this process wrote itself is read here; every other parquet file, importance matrix and reference pack is read
by a child with limits on memory and time. A decoder that crashes, unpacks without end or hangs on such a file is one `InputError`,
and this process goes on. The child starts on the first such file, some half a second, and serves all later ones.

What comes back is built from numbers and text by our own code in the child: the limits hold faults in, they are no wall against a
file that could take a decoder over.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from quantkit.core.errors import EngineCrash, EngineKilled, ImatrixError, InputError, QuantkitError
from quantkit.core.files import temporary_folder
from quantkit.core.units import GIB, MIB, format_bytes
from quantkit.engine.pool import Worker
from quantkit.engine.worker import Reply, WorkerState
from quantkit.spec.imatrix_file import Imatrix
from quantkit.spec.imatrix_file import read_imatrix as _read_imatrix
from quantkit.spec.refpack_file import Refpack

T = TypeVar("T")
_Print = tuple[int, int, int, int]

_LIBRARIES_BYTES = 2 * GIB  # address space that numpy and pyarrow take before anything is read
_UNPACKED_BYTES = 2 * GIB  # 12 million rows of an audit
_BYTES_A_BYTE = 4  # of an importance matrix or a pack, which hold plain numbers: several copies at a time
_CPU_S, _BYTES_A_S = 60, 8 * MIB  # a hundred times slower than this machine reads
_WALL_FACTOR = 10  # of the CPU time: other work may hold the cores, a disk may be far away

_STEP = "read"

_written: dict[Path, _Print] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a child may take to read one file: address space in bytes, CPU seconds, seconds on the clock."""

    address_bytes: int
    cpu_s: int
    wall_s: float

    @classmethod
    def of(cls, size_bytes: int) -> Limits:
        """For a file of some size: far more than any honest one needs."""
        cpu_s = _CPU_S + size_bytes // _BYTES_A_S
        return cls(address_bytes=_LIBRARIES_BYTES + _UNPACKED_BYTES + _BYTES_A_BYTE * size_bytes, cpu_s=cpu_s,
                   wall_s=float(_WALL_FACTOR * cpu_s))


def remember_own(path: Path) -> None:
    """Note a file that this process has just written: it may be read here, as long as nobody changes it."""
    _written[path.absolute()] = _fingerprint(path)


def is_own(path: Path) -> bool:
    """Whether this process wrote the file, and it is still that one."""
    held = _written.get(path.absolute())
    with contextlib.suppress(OSError):
        return held is not None and held == _fingerprint(path)
    return False


def read_in_worker(function: Callable[..., T], path: Path, limits: Limits | None = None, **arguments: Any) -> T:
    """`function(path, **arguments)` in a child process with limits.

    Args:
        function: of a module, so that the child finds it by name; what it returns is copied over.
        limits: by the file's size, if none are given.

    Raises:
        InputError: no such file, no regular one, or one that crashes its reader, or goes beyond the limits.
        QuantkitError: what the function raises.
    """
    size_bytes = require_regular(path)
    return _child.read(function, path, limits or Limits.of(size_bytes), arguments)  # type: ignore[no-any-return]


def read_imatrix(path: Path) -> Imatrix:
    """An importance matrix of either format, see `spec.imatrix_file.read_imatrix`."""
    try:
        matrix = read_in_worker(_plain_imatrix, path)
    except ImatrixError:
        raise
    except InputError as error:
        raise ImatrixError(f"expected an importance matrix: {error}") from error
    return dataclasses.replace(matrix, entries=MappingProxyType(matrix.entries))


def open_refpack(path: Path, *, check_rows: bool = False) -> Refpack:
    """A reference pack, its numbers checked, see `spec.refpack_file.Refpack`; and its encoded rows, if asked for."""
    return _open_pack(path, check_rows) if is_own(path) else read_in_worker(_open_pack, path, check_rows=check_rows)


@contextlib.contextmanager
def reading_records(where: str | Path) -> Iterator[None]:
    """Whatever records that make no sense raise in the code that reads or tells them is one sentence.

    Raises:
        InputError: instead.
    """
    try:
        yield
    except QuantkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        words = " ".join(str(error).split())[:200]
        raise InputError(f"the records of the run in {where} make no sense ({type(error).__name__}: {words!a}): they are damaged "
                         "or of another version; fetch the bundle again, or run the same command again") from error


def require_regular(path: Path) -> int:
    """The size of a regular file, in bytes: a pipe would never end, a device never begin.

    Raises:
        InputError: there is none.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}: check the path") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"expected a regular file, got {path}, which is a folder, a pipe or a device: give the file itself")
    return found.st_size


def _plain_imatrix(path: Path) -> Imatrix:
    """A matrix that can be sent: a read-only view of its entries cannot."""
    matrix = _read_imatrix(path)
    return dataclasses.replace(matrix, entries=dict(matrix.entries))


def _open_pack(path: Path, check_rows: bool) -> Refpack:
    pack = Refpack(path)
    if check_rows:
        pack.check_rows()
    return pack


class _Child:
    """The one reading process. It is no part of a pool: it has limits, and its death is the file's fault."""

    def __init__(self) -> None:
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._worker: Worker | None = None

    def read(self, function: Callable[..., Any], path: Path, limits: Limits, arguments: dict[str, Any]) -> Any:
        """See `read_in_worker`."""
        if self._scratch is None or self._worker is None:
            self._scratch = temporary_folder()
            self._worker = Worker(0, Path(self._scratch.name))
            atexit.register(self.close)
        worker = self._worker
        try:
            worker.send(_STEP, _read_limited, {"function": function, "path": path, "limits": limits, "arguments": arguments})
            if not worker.pipe.poll(limits.wall_s):
                worker.kill()
                raise InputError(f"{path} was not read within {limits.wall_s:.0f} s, which is far beyond what a sound file takes: "
                                 "it is damaged or hostile, or its disk does not answer; fetch it again")
            kind, value = worker.receive()
        except EngineKilled:  # its own limits end it otherwise
            raise
        except EngineCrash as error:
            how = str(error).removeprefix(f"{_STEP}: ").partition(". Last lines of its log")[0]
            raise InputError(f"{path} was too much for the process that read it ({how}): the file is damaged or hostile; fetch or "
                             "make it again") from error
        except BaseException:
            worker.kill()  # whatever it still says must not answer the next question
            raise
        if kind is Reply.ERROR:
            raise value
        return value

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._worker = self._scratch = None


_child = _Child()


def _read_limited(state: WorkerState, *, function: Callable[..., Any], path: Path, limits: Limits,
                  arguments: dict[str, Any]) -> Any:
    """Command: call a reader below the limits."""
    _set_limits(limits)
    try:
        return function(path, **arguments)
    except MemoryError:
        raise InputError(f"{path} needs more than {format_bytes(limits.address_bytes)} of memory to read, far beyond what a sound "
                         "file takes: it is damaged or hostile; fetch or make it again") from None
    except QuantkitError:
        raise
    except Exception as error:  # whatever a damaged file makes a reader raise is the file's fault
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged; fetch or make it "
                         "again") from None


def _set_limits(limits: Limits) -> None:
    """Soft limits of this process, anew for each file; not every system knows both."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + limits.cpu_s
    for kind, limit in ((resource.RLIMIT_AS, limits.address_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def _fingerprint(path: Path) -> _Print:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
