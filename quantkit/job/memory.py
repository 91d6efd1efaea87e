"""How many tiers sit beside base in a worker, and the bound on memory that follows, said before the work.

    bound = mapped weights (shared by all workers)
          + n_workers * sum over the group's models of
                ( private weights + logits buffer n_vocab * n_scored * 4 + compute and cache allowance )

Private weights are the copies that CPU repacking makes of quantized matrices; an upper bound, since not every type has repacked
kernels on every CPU. The allowance per context is n_ubatch * (n_vocab + 16 n_embd) * 4 and 64 MiB; the library's own account of
what it allocated is noted once the models are open.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.core.units import MIB, format_bytes
from quantkit.engine.settings import ContextSettings
from quantkit.spec.model import ModelInfo

_CONTEXT_ALLOWANCE = 64 * MIB
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLayout:
    """The choice: tiers in groups that sit beside base, or one by one after a panel of base rows on disk."""

    groups: tuple[tuple[int, ...], ...]
    panel_n_chunk: int
    bound_bytes: int
    n_workers: int

    @property
    def uses_panels(self) -> bool:
        """Whether base's rows go to a scratch file."""
        return self.panel_n_chunk > 0

    def describe(self) -> str:
        """One line for people, printed before the work."""
        way = (f"base first, its rows of {self.panel_n_chunk} chunks a worker on disk, tiers one by one" if self.uses_panels
               else f"base and {len(self.groups[0])} tiers side by side, {len(self.groups)} group(s)")
        return f"{self.n_workers} workers, {way}, memory at most {format_bytes(self.bound_bytes)}"


def free_memory_bytes() -> int:
    """Memory that new work can have: what Linux calls MemAvailable; elsewhere three quarters of the physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4


def free_disk_bytes(folder: Path) -> int:
    """Free space where a folder lies."""
    return shutil.disk_usage(folder).free


def plan_layout(base: ModelInfo, tiers: Sequence[ModelInfo], settings: ContextSettings, *, n_workers: int, n_chunk: int,
                memory_bytes: int | None = None, scratch_bytes: int = 0, max_group: int = 1 << 20) -> AuditLayout:
    """Groups as large as memory allows; panels where base and one tier do not fit together.

    Args:
        memory_bytes: what may be used; by default nine tenths of what is free.
        scratch_bytes: free disk space for panels.
        max_group: the most tiers in a group, whatever memory allows.
    """
    budget = int(free_memory_bytes() * _SHARE_OF_FREE) if memory_bytes is None else memory_bytes
    n_scored = min(settings.n_batch, settings.n_ctx - 1 - settings.n_ctx // 2)
    cost = [_mapped(model) + n_workers * _private(model, settings, n_scored) for model in (base, *tiers)]
    groups: list[list[int]] = []
    used = 0
    for i, bytes_ in enumerate(cost[1:]):
        if not groups or used + bytes_ > budget or len(groups[-1]) == max_group:
            groups.append([])
            used = cost[0]
        groups[-1].append(i)
        used += bytes_
    if cost[0] + max(cost[1:]) <= budget or not scratch_bytes:
        bound = max(cost[0] + sum(cost[1 + i] for i in group) for group in groups)
        return AuditLayout(groups=tuple(map(tuple, groups)), panel_n_chunk=0, bound_bytes=bound, n_workers=n_workers)
    row_bytes = (base.n_vocab or 0) * 4 * (settings.n_ctx - 1 - settings.n_ctx // 2)
    panel = max(1, min(-(-n_chunk // n_workers), scratch_bytes // 2 // max(1, row_bytes * n_workers)))
    return AuditLayout(groups=(tuple(range(len(tiers))),), panel_n_chunk=panel, bound_bytes=max(cost),
                       n_workers=n_workers)


def bound_of_one(model: ModelInfo, settings: ContextSettings, *, n_workers: int) -> int:
    """The bound on memory where each worker has one model alone; see the module for its terms."""
    return _mapped(model) + n_workers * _private(model, settings, min(settings.n_batch, settings.n_ctx - 1 - settings.n_ctx // 2))


def _mapped(model: ModelInfo) -> int:
    return model.header.file_bytes


def _private(model: ModelInfo, settings: ContextSettings, n_scored: int) -> int:
    repacked = 0
    if settings.use_extra_bufts:
        repacked = sum(t.size_bytes for t in model.header.tensors if t.type.is_quantized and len(t.shape) > 1)
    n_vocab, n_embd = model.n_vocab or 0, model.n_embd or 0
    compute = settings.n_ubatch * (n_vocab + 16 * n_embd) * 4 + _CONTEXT_ALLOWANCE
    return repacked + n_vocab * n_scored * 4 + compute
