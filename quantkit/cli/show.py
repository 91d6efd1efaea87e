"""`quantkit show`: what a GGUF is, from its header alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from quantkit.cli.output import Cell, csv_table, format_option, json_text, md_table, md_text
from quantkit.core.units import format_bytes
from quantkit.spec.gguf_header import GgufHeader, read_header
from quantkit.spec.model import ModelInfo, describe_model, type_shares


class Fact(NamedTuple):
    """One line about a model: its key and value for programs, its label and text for people (text None: the value itself)."""

    key: str
    label: str
    value: Cell
    text: str | None = None


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@format_option
def show(model: Path, output_format: str) -> None:
    """Show what MODEL is: metadata that matter, tensor types by parameters and bytes, bits per weight, blocks.

    Only the header is read. MODEL may be any shard of a split model.
    """
    click.echo(_RENDER[output_format](describe_model(read_header(model))), nl=False)


_TYPE_COLUMNS = ("type", "n_tensors", "n_params", "share_params", "size_bytes", "share_bytes", "bpw")
_TYPE_LABELS = ("type", "tensors", "parameters", "of all", "bytes", "of all", "bpw")


def _facts(info: ModelInfo) -> list[Fact]:
    """Everything that is shown of a model but its types, in order."""
    header = info.header
    return [*_file_facts(header), *_model_facts(info), *_block_facts(info), *_text_facts(info), *_origin_facts(header)]


def _file_facts(header: GgufHeader) -> list[Fact]:
    return [
        Fact("file", "file", header.path.name),
        Fact("parts", "parts", len(header.parts)),
        Fact("file_bytes", "size", header.file_bytes, f"{header.file_bytes:,} bytes, {format_bytes(header.file_bytes)}"),
        Fact("gguf_version", "GGUF version", header.version),
        Fact("byte_order", "byte order", "big-endian" if header.big_endian else "little-endian"),
        Fact("alignment", "alignment", header.alignment),
    ]


def _model_facts(info: ModelInfo) -> list[Fact]:
    tensor_bytes = sum(t.size_bytes for t in info.header.tensors)
    return [
        Fact("name", "name", info.name),
        Fact("architecture", "architecture", info.architecture),
        Fact("ftype", "ftype", info.ftype_name),
        Fact("n_tensors", "tensors", len(info.header.tensors)),
        Fact("n_params", "parameters", info.n_params, f"{info.n_params:,}"),
        Fact("tensor_bytes", "tensor bytes", tensor_bytes, f"{tensor_bytes:,} bytes, {format_bytes(tensor_bytes)}"),
        Fact("bpw", "bpw, whole file", info.bpw, _bpw(info.bpw)),
        Fact("bpw_core", "bpw, without embedding, output and MTP", info.bpw_core, _bpw(info.bpw_core)),
    ]


def _block_facts(info: ModelInfo) -> list[Fact]:
    n_trunk, n_recurrent = info.n_trunk_block, len(info.recurrent_blocks)
    return [
        Fact("n_block", "blocks", info.n_block),
        Fact("n_trunk_block", "trunk blocks", n_trunk, f"{n_trunk}, not in this file" if info.is_head_only else None),
        Fact("n_nextn", "MTP (NextN) blocks", info.n_nextn),
        Fact("n_recurrent_block", "recurrent blocks", n_recurrent,
             f"{n_recurrent}: {block_ranges(info.recurrent_blocks)}" if n_recurrent else None),
        Fact("tied_embeddings", "tied embeddings", info.tied_embeddings),
        Fact("n_expert", "experts", info.n_expert),
        Fact("n_expert_used", "experts used", info.n_expert_used),
    ]


def _text_facts(info: ModelInfo) -> list[Fact]:
    return [
        Fact("n_embd", "n_embd", info.n_embd),
        Fact("n_ctx_train", "trained context", info.n_ctx_train),
        Fact("n_vocab", "n_vocab", info.n_vocab),
        Fact("tokenizer_model", "tokenizer", info.tokenizer_model),
        Fact("tokenizer_pre", "pre-tokenizer", info.tokenizer_pre),
        Fact("add_bos", "adds BOS", info.add_bos, "not said" if info.add_bos is None else None),
        Fact("chat_template_sha256", "chat template, sha256", info.chat_template_sha256,
             None if info.chat_template_sha256 else "none"),
    ]


def _origin_facts(header: GgufHeader) -> list[Fact]:
    """Who made the file, and with which importances; only what is there."""
    keys = ("general.license", "general.quantized_by", "quantize.imatrix.file", "quantize.imatrix.dataset",
            "quantize.imatrix.entries_count", "quantize.imatrix.chunks_count")
    return [Fact(key, key, value) for key in keys if isinstance(value := header.metadata.get(key), str | int)]


def _type_rows(info: ModelInfo) -> list[tuple[Cell, ...]]:
    shares = type_shares(info.header.tensors)
    n_params, n_bytes = sum(s.n_params for s in shares), sum(s.size_bytes for s in shares)
    return [(s.type, s.n_tensors, s.n_params, s.n_params / n_params, s.size_bytes, s.size_bytes / n_bytes,
             8 * s.size_bytes / s.n_params) for s in shares]


def _as_markdown(info: ModelInfo) -> str:
    facts = [(f.label, f.value if f.text is None else f.text) for f in _facts(info)]
    types = [(name, n, f"{n_params:,}", f"{share_params:.1%}", f"{size_bytes:,}", f"{share_bytes:.1%}", f"{bpw:.4f}")
             for name, n, n_params, share_params, size_bytes, share_bytes, bpw in _type_rows(info)]
    remarks = [("problem", line) for line in info.problems] + [("note", line) for line in info.notes]
    sections = [md_table(["", "value"], facts), md_table(_TYPE_LABELS, types),
                "".join(f"- {kind}: {md_text(line)}\n" for kind, line in remarks)]
    return "\n".join(filter(None, sections))


def _as_json(info: ModelInfo) -> str:
    types = [dict(zip(_TYPE_COLUMNS, row, strict=True)) for row in _type_rows(info)]
    facts = {fact.key: fact.value for fact in _facts(info)}
    return json_text({**facts, "types": types, "problems": info.problems, "notes": info.notes})


def _as_csv(info: ModelInfo) -> str:
    """Two columns, key and value; the keys of what is nested in JSON are joined by dots."""
    rows: list[tuple[str, Cell]] = [(fact.key, fact.value) for fact in _facts(info)]
    for name, *cells in _type_rows(info):
        rows += [(f"types.{name}.{column}", cell) for column, cell in zip(_TYPE_COLUMNS[1:], cells, strict=True)]
    rows += [(f"problems.{i}", line) for i, line in enumerate(info.problems)]
    rows += [(f"notes.{i}", line) for i, line in enumerate(info.notes)]
    return csv_table(["key", "value"], rows)


_RENDER = {"md": _as_markdown, "json": _as_json, "csv": _as_csv}


def _bpw(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def block_ranges(blocks: tuple[int, ...]) -> str:
    """`0-2, 4, 6-7`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
