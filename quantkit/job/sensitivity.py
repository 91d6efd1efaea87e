"""What each tensor costs at each type: weights screened first, then base with one tensor changed, measured on the search chunks.

    screen     the importance-weighted squared error of sampled weights, for every type that was written
    anchors    two types of each group are measured: the nearest to the budget, and the lowest that is looked at
    the rest   is predicted from the screen, and measured when an allocation wants it: `measure_share`

All groups are quantized to a type at once, the first time that it is needed, and cut into one file each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.engine.pool import WorkerPool
from quantkit.engine.quantizer import quantize
from quantkit.job.evaluation import Subject
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances
from quantkit.job.search_shards import ShardStore
from quantkit.job.search_trials import ChunkSet, TrialRunner
from quantkit.job.tensor_check import check_quantized, read_rows
from quantkit.measure.search_stats import mean_se, predict_cost
from quantkit.spec.gguf_header import TensorInfo, read_header
from quantkit.spec.model import ModelInfo, block_of
from quantkit.spec.plan_records import ALIGNMENT, Override, anchored, tensor_size
from quantkit.spec.plan_rules import Choice, bits, kept_by_plan, raise_gate
from quantkit.spec.protocol import SearchSpec
from quantkit.spec.quantizable import is_quantizable, needs_imatrix
from quantkit.spec.search_records import Cost, Group
from quantkit.spec.tensor_types import FTYPES, TENSOR_TYPES

_N_SAMPLED_ROWS = 64
_FTYPE = "Q4_K_M"  # of files that are cut at once; any quantized one


class Pair(NamedTuple):
    """A group and a type."""

    group: str
    type: str


def make_groups(model: ModelInfo, spec: SearchSpec, lengths: Mapping[str, int]) -> dict[str, Group]:
    """What a search decides on: tensors that a plan may choose a type for and that the trunk's logits depend on.

    One group for each tensor, or for each role and band of trunk layers (`search.n_band`). Types drop out that a row's length does
    not allow, that need importances which are not there, or that lie below a floor. A group left without types is no group.

    Args:
        lengths: of the matrix, as `resolve_plan` takes it.
    """
    members: dict[str, list[TensorInfo]] = {}
    for tensor in model.header.tensors:
        if kept_by_plan(tensor, model.architecture) is None and model.roles[tensor.name] != "mtp":
            members.setdefault(_group_name(tensor.name, model, spec.n_band), []).append(tensor)
    groups = {}
    for name, tensors in members.items():
        types = [t for t in spec.types if all(_allowed(tensor, t, spec, lengths) for tensor in tensors)]
        if types:
            groups[name] = Group(name=name, tensors=tuple(t.name for t in tensors), n_elements=sum(t.n_elements for t in tensors),
                                 types=tuple(sorted(types, key=bits, reverse=True)))
    return groups


def _group_name(name: str, model: ModelInfo, n_band: int) -> str:
    block = block_of(name)
    if not n_band or block is None:
        return name
    return f"blk.*.{name.split('.', 2)[2]} band {min(n_band - 1, block * n_band // max(1, model.n_trunk_block))}"


def _allowed(tensor: TensorInfo, type_name: str, spec: SearchSpec, lengths: Mapping[str, int]) -> bool:
    if tensor.shape[0] % TENSOR_TYPES[type_name].block_size:
        return False
    if tensor.name not in lengths and needs_imatrix(tensor.name, type_name, "Q2_K_S"):
        return False
    floors = [bits(floor.at_least) for floor in spec.floors if fnmatchcase(tensor.name, floor.match)]
    return bits(type_name) >= max(floors, default=0.0) and raise_gate(tensor.name, Choice(type_name, "", False)).type == type_name


class Sensitivity:
    """Costs of groups at types, as far as they are known.

    Args:
        weights_types: are judged with their weights in the base's arithmetic.
    """

    def __init__(self, pool: WorkerPool, base: Subject, groups: Mapping[str, Group], weights_types: Sequence[str],
                 importances: Importances | None, store: ShardStore, runner: TrialRunner, chunks: ChunkSet, folder: Path,
                 progress: Progress) -> None:
        self._pool, self._base, self.groups, self._weights_types = pool, base, groups, set(weights_types)
        self._importances, self._store, self._runner, self._chunks = importances, store, runner, chunks
        self._folder, self._progress = folder, progress
        self._tensors = {t.name: t for t in base.model.header.tensors}
        self._errors: dict[Pair, float] = {}
        self._measured: dict[Pair, Cost] = {}

    @property
    def n_measured(self) -> int:
        """Pairs that were measured, in this start or an earlier one."""
        return len(self._measured)

    def size(self, pair: Pair) -> int:
        """Padded bytes of a group at a type."""
        sizes = [tensor_size(self._tensors[name].shape, pair.type) for name in self.groups[pair.group].tensors]
        return sum(n + -n % ALIGNMENT for n in sizes)

    def prepare(self, types: Iterable[str], wanted: Mapping[str, Sequence[str]] | None = None) -> None:
        """Write the files of some types, of all groups that may have them, and of what else is wanted; screen their weights.

        Args:
            wanted: type to the names of tensors that need it besides (an incumbent's choices).
        """
        needed: dict[str, list[str]] = {}
        for type_name in types:
            needed.setdefault(type_name, []).extend(g.name for g in self.groups.values() if type_name in g.types)
        for type_name, names in (wanted or {}).items():
            own = {g.name for g in self.groups.values() if set(g.tensors) & set(names)}
            needed.setdefault(type_name, []).extend(sorted(own - set(needed.get(type_name, ()))))
        todo = {t: [g for g in own if not self._store.path(g, t).exists()] for t, own in needed.items()}
        todo = {t: own for t, own in todo.items() if own}
        if todo:
            self._write_types(todo)
        for type_name in needed:
            for group in self.groups.values():
                pair = Pair(group.name, type_name)
                if pair not in self._errors and type_name in group.types and self._store.path(group.name, type_name).exists():
                    self._errors[pair] = self._weight_error(pair)

    def _write_types(self, todo: Mapping[str, Sequence[str]]) -> None:
        """Each type in whichever worker is free, with one thread: IQ types begin with seconds of one-threaded tables."""
        self._progress.start("quantize to " + " ".join(todo), len(todo))
        order = sorted(todo, key=bits)  # the slowest first
        tasks, targets = [], {}
        for type_name in order:
            tensors = {name for group in todo[type_name] for name in self.groups[group].tensors}
            expected = {t.name: type_name if t.name in tensors else t.type.name for t in self._base.model.header.tensors}
            target = targets[type_name] = self._folder / f"whole-{type_name}.gguf"
            values = self._importances.values if self._importances else {}
            tasks.append({"source": self._base.path, "target": target, "ftype": FTYPES[_FTYPE].id,
                          "n_threads": 1, "patterns": {o.pattern: TENSOR_TYPES[o.type].id for o in self._overrides(expected)},
                          "imatrix": {name: values[name] for name in tensors & values.keys()}, "metadata": {}})
        for _ in self._pool.stream("quantize types", quantize, tasks):
            pass
        for type_name in order:
            path = targets[type_name]
            tensors = {name for group in todo[type_name] for name in self.groups[group].tensors}
            expected = {t.name: type_name if t.name in tensors else t.type.name for t in self._base.model.header.tensors}
            check_quantized(self._base.model.header, path, expected)
            header = read_header(path)
            self._store.cut(header, type_name, todo[type_name])
            if type_name in self._weights_types:
                self._store.cut_dequantized(header, f"{type_name}-weights", todo[type_name])
            path.unlink()
            self._progress.advance()
        self._progress.finish()

    def _overrides(self, types: Mapping[str, str]) -> Iterator[Override]:
        for name, type_name in types.items():
            if is_quantizable(name, self._tensors[name].shape, self._base.model.architecture):
                yield anchored(name, type_name)

    def _weight_error(self, pair: Pair) -> float:
        top = bottom = 0.0
        header = self._base.model.header
        for source in self._store.tensors(pair.group, pair.type):
            tensor = self._tensors[source.info.name]
            rows = np.unique(np.linspace(0, tensor.n_rows - 1, _N_SAMPLED_ROWS).astype(np.int64))
            w = read_rows(header, tensor, rows)
            w_q = read_rows(dataclasses.replace(header, parts=(source.path,)), dataclasses.replace(source.info, part=0), rows)
            weight = self._row_importances(tensor, rows)
            share = tensor.n_rows / len(rows)
            top += share * float(np.sum(weight * (w_q - w) ** 2))
            bottom += share * float(np.sum(weight * w**2))
        return max(top / bottom, 1e-15) if bottom > 0 else 1e-15

    def _row_importances(self, tensor: TensorInfo, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        values = self._importances.values.get(tensor.name) if self._importances else None
        if values is None:
            return np.ones((1, 1))
        n_rows_each = tensor.shape[1] if len(tensor.shape) > 1 else 1
        own = values.reshape(-1, tensor.shape[0]).astype(np.float64)
        return np.asarray(own[np.minimum(rows // n_rows_each, len(own) - 1)])

    def measure(self, pairs: Iterable[Pair], step: str) -> None:
        """Measure what is not measured yet."""
        todo = [pair for pair in dict.fromkeys(pairs) if pair not in self._measured]
        kinds = {pair: f"{pair.type}-weights" if pair.type in self._weights_types else pair.type for pair in todo}
        trials = {f"{pair.group} {pair.type}": {pair.group: kinds[pair]} for pair in todo}
        found = self._runner.means(self._chunks, trials, step) if trials else {}
        for pair in todo:
            means = found[f"{pair.group} {pair.type}"].kld
            self._measured[pair] = Cost(
                group=pair.group, type=pair.type, size_bytes=self.size(pair), weight_error=self._errors[pair],
                kld=float(means.mean()), se=mean_se(means, self._chunks.articles),
                source="weights" if pair.type in self._weights_types else "measured")

    def cost(self, pair: Pair) -> Cost:
        """A cost, measured or predicted; the group has a measured type at least."""
        if pair in self._measured:
            return self._measured[pair]
        return Cost(group=pair.group, type=pair.type, size_bytes=self.size(pair), weight_error=self._errors[pair],
                    kld=predict_cost(self._errors[pair], list(self.known(pair.group).values())), se=None, source="predicted")

    def known(self, group: str) -> dict[str, tuple[float, float]]:
        """Type to (weight error, KLD) of a group's measured types."""
        return {pair.type: (cost.weight_error, cost.kld) for pair, cost in self._measured.items() if pair.group == group}

    def errors(self, group: str) -> dict[str, float]:
        """Type to weight error of a group's types that were written."""
        return {pair.type: error for pair, error in self._errors.items() if pair.group == group}

    def prediction_error(self) -> float:
        """Root mean square of ln(predicted / measured) where a measured type is predicted from the group's others; 0.69 (a factor
        of two) while no group has three of them.
        """
        wrong = []
        for group in self.groups:
            known = self.known(group)
            for type_name, (error, kld) in known.items():
                others = [point for name, point in known.items() if name != type_name]
                if len(others) > 1 and min(others)[0] < error < max(others)[0] and kld > 0:
                    wrong.append(np.log(predict_cost(error, others) / kld))
        return float(np.sqrt(np.mean(np.square(wrong)))) if wrong else float(np.log(2))

    def costs(self) -> tuple[Cost, ...]:
        """Everything known, by group and size."""
        return tuple(self.cost(Pair(g.name, t)) for g in self.groups.values() for t in g.types
                     if Pair(g.name, t) in self._errors and self.known(g.name))

