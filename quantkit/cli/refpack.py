"""`quantkit refpack`: make and show reference packs, the base's answers in a file small enough to publish."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from quantkit.cli.bars import stderr_progress
from quantkit.cli.options import PATH, base_option, protocol_options, read_offload
from quantkit.cli.output import format_option, render_table


@click.group()
def refpack() -> None:
    """Make and show reference packs: with one, `quantkit audit --ref` measures a file without the BF16 model."""


@refpack.command()
@base_option
@protocol_options
@click.option("-o", "--output", required=True, type=PATH, help="The pack, in safetensors format.")
@click.option("--text", metavar="NAME", default="",
              help="Which of the protocol's texts: each has its own pack, as has the search's second one [default: the first].")
@click.option("--workers", "n_workers", type=click.IntRange(0), default=0,
              help="Worker processes [default: cores / the protocol's threads].")
@click.option("--corpus", type=PATH, help="The evaluation text, if it is not found by itself; its hash is checked.")
@click.option("--n-gpu-layers", type=int, default=0, show_default=True, help="Layers to offload; recorded in the pack.")
@click.option("--main-gpu", type=int, default=0, show_default=True, help="The device for what is not split.")
@click.option("--tensor-split", metavar="A,B,...", default="", help="Shares of the devices.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def make(base: Path, protocol: str, settings: tuple[str, ...], output: Path, text: str, n_workers: int, corpus: Path | None,
         n_gpu_layers: int, main_gpu: int, tensor_split: str, force: bool) -> None:
    """Run the BF16 file once over the protocol's text and keep the head of every distribution; goes on where it was killed."""
    from quantkit.job.refpack import describe_size, make_refpack
    from quantkit.spec.protocol import load_protocol

    loaded = load_protocol(protocol, settings)
    with stderr_progress() as progress:
        pack = make_refpack(base, loaded, output, progress, corpus=corpus, n_workers=n_workers, force=force, name=text,
                            offload=read_offload(n_gpu_layers, main_gpu, tensor_split))
    click.echo(f"{output}: {describe_size(pack)}")


@refpack.command()
@click.argument("pack", type=PATH)
@format_option
def show(pack: Path, output_format: str) -> None:
    """What PACK holds and what it can be used with; every hash in it is checked."""
    from quantkit.job.foreign import open_refpack
    from quantkit.job.refpack import describe_size

    opened = open_refpack(pack, check_rows=True)
    facts, rows = opened.facts, opened.content.rows
    lines: list[list[str | int | float | None]] = [
        ["protocol", facts.protocol_name], ["eval_id", facts.eval_id], ["base", facts.base.file],
        ["base sha256", facts.base.sha256], ["text", facts.corpus_name], ["text sha256", facts.corpus_sha256],
        ["token ids sha256", facts.token_ids_sha256], ["n_vocab", facts.n_vocab], ["n_ctx", facts.n_ctx],
        ["chunks", len(rows)], ["rows", rows.size], ["mass asked for", facts.mass], ["most ids a row", facts.max_ids],
        ["mean ids a row", round(float(rows["n_head"].mean()), 1)], ["mean mass outside", float(f"{rows['tail_mass'].mean():.6g}")],
        ["every so many rows whole", facts.full_every], ["mean entropy, nats", round(float(rows["entropy"].mean()), 4)],
        ["size", describe_size(opened)],
    ]
    lines += [[name, str(value)] for name, value in dataclasses.asdict(facts.arithmetic).items()]
    click.echo(render_table(["what", "value"], lines, output_format), nl=False)
