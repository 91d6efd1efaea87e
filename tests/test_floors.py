"""The floors hold: who may import whom, where heavy libraries may load, how long files and functions may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("core", "spec", "measure", "engine", "job", "report", "cli")
HEAVY = {"llama_cpp", "pandas", "pyarrow", "matplotlib", "datasets", "huggingface_hub", "scipy", "gguf", "dask", "distributed"}
MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 65

SOURCES = sorted((ROOT / "quantkit").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path) -> str:
    """Dotted name of a source file below the checkout."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    """0 for core and up; -1 for the package itself, which every floor imports and which therefore imports no floor."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1].startswith("__"):
        return len(FLOORS) - 1 if parts[1:] == ["__main__"] else -1
    return FLOORS.index(parts[1])


def imports_of(node: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a statement names: `import`, `from ... import`, relative ones, `import_module("...")`."""
    if isinstance(node, ast.Import):
        yield from ((node, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = module.split(".")
        kept = len(parts) - node.level + is_package if node.level else 0
        origin = ".".join([*parts[:kept], *(node.module or "").split(".")]).rstrip(".")
        # `from quantkit import spec` names a floor in its second half
        yield from ((node, name) for name in sorted({f"{origin}.{alias.name}" if origin == "quantkit" else origin
                                                     for alias in node.names}))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        yield from ((node, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def all_imports(path: Path, source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, imported module, whether it runs on import of the file)."""
    module, is_package = module_of(path), path.name == "__init__.py"

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for where, name in imports_of(node, module, is_package=is_package):
            yield getattr(where, "lineno", 0), name, at_import
        inner = at_import and not isinstance(node, Function | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    yield from walk(ast.parse(source), True)


def faults_of_imports(path: Path, source: str) -> list[str]:
    """What a file imports against the rules, one sentence each."""
    module = module_of(path)
    faults = []
    for line, name, at_import in all_imports(path, source):
        where = f"{path.relative_to(ROOT)}:{line}"
        root = name.split(".")[0]
        if root == "quantkit" and name.split(".")[1:2] != ["__version__"] and floor_of(name) > floor_of(module):
            faults.append(f"{where} imports {name}, a floor above its own")
        if root == "llama_cpp" and not module.startswith("quantkit.engine."):
            faults.append(f"{where} imports llama_cpp: only quantkit/engine may")
        if root in HEAVY and at_import:
            faults.append(f"{where} imports {root} at module level: import it in the function that uses it")
    return faults


def faults_of_length(path: Path, source: str) -> list[str]:
    """Files and functions that have grown too long to read."""
    where = path.relative_to(ROOT)
    n_lines = len(source.splitlines())
    faults = [f"{where} has {n_lines} lines, more than {MAX_FILE_LINES}: split it"] if n_lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            n_body = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_body > MAX_FUNCTION_LINES:
                faults.append(f"{where}:{node.lineno} {node.name} has {n_body} lines, more than {MAX_FUNCTION_LINES}: split it")
    return faults


def faults_of_docstrings(path: Path, source: str) -> list[str]:
    """Modules, classes, functions and methods that are public and do not say what they are.

    For a method of one statement its class's docstring speaks.
    """
    tree = ast.parse(source)
    where = path.relative_to(ROOT)
    faults = [] if ast.get_docstring(tree) else [f"{where} has no docstring"]
    public: list[tuple[str, ast.ClassDef | Function]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            public.append((node.name, node))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            public += [(f"{node.name}.{item.name}", item) for item in node.body
                       if isinstance(item, Function) and not item.name.startswith("_") and len(item.body) > 1]
    faults += [f"{where}:{node.lineno} {name} has no docstring" for name, node in public if ast.get_docstring(node) is None]
    return faults


@pytest.mark.parametrize("check", [faults_of_imports, faults_of_length, faults_of_docstrings])
def test_package_keeps_the_rules(check: object) -> None:
    assert callable(check)
    faults = [fault for path in SOURCES for fault in check(path, path.read_text("utf-8"))]
    assert faults == [], "\n" + "\n".join(faults)


def test_every_folder_is_a_floor() -> None:
    folders = {path.relative_to(ROOT).parts[1] for path in SOURCES if len(path.relative_to(ROOT).parts) > 2}
    assert folders == set(FLOORS)


@pytest.mark.system
def test_importing_everything_loads_nothing_heavy() -> None:
    """What the reading of the sources cannot see: a heavy library that comes in through another one."""
    modules = [module_of(path) for path in SOURCES if path.name != "__main__.py"]
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nprint(*sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    assert (done.returncode, done.stdout) == (0, "\n")


FAULTY = [
    ("core/x.py", "from quantkit.spec import plan\n", "quantkit/core/x.py:1 imports quantkit.spec, a floor above its own"),
    ("core/x.py", "from quantkit import spec\n", "quantkit/core/x.py:1 imports quantkit.spec, a floor above its own"),
    ("spec/x.py", "def f():\n    from ..job.run import g, h\n",
     "quantkit/spec/x.py:2 imports quantkit.job.run, a floor above its own"),
    ("__init__.py", "from . import core\n", "quantkit/__init__.py:1 imports quantkit.core, a floor above its own"),
    ("job/x.py", "def f():\n    import llama_cpp.llama_cpp\n",
     "quantkit/job/x.py:2 imports llama_cpp: only quantkit/engine may"),
    ("measure/x.py", "if True:\n    from scipy.stats import t\n",
     "quantkit/measure/x.py:2 imports scipy at module level: import it in the function that uses it"),
    ("cli/x.py", "import importlib\nnp = importlib.import_module('pandas')\n",
     "quantkit/cli/x.py:2 imports pandas at module level: import it in the function that uses it"),
]


@pytest.mark.parametrize(("name", "source", "fault"), FAULTY, ids=[fault for _, _, fault in FAULTY])
def test_faulty_import_is_seen(name: str, source: str, fault: str) -> None:
    assert faults_of_imports(ROOT / "quantkit" / name, source) == [fault]


@pytest.mark.parametrize(("name", "source"), [
    ("job/x.py", "from quantkit import __version__\nfrom quantkit.job import y\nfrom . import z\nimport numpy as np\n"),
    ("engine/x.py", "def f():\n    import llama_cpp\n"),
    ("report/x.py", "from quantkit.core.files import sha256_file\ndef f():\n    import pandas as pd\n"),
])
def test_right_import_is_let_through(name: str, source: str) -> None:
    assert faults_of_imports(ROOT / "quantkit" / name, source) == []


def test_long_file_and_long_function_are_seen() -> None:
    source = "def f():\n" + "    pass\n" * 65 + "\n" * 300
    assert faults_of_length(ROOT / "quantkit/core/x.py", source) == [
        "quantkit/core/x.py has 366 lines, more than 320: split it",
        "quantkit/core/x.py:1 f has 66 lines, more than 65: split it",
    ]


def test_missing_docstring_is_seen() -> None:
    source = ("class A:\n    '''A.'''\n    def run(self):\n        a = 1\n        return a\n"
              "    def one(self): ...\n    def _x(self): ...\n"
              "def f(): ...\ndef _g(): ...\n")
    assert faults_of_docstrings(ROOT / "quantkit/core/x.py", source) == [
        "quantkit/core/x.py has no docstring",
        "quantkit/core/x.py:3 A.run has no docstring",
        "quantkit/core/x.py:8 f has no docstring",
    ]
