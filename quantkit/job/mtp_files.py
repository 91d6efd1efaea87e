"""The MTP head as a file: split it from its model, leave it out, graft it back on.

    trunk   every tensor outside the NextN blocks; block_count counts trunk blocks, there is no key nextn_predict_layers
    head    the NextN blocks, and every tensor outside the blocks (embedding, output, norms: a draft context needs them);
            block_count counts all blocks, as llama.cpp expects of a head file
    graft   the trunk's tensors and metadata, the head's NextN blocks and what counts them

These are the forms that convert_hf_to_gguf.py writes with --no-mtp and --mtp. Tensor data are streamed and compared by sha256
after writing; metadata that does not count blocks keeps its bytes, types and order. Any input may be split into shards; outputs
are single files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.errors import InputError
from quantkit.core.files import is_same_file, refuse_overwrite
from quantkit.job.gguf_rewrite import write_model
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.gguf_raw import (
    RawPair,
    TensorSource,
    merge_orders,
    read_pairs,
    sources_of,
    uint32_pair,
    with_first,
    with_uint32,
)
from quantkit.spec.model import ModelInfo, describe_model, is_mtp, require_consistent
from quantkit.spec.mtp_support import PER_BLOCK_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenModel:
    """A file that was written and read back."""

    path: Path
    n_tensors: int
    size_bytes: int
    notes: tuple[str, ...] = ()


def split_model(source: Path, trunk: Path | None, head: Path | None, *, force: bool = False) -> list[WrittenModel]:
    """Write a model's trunk, its MTP head, or both.

    Args:
        source: a model with NextN blocks, or any shard of one.
        trunk, head: where they go; None leaves one out. `split_model(m, t, None)` strips the head.
        force: replace an existing output; an input never.

    Raises:
        InputError: the model has no trunk or no head; an output is an input, or the other output, or exists.
        GgufError: count key, block count and tensors disagree; names how.
    """
    model = describe_model(read_header(source))
    require_consistent(model)
    if model.n_nextn == 0:
        raise InputError(f"expected a model with an MTP head, found no NextN block in {source}: there is nothing to split "
                         "off; keep it as it is")
    if model.is_head_only:
        raise InputError(f"expected a model with a trunk, found only an MTP head in {source}: give the whole model")
    outputs = [path for path in (trunk, head) if path is not None]
    if trunk is not None and head is not None and is_same_file(trunk, head):
        raise InputError(f"expected two files for trunk and head, got {trunk} for both: choose another path for one of them")
    for path in outputs:
        refuse_overwrite(path, model.header.parts, force=force)
    pairs = read_pairs(model.header)
    n_trunk = model.n_trunk_block
    written = []
    if trunk is not None:
        keep = sources_of(model.header, lambda name: not is_mtp(name, n_trunk))
        written.append(_write(trunk, model.header, _trunk_pairs(pairs, model), keep, ()))
    if head is not None:
        keep = sources_of(model.header, lambda name: is_mtp(name, n_trunk) or not name.startswith("blk."))
        written.append(_write(head, model.header, pairs, keep, ()))
    return written


def strip_head(source: Path, target: Path, *, force: bool = False) -> WrittenModel:
    """Write a model without its MTP head.

    Raises:
        InputError, GgufError: as `split_model`.
    """
    return split_model(source, target, None, force=force)[0]


def graft_head(trunk: Path, head: Path, target: Path, *, force: bool = False) -> WrittenModel:
    """Write one model out of a trunk and the NextN blocks of a head.

    Everything that both hold (embedding, output, tokenizer, names) is the trunk's; the head's copies are left behind.

    Raises:
        InputError: the two do not belong together, or the trunk has a head; the target is an input or exists.
        GgufError: one of the two contradicts itself.
    """
    base, donor = describe_model(read_header(trunk)), describe_model(read_header(head))
    require_consistent(base)
    require_consistent(donor)
    refuse_overwrite(target, [*base.header.parts, *donor.header.parts], force=force)
    pairs, donor_pairs = read_pairs(base.header), read_pairs(donor.header)
    _check_partners(base, donor, pairs, donor_pairs)
    blocks = sources_of(donor.header, lambda name: is_mtp(name, donor.n_trunk_block))
    globals_ = [t.name for t in donor.header.tensors if not t.name.startswith("blk.")]
    by_name = {s.info.name: s for s in (*sources_of(base.header), *blocks)}
    order = merge_orders([t.name for t in base.header.tensors],
                         [t.name for t in donor.header.tensors if t.name in by_name])
    notes = _differing_copies(base.header, donor.header, globals_)
    return _write(target, base.header, _grafted_pairs(pairs, donor_pairs, donor), [by_name[name] for name in order], notes)


def _trunk_pairs(pairs: Sequence[RawPair], model: ModelInfo) -> list[RawPair]:
    """Metadata of the trunk alone: fewer blocks, no count of NextN blocks, values per block only for the trunk's."""
    count_key, nextn_key = _count_keys(model)
    out = []
    for pair in pairs:
        if pair.key == count_key:
            out.append(with_uint32(pair, model.n_trunk_block))
        elif _is_per_block(pair.key, model):
            out.append(with_first(pair, model.n_trunk_block))
        elif pair.key != nextn_key:
            out.append(pair)
    return out


