"""Blocks and roles of a model's tensors, by name, and whether the three witnesses of an MTP head agree.

Blocks are `blk.0` up. The trunk comes first; the NextN (MTP) blocks, told by their `blk.N.nextn.*` tensors, come last, and
`<arch>.block_count` counts both. A head-only file keeps these numbers and holds no trunk block.

A tensor has one role. "mtp" is everything in an MTP block, an output matrix of its own included; "embedding" and "output" are
the matrices at the two ends; "trunk" is the rest, the last norm included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_header import GgufHeader

Role = Literal["embedding", "output", "mtp", "trunk"]

_MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS
_BLOCK = re.compile(r"blk\.([0-9]+)\.")
_NEXTN = re.compile(r"blk\.[0-9]+\.nextn\.")
_EMBEDDING = ("token_embd.", "per_layer_token_embd.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How many blocks there are: `n_block` and `n_claimed` MTP ones by the keys, `present` and `nextn` by the tensors."""

    n_block: int
    n_claimed: int
    n_trunk: int
    present: frozenset[int]
    nextn: tuple[int, ...]

    @property
    def is_head_only(self) -> bool:
        """Whether the file holds an MTP head and no trunk block."""
        return bool(self.nextn) and min(self.present) >= self.n_trunk


def block_of(name: str) -> int | None:
    """Number of the block that a tensor belongs to; None outside the blocks."""
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def is_mtp(name: str, n_trunk_block: int) -> bool:
    """Whether a tensor belongs to an MTP block: everything in the blocks after the trunk, not only `nextn.*`."""
    block = block_of(name)
    return name.startswith("nextn.") if block is None else block >= n_trunk_block


def role_of(name: str, n_trunk_block: int) -> Role:
    """The one role of a tensor."""
    if is_mtp(name, n_trunk_block):
        return "mtp"
    if name.startswith(_EMBEDDING):
        return "embedding"
    return "output" if name.startswith("output.") else "trunk"


def kind_of(name: str, role: Role) -> str:
    """What tensors of all blocks have in common: `token_embd`, `ffn_down` of whatever trunk block, or `MTP block`."""
    return "MTP block" if role == "mtp" else _BLOCK.sub("", name).removesuffix(".weight")


def count_blocks(header: GgufHeader, architecture: str) -> Blocks:
    """Trunk and MTP blocks. Tensors decide where the trunk ends; the keys only where there are no nextn tensors.

    Raises:
        GgufError: a count that no model has.
    """
    present = frozenset(b for t in header.tensors if (b := block_of(t.name)) is not None)
    nextn = tuple(sorted({b for t in header.tensors if _NEXTN.match(t.name) and (b := block_of(t.name)) is not None}))
    n_seen = max(present, default=-1) + 1
    n_block = header.get(f"{architecture}.block_count", int)
    n_block = n_seen if n_block is None else n_block
    n_claimed = header.get(f"{architecture}.nextn_predict_layers", int) or 0
    for what, n in (("the number of blocks in the tensor names", n_seen), (f"{architecture}.block_count", n_block),
                    (f"{architecture}.nextn_predict_layers", n_claimed)):
        if not 0 <= n <= _MAX_BLOCKS:
            raise GgufError(f"{header.path}: expected {what} to be from 0 to {_MAX_BLOCKS}, got {n}; fetch or convert the file "
                            "again")
    n_trunk = nextn[0] if nextn else max(0, min(n_block - n_claimed, n_seen))
    return Blocks(n_block=n_block, n_claimed=n_claimed, n_trunk=n_trunk, present=present, nextn=nextn)


def block_problems(header: GgufHeader, architecture: str, blocks: Blocks) -> list[str]:
    """Contradictions: key, block count and tensors must tell the same MTP blocks, and every block must have tensors."""
    problems = []
    count_key, nextn_key = f"{architecture}.block_count", f"{architecture}.nextn_predict_layers"
    if count_key not in header.metadata:
        problems.append(f"expected a key {count_key}, got none; the tensor names tell {_counted(range(blocks.n_block))}")
    if stray := [f"{key[:80]!a}" for key in header.metadata if key.endswith(".nextn_predict_layers") and key != nextn_key]:
        problems.append(f"expected the key {nextn_key}, got {', '.join(stray[:3])}, which llama.cpp does not read")
    expected = range(max(0, blocks.n_block - blocks.n_claimed), blocks.n_block)
    if tuple(expected) != blocks.nextn:
        problems.append(f"{nextn_key} is {blocks.n_claimed} and {count_key} is {blocks.n_block}, so nextn tensors are expected "
                        f"in {_counted(expected)}, but found in {_counted(blocks.nextn)}: {_cause(blocks)}")
    wanted = range(blocks.n_trunk if blocks.is_head_only else 0, blocks.n_block)
    if missing := sorted(set(wanted) - blocks.present):
        problems.append(f"{count_key} is {blocks.n_block}, but there are no tensors in {_counted(missing)}")
    if beyond := sorted(blocks.present - set(wanted)):
        problems.append(f"{count_key} is {blocks.n_block}, but there are tensors in {_counted(beyond)}")
    return problems


def _cause(blocks: Blocks) -> str:
    if not blocks.nextn:
        return "the MTP head was dropped by the converter, or it is counted without being there"
    if blocks.nextn[-1] >= blocks.n_block:
        return "the block count leaves the MTP blocks out"
    return "llama.cpp takes these blocks for trunk blocks" if not blocks.n_claimed else "the count of MTP blocks is wrong"


def _counted(blocks: Sequence[int]) -> str:
    """`no block`, `block 4`, `blocks 0 to 3`, `blocks 1, 2, 5`."""
    if not blocks:
        return "no block"
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    if blocks[-1] - blocks[0] == len(blocks) - 1:
        return f"blocks {blocks[0]} to {blocks[-1]}"
    return f"blocks {', '.join(map(str, blocks[:8]))}{' and more' if len(blocks) > 8 else ''}"
