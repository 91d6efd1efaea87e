"""quantkit: quantize a BF16 GGUF under a frozen protocol and measure what each tier keeps.

    quantkit.load_run(path)    a run as pandas DataFrames: tiers, rows, pairs, plan, slices, mtp
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Loaded when it is asked for: every module imports this package first.
_LAZY = {"load_run": "quantkit.report.notebook"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
