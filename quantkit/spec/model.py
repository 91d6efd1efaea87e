"""What a GGUF model is: blocks, MTP head, experts, vocabulary, bits per weight, and where its header contradicts itself.

    bpw       8 * tensor bytes / elements, over the whole file
    bpw_core  the same over the role "trunk" alone: without embedding, output and MTP (`spec.blocks` defines the roles)

With tied embeddings there is no output tensor: `token_embd.weight` is both, is counted once, as embedding, and a plan must
treat it as the output.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quantkit.core.errors import GgufError
from quantkit.spec.blocks import Role, block_of, block_problems, count_blocks, is_mtp, role_of
from quantkit.spec.gguf_header import ArrayValue, GgufHeader, TensorInfo
from quantkit.spec.tensor_types import FTYPES_BY_ID

__all__ = ["ModelInfo", "Role", "TypeShare", "bits_per_weight", "block_of", "describe_model", "is_mtp", "require_consistent",
           "role_of", "type_shares"]

_RECURRENT = re.compile(r"blk\.[0-9]+\.(ssm_|time_mix_|shortconv\.)")
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED, a flag beside the ftype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model file, described. What the file does not tell is None, or 0 where it counts what is there.

    `n_block` counts trunk and MTP blocks, `n_nextn` the MTP blocks whose tensors are there, `n_trunk_block` the trunk's.
    `problems` are contradictions inside the file, of which `require_consistent` makes an error; `notes` are worth knowing.
    """

    header: GgufHeader
    name: str | None
    architecture: str
    ftype_name: str | None
    n_block: int
    n_nextn: int
    n_trunk_block: int
    is_head_only: bool
    tied_embeddings: bool
    recurrent_blocks: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    n_params: int
    n_embd: int | None
    n_ctx_train: int | None
    n_vocab: int | None
    tokenizer_model: str | None
    tokenizer_pre: str | None
    add_bos: bool | None
    chat_template_sha256: str | None
    roles: Mapping[str, Role]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_recurrent(self) -> bool:
        """Whether some blocks keep a recurrent state, which cannot be rolled back by cutting a cache."""
        return bool(self.recurrent_blocks)

    @property
    def bpw(self) -> float | None:
        """Tensor bits per weight of the whole file; None where it has no tensors."""
        return bits_per_weight(self.header.tensors)

    @property
    def bpw_core(self) -> float | None:
        """Tensor bits per weight without embedding, output and MTP; None where nothing is left."""
        return bits_per_weight(t for t in self.header.tensors if self.roles[t.name] == "trunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeShare:
    """How much of a file is stored as one tensor type."""

    type: str
    n_tensors: int
    n_params: int
    size_bytes: int


def describe_model(header: GgufHeader) -> ModelInfo:
    """What the header says about the model, with its contradictions listed rather than resolved.

    Raises:
        GgufError: not a model, or a key that is needed is of another type; names the key.
    """
    architecture = _architecture(header)
    blocks = count_blocks(header, architecture)
    tensors = {t.name: t for t in header.tensors}
    template = header.get("tokenizer.chat_template", str)
    ftype_id = header.get("general.file_type", int)
    ftype = None if ftype_id is None else FTYPES_BY_ID.get(ftype_id & ~_GUESSED)
    return ModelInfo(
        header=header,
        name=header.get("general.name", str),
        architecture=architecture,
        ftype_name=ftype.name if ftype else None,
        n_block=blocks.n_block,
        n_nextn=len(blocks.nextn),
        n_trunk_block=blocks.n_trunk,
        is_head_only=blocks.is_head_only,
        tied_embeddings="token_embd.weight" in tensors and "output.weight" not in tensors,
        recurrent_blocks=tuple(sorted({b for n in tensors if _RECURRENT.match(n) and (b := block_of(n)) is not None})),
        n_expert=header.get(f"{architecture}.expert_count", int) or 0,
        n_expert_used=_largest(header, f"{architecture}.expert_used_count"),
        n_params=sum(t.n_elements for t in header.tensors),
        n_embd=header.get(f"{architecture}.embedding_length", int),
        n_ctx_train=header.get(f"{architecture}.context_length", int),
        n_vocab=_n_vocab(header, architecture, tensors),
        tokenizer_model=header.get("tokenizer.ggml.model", str),
        tokenizer_pre=header.get("tokenizer.ggml.pre", str),
        add_bos=header.get("tokenizer.ggml.add_bos_token", bool),
        chat_template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        roles={name: role_of(name, blocks.n_trunk) for name in tensors},
        problems=(*block_problems(header, architecture, blocks), *_layout_problems(header)),
        notes=(*_ftype_notes(header, ftype_id), *_vocab_notes(header, tensors)),
    )


def require_consistent(model: ModelInfo) -> None:
    """Refuse a model whose header contradicts itself.

    Raises:
        GgufError: names every contradiction.
    """
    if model.problems:
        raise GgufError(f"{model.header.path}: {'; '.join(model.problems)}")


def bits_per_weight(tensors: Iterable[TensorInfo]) -> float | None:
    """8 * bytes / elements over some tensors, alignment padding not counted; None over none."""
    counted = [(t.size_bytes, t.n_elements) for t in tensors]
    n_elements = sum(n for _, n in counted)
    return 8 * sum(size for size, _ in counted) / n_elements if n_elements else None


def type_shares(tensors: Iterable[TensorInfo]) -> tuple[TypeShare, ...]:
    """Tensors, parameters and bytes of each tensor type, the type with most parameters first."""
    n_tensors, n_params, size_bytes = Counter[str](), Counter[str](), Counter[str]()
    for t in tensors:
        n_tensors[t.type.name] += 1
        n_params[t.type.name] += t.n_elements
        size_bytes[t.type.name] += t.size_bytes
    return tuple(TypeShare(type=name, n_tensors=n_tensors[name], n_params=n, size_bytes=size_bytes[name])
                 for name, n in sorted(n_params.items(), key=lambda item: (-item[1], item[0])))


def _architecture(header: GgufHeader) -> str:
    architecture = header.get("general.architecture", str)
    if not architecture:
        kind = header.get("general.type", str)
        raise GgufError(f"{header.path}: expected a model, with a key general.architecture, got "
                        + (f"a file of general.type {kind[:40]!a}" if kind else "none") + ": give a model's file")
    return architecture


def _largest(header: GgufHeader, key: str) -> int:
    """A count, or the largest of an array with one for each block."""
    if not isinstance(header.metadata.get(key), ArrayValue):
        return header.get(key, int) or 0
    array = header.get(key, ArrayValue)
    return max((v for v in (array.values if array else None) or () if isinstance(v, int)), default=0)


def _n_vocab(header: GgufHeader, architecture: str, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Tokens of the vocabulary; of a file without one, the key's number or the rows of the embedding."""
    tokens = header.get("tokenizer.ggml.tokens", ArrayValue)
    if tokens is not None:
        return tokens.n
    embedding = tensors.get("token_embd.weight")
    return header.get(f"{architecture}.vocab_size", int) or (embedding.n_rows if embedding else None)


def _layout_problems(header: GgufHeader) -> Iterator[str]:
    """What the reader takes and llama.cpp refuses."""
    if header.big_endian and sys.byteorder == "little":
        yield "the file is big-endian, which llama.cpp does not load on this machine: convert it"
    ends = list(header.data_offset)
    for t in header.tensors:
        if t.offset != ends[t.part]:
            yield (f"tensor {t.name!a} starts at byte {t.offset}, but llama.cpp expects it at byte {ends[t.part]}, "
                   "right after the one before: rewrite the file")
            return
        end = t.offset + t.size_bytes
        ends[t.part] = end + -end % header.part_alignment[t.part]


def _ftype_notes(header: GgufHeader, ftype_id: int | None) -> Iterator[str]:
    """A file's ftype is a name; the tensor types are the fact."""
    shares = type_shares(header.tensors)
    if ftype_id is None or not shares:
        return
    ftype = FTYPES_BY_ID.get(ftype_id & ~_GUESSED)
    if ftype is None:
        yield f"general.file_type {ftype_id} is unknown to the pinned llama.cpp"
    elif ftype.default_type and ftype.default_type != shares[0].type:
        share = shares[0].n_params / sum(s.n_params for s in shares)
        yield (f"general.file_type says {ftype.name}, of default type {ftype.default_type}, but most parameters are "
               f"{shares[0].type} ({share:.1%})")


def _vocab_notes(header: GgufHeader, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    tokens, embedding = header.get("tokenizer.ggml.tokens", ArrayValue), tensors.get("token_embd.weight")
    if tokens and embedding and tokens.n != embedding.n_rows:
        yield f"the vocabulary has {tokens.n} tokens, but token_embd.weight has {embedding.n_rows} rows"
