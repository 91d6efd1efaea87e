"""The job where little is given: no home, no terminal, the C locale, a package that cannot be written to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.core.files import sha256_file
from quantkit.job.ladder import RunOptions, run_ladder
from quantkit.job.progress import Silent
from quantkit.spec.protocol import load_protocol
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SETTINGS = ["eval.chunks=spread", "eval.n_chunk=8"]
C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package in a folder that nobody may write to."""
    folder = tmp_path / "read only"
    shutil.copytree(ROOT / "quantkit", folder / "quantkit", ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
    shutil.copytree(ROOT / "protocols", folder / "protocols")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)
    return folder


def quantkit(package: Path, folder: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One command with next to no environment, without a terminal."""
    code = "from quantkit.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
                          encoding="utf-8", check=False,
                          env={"PATH": os.defpath, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **env})


def bundle_of(run: Path) -> dict[str, str]:
    """The result's id, and the files that were measured by hash; how reports look in the C locale is tested where they are made."""
    manifest = json.loads((run / "manifest.json").read_bytes())
    names = [name for name in manifest["files"] if not name.startswith("report/")]
    return {"result_id": manifest["result_id"], **{name: sha256_file(run / name) for name in names}}


@pytest.mark.engine
def test_a_bare_environment_gives_the_same_bundle(package: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in package.rglob("*")}
    base = tiny_model(tmp_path / "mödel 模型-BF16.gguf", n_embd=256, n_ff=256)[0]
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    done = quantkit(package, tmp_path, "run", "-b", base, "-p", "demo-v1", *words, "--tiers", "Q8_0", "-o", tmp_path / "a rün",
                    **C_LOCALE)
    assert done.returncode == 0, done.stderr
    assert "mödel 模型-Q8\\_0.gguf" in done.stdout or "mödel 模型-Q8_0.gguf" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # nothing is drawn where there is no terminal
    assert {path: path.stat().st_mtime_ns for path in package.rglob("*")} == before

    result = run_ladder(base, load_protocol("demo-v1", SETTINGS), tmp_path / "here", ["Q8_0"], Silent(), RunOptions())
    assert bundle_of(tmp_path / "a rün") == bundle_of(result.folder.path)


@pytest.mark.parametrize("env", [C_LOCALE, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}],
                         ids=["ascii", "utf-8 mode", "ascii streams"])
def test_names_of_any_script_are_read_and_shown_in_the_c_locale(tmp_path: Path, env: dict[str, str]) -> None:
    base = tiny_model(tmp_path / "mödel 模型.gguf", metadata={"general.name": "Mödel 模型"})[0]
    done = quantkit(ROOT, tmp_path, "show", base, **env)
    assert done.returncode == 0, done.stderr
    assert "general.name" in done.stdout or "name" in done.stdout
    missing = quantkit(ROOT, tmp_path, "show", tmp_path / "fehlt ü.gguf", **env)
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False), missing.stderr


def test_without_a_home_a_text_that_must_be_fetched_says_what_to_set(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=256)[0]
    code = ("import pwd, sys\n"
            "def none(uid): raise KeyError(uid)\n"
            "pwd.getpwuid = none\n"
            "from quantkit.cli.main import main; main(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", code, "audit", base, "-b", base, "-p", "wikitext2-quick-v1", "-o", "out"],
                          cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False,
                          env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2, done.stderr
    assert "found neither XDG_CACHE_HOME nor a home folder: set one of them" in done.stderr
    assert not (tmp_path / "out").exists()
