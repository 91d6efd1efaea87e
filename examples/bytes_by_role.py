"""What the bytes of a GGUF are for: embedding, trunk, output, MTP block. Only the header is read.

    python examples/bytes_by_role.py MODEL.gguf

Two files of one size can spend it differently: hence bits per weight are stated for the whole file and for the trunk.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quantkit.core.units import format_bytes
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import bits_per_weight, describe_model


def main(path: Path) -> None:
    """Print one line for each role that the file has."""
    model = describe_model(read_header(path))
    for role in sorted(set(model.roles.values())):
        tensors = [tensor for tensor in model.header.tensors if model.roles[tensor.name] == role]
        size_bytes = sum(tensor.size_bytes for tensor in tensors)
        print(f"{role:10} {len(tensors):4} tensors  {format_bytes(size_bytes):>10}  {bits_per_weight(tensors):7.4f} bpw")
    print(f"{'whole file':10} {len(model.header.tensors):4} tensors  {'':>10}  {model.bpw:7.4f} bpw")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
