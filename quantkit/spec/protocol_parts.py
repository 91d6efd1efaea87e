"""The parts of a protocol, one record per table of the file; docs/PROTOCOL.md has a line for each key.

A field's type is the type of its key, with its range or its words (`protocol_values`). What must hold between keys is in
`protocol_checks`. There are no defaults: what a protocol does not say, nobody may guess later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from quantkit.core.errors import ProtocolError
from quantkit.spec.protocol_values import (
    INT_MAX,
    Alpha,
    ChunkSet,
    Count,
    CountOrZero,
    FileName,
    FtypeName,
    Glob,
    KvType,
    Layers,
    Positive,
    QuantizedName,
    Seed,
    Sha256,
    Share,
    Switch,
    TypeName,
    TypeNameOrNone,
    Word,
)
from quantkit.spec.toml_records import above, between


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text, known by its bytes. `name` is what other keys call it, `file` what it is called in a folder."""

    name: FileName
    file: FileName
    sha256: Sha256
    size_bytes: Annotated[int, between(1, 2**40)]
    documents: Literal["wikitext", "none"]
    format: Literal["text", "chat"]
    hub_dataset: str
    hub_config: str
    hub_split: str

    def content(self) -> dict[str, Any]:
        """What an id says of a text: its bytes and how they are read, not what it is called or where it is found."""
        return {"sha256": self.sha256, "size_bytes": self.size_bytes, "documents": self.documents, "format": self.format}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSpec:
    """The arithmetic of a context: every setting that can move a logit. n_threads = 0 means all cores of the machine."""

    n_ctx: Count
    n_batch: Count
    n_ubatch: Count
    type_k: KvType
    type_v: KvType
    flash_attn: Switch
    use_extra_bufts: bool
    n_threads: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpec:
    """Devices. Unless `fixed`, the command line says where layers go, and the record says what it said."""

    fixed: bool
    n_gpu_layers: CountOrZero
    main_gpu: CountOrZero
    tensor_split: tuple[Annotated[float, between(0, INT_MAX)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec(ContextSpec):
    """What is scored, and in which arithmetic. Scored are positions n_ctx//2 … n_ctx-2 of each chunk."""

    corpora: tuple[str, ...]
    chunks: ChunkSet
    n_chunk: CountOrZero
    seed: Seed
    offload: OffloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A perturbation of the evaluation's arithmetic: other kernels, the same numbers on paper."""

    name: Word
    flash_attn: Switch
    use_extra_bufts: bool
    n_ubatch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSpec:
    """Noise floors: the base and each tier against themselves under other kernels."""

    n_chunk: CountOrZero
    factor: Annotated[float, between(1, 1000)]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSpec:
    """Screening that may stop early: after how many chunks it looks, and the error it spends on all looks together."""

    looks: tuple[Count, ...]
    alpha: Alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class ImatrixSpec(ContextSpec):
    """Importances: the calibration text, how much of it, and when a matrix is too thin to use."""

    corpus: str
    chunks: ChunkSet
    n_chunk: CountOrZero
    output: bool
    mtp: bool
    zero_floor: Annotated[float, above(0, 1)]
    min_count: Count
    max_missing_experts: Share
    min_match: Share
    ngram: Annotated[int, between(2, 1000)]
    max_shared_ngrams: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which tensors, in which trunk layers, get a type (`type`) or no less than one (`at_least`); one of the two is ""."""

    match: Glob
    layers: Layers
    type: TypeNameOrNone
    at_least: TypeNameOrNone
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One rung: its name, the ftype in its header, the type of a tensor that no rule matches, and its rules."""

    name: Word
    ftype: FtypeName
    default: TypeName
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """The ladder. `rules` hold in every tier; `mtp_type` rules the MTP block alone, "" leaves it to the ladder."""

    ladder: Literal["guarded", "stock"]
    on_substitute: Literal["mark", "fail"]
    mtp_mode: Literal["inside", "strip", "separate"]
    mtp_type: TypeNameOrNone
    rules: tuple[Rule, ...]
    tiers: tuple[Tier, ...]

    def tier(self, name: str) -> Tier:
        """The tier of that name.

        Raises:
            ProtocolError: there is none; lists those there are.
        """
        return by_name(self.tiers, name, "plan.tiers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec(ContextSpec):
    """The check of the MTP head: prompts, sampling, repeats, and when it fails."""

    corpus: str
    n_prompt: CountOrZero
    prompt_n_tokens: Count
    prompts: tuple[str, ...]
    n_predict: Count
    n_draft: tuple[Annotated[int, between(1, 64)], ...]
    head_types: tuple[TypeName, ...]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, above(0, 1)]
    min_p: Share
    seed: Seed
    repeats: Annotated[int, between(3, 1000)]
    n_warmup: Count
    teacher_chunks: ChunkSet
    teacher_n_chunk: CountOrZero
    dead_ratio: Share
    repeat_ngram: Annotated[int, between(1, 100)]
    max_repeat_share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFloor:
    """Tensors that no search may take below a type."""

    match: Glob
    at_least: TypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """Plan search: candidate types, and disjoint sets of articles for searching, selecting and reporting."""

    types: tuple[QuantizedName, ...]
    weights_types: tuple[QuantizedName, ...]
    n_band: CountOrZero
    search_share: Share
    select_share: Share
    report_share: Share
    search_n_chunk: Count
    select_n_chunk: Count
    report_n_chunk: CountOrZero
    quick_n_chunk: Count
    second_corpus: str
    second_n_chunk: CountOrZero
    seed: Seed
    alpha: Alpha
    max_screen_loss: Share
    size_tolerance: Share
    floors: tuple[SearchFloor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMargins:
    """How much worse than the incumbent still counts as not worse, per obligation."""

    size_bytes: Share
    kld_mean: Positive
    kld_p999: Positive
    same_top_p: Positive
    ln_ppl_ratio: Positive
    acceptance_rate: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """Verdicts and the commit rule."""

    alpha: Alpha
    equivalence_margin: Positive
    min_n_chunk: Count
    max_commits: Count
    smoke_prompt: str
    smoke_n_predict: Annotated[int, between(16, 4096)]
    margins: GateMargins


@dataclass(frozen=True, slots=True, kw_only=True)
class RefpackSpec:
    """Reference packs: the head of each distribution that is kept, and how often a row is kept whole."""

    mass: Annotated[float, above(0, 1)]
    max_ids: Count
    full_every: Count


_Named = TypeVar("_Named", Corpus, Tier)


def by_name(records: tuple[_Named, ...], name: str, path: str) -> _Named:
    """The record of that name; `path` is the array it stands in.

    Raises:
        ProtocolError: there is none; lists those there are.
    """
    for record in records:
        if record.name == name:
            return record
    raise ProtocolError(f"{path}: expected one of {', '.join(r.name for r in records)}, got {name!r}: name one of them")
