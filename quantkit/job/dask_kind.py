"""What a machine's rows depend on besides files and settings: rows are the same bits for one build on one kind of CPU only.

Everything that takes part in a row's arithmetic is compared: llama.cpp's libraries by their bytes (a library that was compiled
twice is two builds), this package's own code, numpy with the instructions that it found, the C library (its exponentials differ by
version and CPU), and the CPU's microarchitecture. Devices are compared where layers are offloaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import quantkit
from quantkit.core.files import sha256_file
from quantkit.engine.library import BuildFacts, build_facts, load_library
from quantkit.engine.worker import WorkerState

_CPU_KEYS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A build on a kind of CPU."""

    build: BuildFacts
    libraries: str
    quantkit: str
    numpy: str
    cpu: str
    system: str
    devices: tuple[str, ...]


def read_kind(state: WorkerState, *, n_gpu_layers: int) -> Kind:
    """Command: the kind of this process's machine."""
    lib = load_library()
    folder = Path(lib.__file__).parent / "lib"
    libraries = sorted(path for path in folder.iterdir() if ".so" in path.suffixes or path.suffix in {".dylib", ".dll"})
    build = build_facts(lib, n_gpu_layers)
    found = np.show_config(mode="dicts")["SIMD Extensions"]
    simd = [*found.get("baseline", ()), *found.get("found", ())]
    return Kind(build=build, libraries=_hash_files(libraries), quantkit=_hash_files(_own_code()),
                numpy=" ".join([np.__version__, *sorted(simd)]), cpu=_cpu(),
                system=" ".join([platform.system(), platform.machine(), *platform.libc_ver()]).strip(),
                devices=_devices(folder) if build.backend == "GPU" else ())


def differences(ours: Kind, theirs: Kind) -> list[str]:
    """What differs, one clause each; nothing for machines of one kind."""
    named = {**dataclasses.asdict(ours), **dataclasses.asdict(ours.build)}
    found = {**dataclasses.asdict(theirs), **dataclasses.asdict(theirs.build)}
    return [f"{name}: expected {_shown(named[name])}, found {_shown(found[name])}" for name in named
            if name != "build" and named[name] != found[name]]


def _shown(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _hash_files(paths: Iterable[Path]) -> str:
    """One hash over the names and bytes of some files; which of several copies of a name a link leads to does not matter."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()[:16]


def _own_code() -> list[Path]:
    """The files of this package that rows pass through."""
    package = Path(quantkit.__file__).parent
    return [path for floor in ("measure", "engine") for path in (package / floor).glob("*.py")] + [
        *(package / "job").glob("dask_*.py")]


def _cpu() -> str:
    """Vendor, family and model as Linux tells them; not the model's name, which differs by clock rate too."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return " ".join(facts[key] for key in _CPU_KEYS if key in facts)


def _devices(folder: Path) -> tuple[str, ...]:
    """What llama.cpp calls the devices that it sees."""
    path = next(path for path in sorted(folder.iterdir()) if path.name.split(".")[0] in {"libggml", "ggml"})
    base = next(path for path in sorted(folder.iterdir()) if path.name.split(".")[0] in {"libggml-base", "ggml-base"})
    registry, devices = ctypes.CDLL(str(path)), ctypes.CDLL(str(base))
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    devices.ggml_backend_dev_description.restype = ctypes.c_char_p
    devices.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    return tuple(devices.ggml_backend_dev_description(registry.ggml_backend_dev_get(i)).decode(errors="replace")
                 for i in range(registry.ggml_backend_dev_count()))
