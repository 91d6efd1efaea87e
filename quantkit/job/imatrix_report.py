"""What is in an importance matrix, in numbers, beside the model that it is for if that is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.core.errors import ImatrixError
from quantkit.core.files import is_same_file, sha256_file
from quantkit.job.foreign import read_imatrix
from quantkit.job.imatrix import collection_targets
from quantkit.measure.importance import TensorImportance, describe_importances
from quantkit.spec.gguf_header import read_header
from quantkit.spec.imatrix_file import Imatrix, base_names
from quantkit.spec.model import describe_model


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCoverage:
    """Both ways: matrices of the base that may be quantized and have no entry, entries that are none of its matrices."""

    base: str
    n_matrix: int
    n_matched: int
    without_entry: tuple[str, ...]
    lookups: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong_length: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImatrixReport:
    """One matrix file. `sizes` in tokens; a legacy file says no chunk size (0)."""

    file: str
    sha256: str
    legacy: bool
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int
    tensors: tuple[TensorImportance, ...]
    coverage: BaseCoverage | None

    @property
    def origin(self) -> str:
        """Where it comes from, one line."""
        size = f" of {self.chunk_size} tokens" if self.chunk_size else ""
        return f"{', '.join(self.datasets) or 'unknown text'} · {self.chunk_count} chunks{size} · sha256 {self.sha256[:12]}"


def read_report(path: Path, base: Path | None = None) -> ImatrixReport:
    """Read a matrix of either format and describe it.

    Raises:
        ImatrixError: it is none, or is damaged. GgufError: the base is no model.
    """
    if base is not None and is_same_file(path, base):
        raise ImatrixError(f"expected an importance matrix and the model that it is for, got {path} for both: give two files")
    imatrix = read_imatrix(path)
    return ImatrixReport(file=path.name, sha256=sha256_file(path), legacy=imatrix.legacy, datasets=base_names(imatrix.datasets),
                         chunk_count=imatrix.chunk_count, chunk_size=imatrix.chunk_size, tensors=describe_importances(imatrix),
                         coverage=_cover(imatrix, base) if base is not None else None)


def _cover(imatrix: Imatrix, base: Path) -> BaseCoverage:
    model = describe_model(read_header(base))
    wanted = collection_targets(model, output=True, mtp=True)
    lengths = {t.name: t.shape[0] * (t.shape[2] if len(t.shape) > 2 else 1) for t in model.header.tensors}
    required = [t.name for t in model.header.tensors if t.name in wanted.required]
    return BaseCoverage(
        base=base.name, n_matrix=len(required), n_matched=sum(name in imatrix.entries for name in required),
        without_entry=tuple(name for name in required if name not in imatrix.entries), lookups=wanted.lookups,
        unknown=tuple(name for name in imatrix.entries if name not in lengths),
        wrong_length=tuple(name for name, e in imatrix.entries.items() if name in lengths and e.n_values != lengths[name]))