def _grafted_pairs(pairs: Sequence[RawPair], donor_pairs: Sequence[RawPair], donor: ModelInfo) -> list[RawPair]:
    count_key, nextn_key = _count_keys(donor)
    held, given = {pair.key: pair for pair in pairs}, {pair.key: pair for pair in donor_pairs}
    given.setdefault(nextn_key, uint32_pair(nextn_key, donor.n_nextn))
    order = merge_orders(held, [key for key in given if key in held or key == nextn_key])
    from_donor = {count_key, nextn_key, *(key for key in given if _is_per_block(key, donor))}
    return [given[key] if key in from_donor and key in given else held[key] for key in order]


def _count_keys(model: ModelInfo) -> tuple[str, str]:
    return f"{model.architecture}.block_count", f"{model.architecture}.nextn_predict_layers"


def _is_per_block(key: str, model: ModelInfo) -> bool:
    """Whether a pair is an array with one value for each block, MTP blocks included."""
    value: Any = model.header.metadata.get(key)
    known = key.removeprefix(f"{model.architecture}.") in PER_BLOCK_KEYS
    return known and getattr(value, "n", None) == model.n_block


def _check_partners(base: ModelInfo, donor: ModelInfo, pairs: Sequence[RawPair], donor_pairs: Sequence[RawPair]) -> None:
    """The head is one of this trunk: architecture, width, number of blocks, vocabulary."""
    where = f"{donor.header.path} is not a head of {base.header.path}"
    if base.n_nextn:
        raise InputError(f"expected a trunk without an MTP head, found {base.n_nextn} NextN block(s) in {base.header.path}: "
                         "strip it first")
    if not donor.n_nextn:
        raise InputError(f"expected an MTP head, found no NextN block in {donor.header.path}: give the head's file")
    for what, expected, found in (
        ("architecture", base.architecture, donor.architecture), ("n_embd", base.n_embd, donor.n_embd),
        ("trunk blocks", base.n_block, donor.n_trunk_block), ("vocabulary size", base.n_vocab, donor.n_vocab),
    ):
        if expected != found:
            raise InputError(f"{where}: expected {what} {expected}, found {found}; give the head of this trunk")
    if base.header.alignment != donor.header.alignment:
        raise InputError(f"{where}: expected alignment {base.header.alignment}, found {donor.header.alignment}; "
                         "write both with one")
    held, given = {p.key: p.data for p in pairs}, {p.key: p.data for p in donor_pairs}
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key in held and key in given and held[key] != given[key]:
            raise InputError(f"{where}: {key} differs, so a token id means another token in each; give the head of this trunk")


def _differing_copies(base: GgufHeader, donor: GgufHeader, names: Sequence[str]) -> tuple[str, ...]:
    """Tensors outside the blocks that the head brought in another type: its acceptance was measured with its own."""
    held, given = {t.name: t for t in base.tensors}, {t.name: t for t in donor.tensors}
    return tuple(f"{name}: the head file's own copy ({given[name].type.name}) is left behind, the trunk's ({held[name].type.name}) "
                 "takes its place" for name in names if name in held and held[name].type != given[name].type)


def _write(target: Path, like: GgufHeader, pairs: Sequence[RawPair], tensors: Sequence[TensorSource],
           notes: tuple[str, ...]) -> WrittenModel:
    made = write_model(target, like, pairs, tensors)
    return WrittenModel(path=target, n_tensors=made.n_tensors, size_bytes=made.size_bytes, notes=notes)
