"""`quantkit fit`: whether a model fits a card, and at which context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH
from quantkit.cli.output import Cell, csv_table, format_option, json_text, md_table, md_text
from quantkit.core.units import format_bytes, parse_bytes
from quantkit.spec.memory_fit import (
    CARDS_GIB,
    KV_TYPES,
    RESERVE_BYTES,
    TABLE_N_CTX,
    ContextMemory,
    WeightMemory,
    needed_bytes,
    smallest_card,
)

_COLUMNS = ("file", "n_ctx", "kv_type", "source", "is_bound", "weights_card_bytes", "weights_ram_bytes", "weights_mtp_bytes",
            "kv_bytes", "recurrent_bytes", "compute_bytes", "reserve_bytes", "needed_bytes", "smallest_card_gib", "vram_bytes",
            "fits")


@click.command()
@click.argument("model", type=PATH)
@click.option("--ctx", "n_ctx", type=click.IntRange(1), multiple=True, metavar="TOKENS",
              help="Context length; may be repeated [default: 8192 and 32768].")
@click.option("--kv", "kv_type", type=click.Choice(KV_TYPES, case_sensitive=False), default="F16", show_default=True,
              help="Type of the KV cache.")
@click.option("--vram", metavar="SIZE", help="Memory of the card, such as 16GiB: says whether it fits, and by how much.")
@format_option
def fit(model: Path, n_ctx: tuple[int, ...], kv_type: str, vram: str | None, output_format: str) -> None:
    """Show the memory that MODEL needs on a card: weights, KV cache, recurrent state, compute buffers.

    llama.cpp is asked to simulate the context; where it cannot, the header's numbers tell. No weight is read. A file's size is not
    its memory.
    """
    from quantkit.job.fit import estimate_contexts
    from quantkit.spec.gguf_header import read_header
    from quantkit.spec.memory_fit import model_weights
    from quantkit.spec.model import describe_model

    card_bytes = parse_bytes(vram) if vram else None
    info = describe_model(read_header(model))
    weights = model_weights(info)
    with stderr_progress() as progress:
        contexts = estimate_contexts(info, n_ctx or TABLE_N_CTX, kv_type, progress)
    if output_format == "md":
        click.echo(_as_markdown(model.name, weights, contexts, card_bytes), nl=False)
        return
    rows = [_row(model.name, weights, context, card_bytes) for context in contexts]
    text = csv_table(_COLUMNS, rows) if output_format == "csv" else json_text([dict(zip(_COLUMNS, r, strict=True)) for r in rows])
    click.echo(text, nl=False)


def _row(name: str, weights: WeightMemory, context: ContextMemory, card_bytes: int | None) -> tuple[Cell, ...]:
    needed = needed_bytes(weights, context)
    return (name, context.n_ctx, context.kv_type, context.source, context.is_bound, weights.card_bytes, weights.ram_bytes,
            weights.mtp_bytes, context.kv_bytes, context.recurrent_bytes, context.compute_bytes, RESERVE_BYTES, needed,
            smallest_card(weights, context), card_bytes, None if card_bytes is None else needed <= card_bytes)


def _as_markdown(name: str, weights: WeightMemory, contexts: Sequence[ContextMemory], card_bytes: int | None) -> str:
    head = ["", *(f"{c.n_ctx:,} tokens" for c in contexts)]
    n = len(contexts)
    lines: list[tuple[Cell, ...]] = [
        ("weights on the card", *[format_bytes(weights.card_bytes)] * n),
        (f"KV cache, {contexts[0].kv_type}", *(("≤ " if c.is_bound else "") + format_bytes(c.kv_bytes) for c in contexts)),
        ("recurrent state", *(format_bytes(c.recurrent_bytes) for c in contexts)),
        ("compute buffers", *(format_bytes(c.compute_bytes) for c in contexts)),
        ("for driver and screen", *[format_bytes(RESERVE_BYTES)] * n),
        ("sum", *(format_bytes(needed_bytes(weights, c)) for c in contexts)),
        ("smallest card", *(_card(smallest_card(weights, c)) for c in contexts)),
    ]
    if card_bytes is not None:
        lines.append((f"fits {format_bytes(card_bytes)}", *(_verdict(card_bytes - needed_bytes(weights, c)) for c in contexts)))
    return f"{md_text(name)}\n\n{md_table(head, lines)}\n" + "".join(f"- {note}\n" for note in _notes(weights, contexts))


def _notes(weights: WeightMemory, contexts: Sequence[ContextMemory]) -> list[str]:
    notes = ["Every layer on the card, one sequence, flash attention on. Sizes of cards in GiB (2^30 bytes)."]
    if weights.ram_bytes:
        notes.append(f"The input embedding, {format_bytes(weights.ram_bytes)}, stays in RAM.")
    if weights.mtp_bytes:
        notes.append(f"The MTP block, {format_bytes(weights.mtp_bytes)}, is in the sum and is loaded only for drafting.")
    if any(c.is_bound for c in contexts):
        notes.append("Sliding windows are counted in full: the KV cache is at most this.")
    sources = {"llama.cpp": "KV cache, state and compute buffers as llama.cpp's CPU build would allocate them.",
               "header": "KV cache and state by formula from the header; compute buffers are an estimate."}
    return [*notes, *(sources[source] for source in sorted({c.source for c in contexts}))]


def _card(gib: int | None) -> str:
    return f"more than {CARDS_GIB[-1]} GiB" if gib is None else f"{gib} GiB"


def _verdict(left_bytes: int) -> str:
    return f"yes, {format_bytes(left_bytes)} left" if left_bytes >= 0 else f"no, {format_bytes(-left_bytes)} too much"
