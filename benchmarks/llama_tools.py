"""llama.cpp's own programs, built once from the source inside the pinned llama-cpp-python, with the flags of its library.

usage: python benchmarks/llama_tools.py

Prints the folder that holds llama-perplexity, llama-quantize and llama-imatrix. They are built (about four minutes of one core)
where the cache has none for this version; the cache is $XDG_CACHE_HOME/quantkit/llama-tools, else ~/.cache/quantkit/llama-tools.
The source comes through pip, from wherever pip is set up to look.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from quantkit.engine.library import PINNED_VERSION

TOOLS = ("llama-perplexity", "llama-quantize", "llama-imatrix")
# What llama-cpp-python's CMakeLists.txt sets for its library, and only the three programs beside it.
FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_CURL=OFF",
         "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF")


def cache_folder() -> Path:
    """Where the programs of this version are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "quantkit" / "llama-tools" / PINNED_VERSION


def llama_tools(folder: Path | None = None) -> Path:
    """The folder with the three programs; builds them if they are not there."""
    target = folder or cache_folder()
    if all((target / "bin" / tool).exists() for tool in TOOLS):
        return target / "bin"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:  # a build that is cut short leaves no half of one
        build = Path(scratch) / "build"
        source = fetch_source(Path(scratch))
        call("cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", *FLAGS)
        call("cmake", "--build", build, "--target", *TOOLS, "-j", str(os.cpu_count()))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (build / "bin").rename(target / "bin")
    return target / "bin"


def fetch_source(scratch: Path) -> Path:
    """llama.cpp's source tree, out of the source package of llama-cpp-python."""
    call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", scratch,
         f"llama-cpp-python=={PINNED_VERSION}")
    with tarfile.open(next(scratch.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(scratch, filter="data")
    return next(scratch.glob("llama_cpp_python-*/vendor/llama.cpp"))


def call(*command: str | Path) -> None:
    """Run a step; its output is shown only if it fails."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command[:3]))} ... failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    print(llama_tools())
