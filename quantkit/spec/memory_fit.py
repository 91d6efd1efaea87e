"""How much memory a model needs to run, from its header: weights, KV cache, recurrent state, compute buffers.

    on the card   every tensor but the input embedding, which llama.cpp keeps in RAM; of tied embeddings the one matrix counts,
                  since the output needs it there. The MTP block counts although it is loaded only for drafting.
    KV cache      sum over attention blocks of n_ctx * n_head_kv * (key_length + value_length) elements; K alone with MLA
    recurrent     (n_conv - 1) * (d_inner + 2 n_group d_state) + d_state * d_inner float32 for each recurrent block
    compute       an estimate: the logits of a micro-batch, or its attention mask and widest activations, whichever is more

llama.cpp rounds a context up to 256 tokens, and so do these. One sequence, flash attention on, all layers on the card. KV cache and
recurrent state are exact for the architectures that the formulas describe; others are named and refused, and `engine.fit` asks
the library itself. What a driver takes for itself, no header tells: `RESERVE_BYTES` stands for it.

Source: llama-kv-cache.cpp, llama-memory-recurrent.cpp, llama-hparams.cpp (n_embd_r, n_embd_s) and llama-model.cpp (dev_input) of
the pinned commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantkit.core.errors import InputError
from quantkit.core.units import GIB, MIB
from quantkit.spec.gguf_header import ArrayValue, GgufHeader
from quantkit.spec.json_records import record_from_json
from quantkit.spec.model import ModelInfo, Role, block_of
from quantkit.spec.tensor_types import TENSOR_TYPES

#: What a card's driver and screen take, of a card of any size; a rule of thumb, not a measurement.
RESERVE_BYTES = 512 * MIB
#: Sizes of cards that a table tells about, in GiB.
CARDS_GIB = (8, 12, 16, 24, 32, 48)
#: Contexts that a table tells about, in tokens.
TABLE_N_CTX = (8192, 32768)
#: Types that llama.cpp can keep a KV cache in.
KV_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")

N_UBATCH = 512  # llama.cpp's default
_N_PAD = 256
_ATTENTION = ("attn_k.weight", "attn_qkv.weight", "attn_kv_a_mqa.weight", "attn_kv_b.weight")
_RECURRENT_KEYS = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count")
# Keys of memory that the formulas do not describe: other recurrent states, sparse attention's index cache, shared caches.
_OTHER_MEMORY = ("wkv.head_size", "kda.head_dim", "shortconv.l_cache", "attention.indexer.head_count",
                 "attention.compress_ratios", "attention.shared_kv_layers")

Source = Literal["llama.cpp", "header"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Bytes of a file's tensors by where they go.

    `card_bytes` is what full offload puts on the card, `mtp_bytes` the part of it that only drafting needs; `ram_bytes` stays.
    """

    card_bytes: int
    ram_bytes: int
    mtp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMemory:
    """Bytes that a context of some length needs besides the weights; `source` tells who says so.

    `is_bound`: sliding windows are counted in full, so the KV cache is at most this.
    """

    n_ctx: int
    kv_type: str
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    source: Source
    is_bound: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.kv_bytes + self.recurrent_bytes + self.compute_bytes

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ContextMemory:
        """The record that `to_json` wrote.

        Raises:
            KeyError, TypeError: a key is missing, unknown or of another kind.
        """
        return record_from_json(cls, data)


def weight_memory(tensors: Iterable[tuple[Role, int]], *, tied_embeddings: bool) -> WeightMemory:
    """Where the tensors of a file go with every layer offloaded.

    Args:
        tensors: role and bytes of each.
    """
    total = ram = mtp = 0
    for role, size_bytes in tensors:
        total += size_bytes
        ram += size_bytes if role == "embedding" and not tied_embeddings else 0
        mtp += size_bytes if role == "mtp" else 0
    return WeightMemory(card_bytes=total - ram, ram_bytes=ram, mtp_bytes=mtp)


def model_weights(model: ModelInfo) -> WeightMemory:
    """Where the tensors of a model file go."""
    return weight_memory(((model.roles[t.name], t.size_bytes) for t in model.header.tensors),
                         tied_embeddings=model.tied_embeddings)


def needed_bytes(weights: WeightMemory, context: ContextMemory) -> int:
    """Bytes on the card: weights, context and the driver's reserve."""
    return weights.card_bytes + context.total_bytes + RESERVE_BYTES


def smallest_card(weights: WeightMemory, context: ContextMemory) -> int | None:
    """GiB of the smallest card of `CARDS_GIB` that holds it all; None where none does."""
    return next((gib for gib in CARDS_GIB if needed_bytes(weights, context) <= gib * GIB), None)


