"""Checks of this machine: llama.cpp and its build, other libraries, and where files may be written."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quantkit.core.errors import EnvironmentFault
from quantkit.core.units import MIB, format_bytes
from quantkit.job.corpus import FOLDER_VARIABLE, cache_folder
from quantkit.job.doctor_case import Case, Finding, ok, problem, warning
from quantkit.job.manifest import LIBRARIES
from quantkit.job.memory import free_disk_bytes

_FAST = {"x86_64": "AVX2", "AMD64": "AVX2", "aarch64": "NEON", "arm64": "NEON"}  # without it kernels are several times slower
_TEMP_BYTES = 16 * MIB  # logs of workers without a run directory


def look_at_library(case: Case) -> Iterator[Finding]:
    """Whether llama.cpp loads, is the pinned version, and its structs are those of the binding; a worker tells."""
    build = case.build
    yield ok("llama.cpp", f"llama-cpp-python {build.llama_cpp_python}, llama.cpp {build.llama_cpp_commit}; struct sizes and "
                          "defaults are the pinned version's")


def look_at_build(case: Case) -> Iterator[Finding]:
    """Whether the build has the kernels of this machine, and the device that is asked for."""
    build, check = case.build, "build"
    features = re.findall(r"(\w+) = 1", build.system_info)
    found = f"{build.backend}, with {', '.join(features) or 'no kernels for this machine'}"
    fast = _FAST.get(platform.machine())
    if case.options.offload.n_gpu_layers and build.backend == "CPU":
        yield warning(check, f"{found}. Layers were to go to a device, and this build has none: they stay on the CPU",
                      "install llama-cpp-python with a backend for the device, or leave --n-gpu-layers out")
    elif fast and fast not in features:
        yield warning(check, f"{found}. It does not use {fast}: several times slower than it could be",
                      "install llama-cpp-python again so that it is compiled on this machine")
    else:
        yield ok(check, found)


def look_at_libraries(case: Case) -> Iterator[Finding]:
    """Whether everything that a manifest names is installed."""
    versions, missing = [], []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise EnvironmentFault(f"expected the packages that quantkit was installed with, missing {', '.join(missing)}: install "
                               "gguf-quantkit again")
    yield ok("libraries", f"Python {platform.python_version()}, {', '.join(versions)}")


def look_at_places(case: Case) -> Iterator[Finding]:
    """Whether temporary files and fetched texts have a place, and names of files can be told."""
    yield from _look_at_temp()
    if cache_folder() is None and not os.environ.get(FOLDER_VARIABLE):
        yield warning("home", "neither XDG_CACHE_HOME nor a home folder: texts from the hub cannot be kept",
                      f"set HOME, or {FOLDER_VARIABLE} to a folder that holds the texts")
    else:
        yield ok("home", f"texts are kept in {cache_folder() or os.environ[FOLDER_VARIABLE]}")
    encoding = sys.getfilesystemencoding()
    if encoding.lower().replace("-", "") != "utf8":
        yield warning("locale", f"file names are read as {encoding}: those with other letters are not found", "set LC_ALL=C.UTF-8")
    else:
        yield ok("locale", f"file names in {encoding}, output in {getattr(sys.stdout, 'encoding', None) or 'no encoding'}")


def _look_at_temp() -> Iterator[Finding]:
    check = "temporary files"
    try:
        folder = Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(prefix="quantkit-", dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        yield problem(check, EnvironmentFault(f"no temporary file can be written ({error.strerror or error}): set TMPDIR to a "
                                              "folder where one can"))
        return
    free = free_disk_bytes(folder)
    if free < _TEMP_BYTES:
        yield warning(check, f"{folder} has {format_bytes(free)} free", "free some space, or set TMPDIR to another folder")
    else:
        yield ok(check, f"{folder} can be written to, {format_bytes(free)} free")
