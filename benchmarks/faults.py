"""What is done to the tool, and what it does then.

usage: python benchmarks/faults.py inputs [--n 1000] [--seed 1]      damaged files through the verbs
       python benchmarks/faults.py kills [...]                       SIGKILL at random points of a run, and resumes
"""

from __future__ import annotations

import importlib
import sys

_PARTS = {"inputs": "faults_inputs", "kills": "faults_kills"}


def main(arguments: list[str]) -> int:
    """Hand over to the part that was named."""
    if not arguments or arguments[0] not in _PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    return int(importlib.import_module(_PARTS[arguments[0]]).main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