def context_memory(model: ModelInfo, n_ctx: int, kv_type: str = "F16", n_ubatch: int = N_UBATCH) -> ContextMemory:
    """Memory of a context by the formulas above.

    Args:
        n_ctx: tokens; rounded up to 256.
        kv_type: of both caches, one of `KV_TYPES`.
        n_ubatch: tokens of a micro-batch.

    Raises:
        InputError: the header lacks what the formulas need, or the architecture keeps memory that they do not describe.
        GgufError: a key of another type.
    """
    header, arch = model.header, model.architecture
    if unknown := [key for key in _OTHER_MEMORY if f"{arch}.{key}" in header.metadata]:
        raise InputError(f"the memory of {arch} cannot be told from its header ({arch}.{unknown[0]}): let llama.cpp simulate it")
    n_cells = n_ctx + -n_ctx % _N_PAD
    return ContextMemory(
        n_ctx=n_ctx, kv_type=kv_type, kv_bytes=n_cells * _kv_bytes_per_token(model, kv_type),
        recurrent_bytes=len(model.recurrent_blocks) * _state_bytes(header, arch) if model.is_recurrent else 0,
        compute_bytes=_compute_bytes(model, n_cells, n_ubatch), source="header",
        is_bound=f"{arch}.attention.sliding_window" in header.metadata)


def table_n_ctx(model: ModelInfo) -> list[int]:
    """The context lengths that a table tells about: `TABLE_N_CTX`, none above what the model was trained for."""
    longest = model.n_ctx_train or TABLE_N_CTX[-1]
    return sorted({min(n, longest) for n in TABLE_N_CTX})


def _kv_bytes_per_token(model: ModelInfo, kv_type: str) -> int:
    header, arch = model.header, model.architecture
    n_head = _per_block(header, f"{arch}.attention.head_count", model.n_block)
    n_head_kv = _per_block(header, f"{arch}.attention.head_count_kv", model.n_block) or n_head
    if n_head is None or n_head_kv is None or not model.n_embd:
        raise InputError(f"expected {arch}.attention.head_count and {arch}.embedding_length in {header.path}, found none: "
                         "the KV cache cannot be told from this header; let llama.cpp simulate it")
    is_mla = f"{arch}.attention.key_length_mla" in header.metadata
    n_bytes = 0
    for block in _attention_blocks(model):
        default = model.n_embd // max(1, n_head[block])
        k = (header.get(f"{arch}.attention.key_length", int) or default) * n_head_kv[block]
        v = 0 if is_mla else (header.get(f"{arch}.attention.value_length", int) or default) * n_head_kv[block]
        n_bytes += sum(_row_bytes(n, kv_type, header) for n in (k, v) if n)
    return n_bytes


def _attention_blocks(model: ModelInfo) -> list[int]:
    """Trunk blocks with keys and values. A recurrent block has an `attn_qkv` too, and no cache for it."""
    recurrent = set(model.recurrent_blocks)
    blocks = set()
    for tensor in model.header.tensors:
        block, name = block_of(tensor.name), tensor.name.split(".", 2)[-1]
        if block is None or block >= model.n_trunk_block or name not in _ATTENTION:
            continue
        if block not in recurrent or name != "attn_qkv.weight":
            blocks.add(block)
    return sorted(blocks)


def _row_bytes(n: int, kv_type: str, header: GgufHeader) -> int:
    try:
        return TENSOR_TYPES[kv_type].row_bytes(n)
    except ValueError as error:
        raise InputError(f"{header.path} cannot have a KV cache of type {kv_type}: {error}; choose another") from error


def _state_bytes(header: GgufHeader, arch: str) -> int:
    """Of one recurrent block, float32."""
    values = [header.get(f"{arch}.{key}", int) for key in _RECURRENT_KEYS]
    if None in values:
        missing = _RECURRENT_KEYS[values.index(None)]
        raise InputError(f"expected {arch}.{missing} in {header.path}, found none: the recurrent state cannot be told from this "
                         "header; let llama.cpp simulate it")
    n_conv, d_inner, d_state, n_group = (value or 0 for value in values)
    return 4 * (max(0, n_conv - 1) * (d_inner + 2 * n_group * d_state) + d_state * d_inner)


def _compute_bytes(model: ModelInfo, n_cells: int, n_ubatch: int) -> int:
    header, arch = model.header, model.architecture
    n_embd = model.n_embd or 0
    n_ff = max(_per_block(header, f"{arch}.feed_forward_length", model.n_block) or [0])
    if model.n_expert:
        n_ff = max(n_ff, model.n_expert_used * (header.get(f"{arch}.expert_feed_forward_length", int) or n_ff))
    logits = 4 * ((model.n_vocab or 0) + 3 * n_embd)
    layer = 2 * n_cells + 4 * (4 * n_embd + 2 * n_ff)
    return n_ubatch * max(logits, layer)


def _per_block(header: GgufHeader, key: str, n_block: int) -> list[int] | None:
    """A number for each block, from one for all or an array."""
    value = header.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, ArrayValue):
        return [header.get(key, int) or 0] * n_block
    values = [v for v in value.values or () if isinstance(v, int)]
    if len(values) < n_block:
        raise InputError(f"expected {n_block} numbers in {key} of {header.path}, one for each block, found {len(values)}: "
                         "convert the model again")
    return values
