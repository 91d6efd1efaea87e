"""What the package itself never does: run what it reads, unpickle it, fetch by other ways than the one client."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "quantkit").rglob("*.py"))

# Call, or module, and the files that may have it.
NEVER_CALLED = [
    "eval", "exec", "compile", "os.system", "os.popen", "os.execv", "os.spawnv", "pickle.load", "pickle.loads", "torch.load",
    "yaml.load", "yaml.unsafe_load", "joblib.load", "marshal.loads", "pandas.read_pickle", "pd.read_pickle", "pd.eval",
    "shelve.open", "subprocess.run", "subprocess.Popen", "subprocess.check_output", "Markup", "extractall", "urlretrieve"]
NEVER_IMPORTED = ["pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch", "yaml", "subprocess", "telnetlib",
                  "ftplib", "requests", "httpx", "tarfile", "zipfile"]
FORBIDDEN_CALLS: dict[str, set[str]] = {
    **{call: set() for call in NEVER_CALLED}, "ctypes.CDLL": {"library.py", "dask_kind.py"}, "os.execve": {"main.py"}}
FORBIDDEN_MODULES: dict[str, set[str]] = {
    **{module: set() for module in NEVER_IMPORTED},
    "urllib.request": {"smoke.py"},  # of a server on this machine that the worker itself started
    "xml": {"junit.py"},  # written there, never read
    "socket": {"smoke.py", "leaks.py", "dask_options.py", "dask_worker.py"},
    "multiprocessing": {"pool.py", "worker.py", "dask_worker.py"},
}


def faults_of(name: str, source: str) -> list[str]:
    """What a file does that it may not, one text each."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        for module in _modules(node):
            if any(module == m or module.startswith(m + ".") for m, files in FORBIDDEN_MODULES.items() if name not in files):
                faults.append(f"{name}:{line} imports {module}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            faults += [f"{name}:{line} calls {called}" for call, files in FORBIDDEN_CALLS.items()
                       if (called == call or called.endswith("." + call)) and name not in files and called != "re.compile"]
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg, value) in {("allow_pickle", "True"), ("shell", "True"), ("trust_remote_code", "True"),
                                            ("verify", "False"), ("autoescape", "False")}:
                    faults.append(f"{name}:{line} passes {keyword.arg}={value}")
            if called in {"np.load", "numpy.load"} and "allow_pickle=False" not in [ast.unparse(k) for k in node.keywords]:
                faults.append(f"{name}:{line} calls np.load without allow_pickle=False")
            if called.endswith("Environment") and "Sandboxed" not in called:
                faults.append(f"{name}:{line} makes a jinja2 environment without a sandbox")
    return faults


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_nothing_that_is_read_is_run_or_unpickled() -> None:
    assert [fault for path in SOURCES for fault in faults_of(path.name, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(("source", "fault"), [
    ("import pickle\n", "x.py:1 imports pickle"),
    ("from subprocess import run\n", "x.py:1 imports subprocess"),
    ("eval('1')\n", "x.py:1 calls eval"),
    ("os.system('true')\n", "x.py:1 calls os.system"),
    ("np.load(path)\n", "x.py:1 calls np.load without allow_pickle=False"),
    ("np.load(path, allow_pickle=True)\n", "x.py:1 passes allow_pickle=True"),
    ("jinja2.Environment()\n", "x.py:1 makes a jinja2 environment without a sandbox"),
    ("load_dataset('a/b', trust_remote_code=True)\n", "x.py:1 passes trust_remote_code=True"),
])
def test_what_is_forbidden_is_seen(source: str, fault: str) -> None:
    assert fault in faults_of("x.py", source)


def test_what_only_looks_like_it_is_let_through() -> None:
    assert faults_of("x.py", "re.compile('x')\nimport json\nprotocol.eval.n_ctx\nnp.load(f, allow_pickle=False)\n") == []


def test_no_address_is_plain_http() -> None:
    found = [(path.name, match[0]) for path in SOURCES for match in re.finditer(r"http://[\w.{}:]+", path.read_text("utf-8"))
             if not match[0].startswith(("http://127.0.0.1", "http://www.w3.org"))]
    assert found == []


def test_data_sets_come_without_code() -> None:
    """Before version 4 the library ran the script that a data set brought along, and protocols name data sets."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    floor = next(re.fullmatch(r"datasets>=(\d+).*", name) for name in wanted if name.startswith("datasets"))
    assert floor is not None
    assert int(floor[1]) >= 4
