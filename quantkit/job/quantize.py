"""One tier: from the base and a plan to a validated file, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import EngineError
from quantkit.core.files import atomic_path, refuse_overwrite, require_space, sha256_file, tell_no_room
from quantkit.core.units import MIB
from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import QuantizeProgress, quantize
from quantkit.job.evaluation import n_cores
from quantkit.job.progress import Progress
from quantkit.job.tensor_check import TensorError, check_quantized
from quantkit.spec.imatrix_file import Imatrix, base_names, floored
from quantkit.spec.model import ModelInfo
from quantkit.spec.plan import Plan, as_mapping
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Importances:
    """A matrix made ready for the library: no zeros; what had to be mended is told.

    file, datasets: base names; a folder's name tells about a computer. n_entries: of the file, used here or not.
    zero_columns: tensor to the number of columns never hit, floored to a fraction of the tensor's mean.
    missing_experts: tensor to its experts never hit, neutral (1).
    """

    file: str
    sha256: str
    n_entries: int
    values: Mapping[str, npt.NDArray[np.float32]]
    datasets: tuple[str, ...]
    chunk_count: int
    zero_columns: Mapping[str, int]
    missing_experts: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTier:
    """What a finished quantization leaves on record."""

    tier: str
    file: str
    size_bytes: int
    sha256: str
    errors: tuple[TensorError, ...]


def prepare_importances(path: Path, imatrix: Imatrix, names: Sequence[str], zero_floor: float) -> Importances:
    """The entries of some tensors, floored."""
    values, zeros, missing = {}, {}, {}
    for name in names:
        if name not in imatrix.entries:
            continue
        ready = floored(imatrix.entries[name], zero_floor)
        values[name] = ready.values
        if ready.n_zero_columns:
            zeros[name] = ready.n_zero_columns
        if ready.missing_experts:
            missing[name] = ready.missing_experts
    return Importances(file=path.name, sha256=sha256_file(path), n_entries=len(imatrix.entries), values=values,
                       datasets=base_names(imatrix.datasets), chunk_count=imatrix.chunk_count, zero_columns=zeros,
                       missing_experts=missing)


def quantize_tier(pool: WorkerPool, base: ModelInfo, plan: Plan, target: Path, importances: Importances | None, progress: Progress,
                  *, force: bool = False, n_threads: int = 0) -> QuantizedTier:
    """Quantize under a temporary name, validate, rename.

    Args:
        target: never one of the base's files, by whatever path; an existing file only with `force`.
        importances: None where the plan needs none and none is wanted.
        n_threads: 0 for one a core; the bytes do not depend on it.

    Raises:
        InputError: the target is an input, or exists.
        NoSpace: the file will not fit.
        EngineError, EngineCrash: the library failed, or wrote something else than planned; the target is as it was before.
    """
    refuse_overwrite(target, base.header.parts, force=force)
    header_bytes = base.header.data_offset[0] + MIB
    require_space(target.parent, plan.tensor_bytes + header_bytes, f"tier {plan.tier}")
    progress.start(f"quantize {plan.tier}", len(plan.rows))
    done = 0

    def advance(item: QuantizeProgress) -> None:
        nonlocal done
        progress.advance(item.n_done - done)
        done = item.n_done

    with atomic_path(target) as temp:
        try:
            pool.call(f"quantize {plan.tier}", quantize, on_item=advance, source=base.header.path, target=temp,
                      ftype=FTYPES[plan.ftype].id, n_threads=n_threads or n_cores(),
                      patterns={o.pattern: TENSOR_TYPES[o.type].id for o in plan.override_patterns()},
                      imatrix=importances.values if importances else {}, metadata=_provenance(importances))
        except EngineError as error:
            tell_no_room(target, plan.tensor_bytes - (temp.stat().st_size if temp.exists() else 0), error)
            raise
        errors = check_quantized(base.header, temp, as_mapping(plan.rows))
        sha256, size_bytes = sha256_file(temp), temp.stat().st_size
    progress.advance(len(plan.rows) - done)
    progress.finish()
    return QuantizedTier(tier=plan.tier, file=target.name, size_bytes=size_bytes, sha256=sha256, errors=tuple(errors))


def _provenance(importances: Importances | None) -> dict[str, int | str]:
    """The keys that llama-quantize writes (the library call does not), and the matrix's hash; no folder's name.

    Source: tools/quantize/quantize.cpp, LLM_KV_QUANTIZE_IMATRIX_*; like there, what a legacy file does not say is left out.
    """
    if importances is None:
        return {}
    facts: dict[str, int | str] = {
        "quantize.imatrix.file": _short(importances.file),
        "quantize.imatrix.dataset": _short(", ".join(importances.datasets)),
        "quantize.imatrix.entries_count": importances.n_entries,
        "quantize.imatrix.chunks_count": importances.chunk_count,
        "quantize.imatrix.sha256": importances.sha256,
    }
    return {key: value for key, value in facts.items() if value not in (0, "")}


def _short(text: str) -> str:
    """What fits into the library's 128 bytes."""
    return text.encode()[:120].decode(errors="ignore")
