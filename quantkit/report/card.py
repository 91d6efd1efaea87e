"""`--card`: a Hugging Face model card, or the block of one between two markers that `--update` replaces.

    ---                                  YAML front matter: what the hub sorts by; only in a new card
    # ...                                title; only in a new card
    <!-- quantkit:begin -->              the block: which file, table, pictures, evidence, how to verify
    <!-- quantkit:end -->

The front matter and everything around the block are the publisher's. Names and metadata out of files are text in the block, never
markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.core.errors import InputError
from quantkit.core.files import write_atomic
from quantkit.core.units import format_bytes
from quantkit.job.manifest import refresh_files
from quantkit.report.cells import draft_text, estimate_text, rate_text, speed_notes
from quantkit.report.escape import base_name, md_text, plain_line, significant
from quantkit.report.fit_table import card_fits, short_n_ctx
from quantkit.report.guidance import recommend
from quantkit.report.not_measured import not_measured, verify_steps
from quantkit.report.pictures import NAMES
from quantkit.report.run_data import RunData
from quantkit.report.table import TableRow
from quantkit.spec.memory_fit import CARDS_GIB

BEGIN, END = "<!-- quantkit:begin -->", "<!-- quantkit:end -->"

_ALT = {"kld_vs_size": "Mean KLD against file size", "same_top_p_vs_size": "Same top token against file size",
        "ppl_vs_size": "Change of perplexity against file size", "kld_tail": "Share of tokens above each KLD",
        "by_slice": "Mean KLD by kind of token", "by_layer_types": "Tensor types of each tier",
        "kld_by_text": "Mean KLD on each text", "mtp_matrix": "Acceptance of MTP heads"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """What the publisher says and no file holds; None: what the base's file says, or nothing."""

    base_model: str | None = None
    license: str | None = None
    quantized_by: str | None = None


def new_card(data: RunData, options: CardOptions, root: str = "") -> str:
    """A whole card.

    Args:
        root: the run's folder as the card links to it, empty or ending in a slash; empty where the bundle is the repository.
    """
    name = (data.base.name if data.base else None) or base_name(data.header.base_file).removesuffix(".gguf")
    return f"{front_matter(data, options)}\n# {md_text(name)} GGUF\n\n{card_block(data, root)}\n"


def front_matter(data: RunData, options: CardOptions) -> str:
    """The YAML that the hub reads; what is not known is left out. Values are JSON strings, which are YAML whatever is in them."""
    base = data.base
    repository = options.base_model or (base.repository if base else None)
    pairs: list[tuple[str, str | None]] = [
        ("base_model", repository), ("base_model_relation", "quantized" if repository else None),
        ("license", options.license or (base.license if base else None)), ("pipeline_tag", "text-generation"),
        ("library_name", "gguf"), ("quantized_by", options.quantized_by)]
    lines = [f"{key}: {_yaml(value)}" for key, value in pairs if value]
    if base and base.languages:
        lines += ["language:", *(f"- {_yaml(language)}" for language in base.languages)]
    return "\n".join(["---", *lines, "tags:", "- gguf", "- quantized", "- kl-divergence", "---", ""])


def missing_keys(data: RunData, options: CardOptions) -> list[str]:
    """Keys of the front matter that nobody told; the hub wants them."""
    base = data.base
    known = {"base_model": options.base_model or (base.repository if base else None),
             "license": options.license or (base.license if base else None), "quantized_by": options.quantized_by}
    return [key for key, value in known.items() if not value]


def card_block(data: RunData, root: str = "") -> str:
    """The block with its markers; equal records give equal bytes."""
    return "\n".join([BEGIN, *_block_lines(data, root), END])


def updated_card(path: Path, data: RunData, options: CardOptions) -> str:
    """A card's text with the block of this run: in place of the block that is there, or a whole new card where there is no file.

    Raises:
        InputError: the file has no markers, or more than one pair; says what to add.
    """
    root = root_from(path, data)
    if not path.exists():
        return new_card(data, options, root)
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise InputError(f"expected one line {BEGIN} and below it one line {END} in {path}, found {text.count(BEGIN)} and "
                         f"{text.count(END)}: put both where the block shall go")
    before, rest = text.split(BEGIN)
    block = card_block(data, root)
    return before + (block.replace("\n", "\r\n") if "\r\n" in text else block) + rest.split(END)[1]


def write_card(path: Path, text: str, data: RunData) -> None:
    """Write what `updated_card` gave, every other byte of the file as it was; a card inside the run is part of its bundle."""
    write_atomic(path, text.encode("utf-8", "surrogateescape"))
    if path.resolve().is_relative_to(data.run.path.resolve()):
        refresh_files(data.run)


def root_from(path: Path, data: RunData) -> str:
    """The run's folder relative to a card: where it is, or none as in a repository that is the bundle."""
    card, run = path.resolve().parent, data.run.path.resolve()
    return f"{run.relative_to(card).as_posix()}/".removeprefix("./") if run.is_relative_to(card) else ""


def _yaml(value: str) -> str:
    """A double-quoted string; what could look like a marker or markup is escaped as YAML escapes it."""
    return json.dumps(plain_line(value), ensure_ascii=False).replace("<", "\\u003c").replace(">", "\\u003e")


def _block_lines(data: RunData, root: str) -> Iterator[str]:
    header = data.header
    yield (f"Made from {md_text(base_name(header.base_file))} ({md_text(header.base_type)}, sha256 `{header.base_sha256}`) and "
           f"measured against it, token by token, on {md_text(header.corpus_name)}: {header.n_scored:,} tokens of "
           f"{header.n_article} article{'' if header.n_article == 1 else 's'}.")
    guidance = recommend(data)
    if guidance or data.sentences:
        yield from ("", "## Which file?", "", *(f"- {md_text(line)}" for line in guidance),
                    *(f"- **{md_text(tier)}**: {md_text(sentence)}" for tier, sentence in data.sentences.items()))
    yield from ("", "## Retention", "", *_table(data, root), "", *_speed_table(data), *_notes(data))
    shown = [name for name in NAMES if (data.run.report / f"{name}.png").exists()]
    yield from ("", *(f"![{_ALT[name]}]({_link(root)}report/{name}.png)" for name in shown))
    yield from ("", "## What was not measured", "", *(f"- {md_text(line)}" for line in not_measured(data)))
    yield from ("", "## Evidence", "", *_evidence(data, root), "", "## How to verify", "")
    for step in verify_steps(data):
        yield f"- {md_text(step.what)}" + (f" {_code(step.command)}" if step.command else "")


def _table(data: RunData, root: str) -> list[str]:
    letters, base = data.letters, data.base
    columns = ["Tier", "Size", "bpw", "Mean KLD", "99.9 % KLD", "PPL drift", "Same top token"]
    columns += ["Group"] * bool(letters) + [f"Card at {short_n_ctx(m.n_ctx)}" for m in (base.memory if base else ())]
    rows = [columns, [":---", *["---:"] * (len(columns) - 1)]]
    for row in data.rows:
        cells = [_tier(row, data, root), format_bytes(row.size_bytes), f"{row.bpw:.2f}", estimate_text(row.summary.kld),
                 significant(row.summary.kld_quantile(0.999).value, 3),
                 estimate_text(row.summary.ppl_drift, percent=True, signed=True),
                 estimate_text(row.summary.same_top_p, percent=True)]
        cells += [md_text(letters.get(row.tier, ""))] * bool(letters)
        cells += [fit.text.replace(">", "&gt;") for fit in card_fits(row, data.plans.get(row.tier), base)] if base else []
        rows.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _speed_table(data: RunData) -> list[str]:
    """How fast the tiers are, under the table of what they keep; nothing where none was timed."""
    if not data.speeds:
        return []
    drafts = ["With drafts"] * any(speed.drafts for speed in data.speeds.values())
    rows = [["Tier", "Prompt tok/s", "Decode tok/s", "Peak memory", *drafts], [":---", *["---:"] * (3 + len(drafts))]]
    for row in data.tiers:
        if (speed := data.speeds.get(row.tier)) is not None:
            plain = speed.plain
            rows.append([md_text(row.tier), rate_text(plain.prompt_tokens_per_s), rate_text(plain.decode_tokens_per_s),
                         format_bytes(plain.peak_memory_bytes), *[draft_text(speed)] * len(drafts)])
    return [*("| " + " | ".join(cells) + " |" for cells in rows), ""]


def _tier(row: TableRow, data: RunData, root: str) -> str:
    """The tier's name, linked to its file where that is part of the bundle."""
    name, file = md_text(row.tier) + " †" * bool(row.substituted) + " ‡" * bool(row.reference), f"quants/{base_name(row.file)}"
    return f"[{name}]({_link(root + file)})" if not row.is_base and file in data.manifest["files"] else name


def _link(path: str) -> str:
    """A relative link to a file, whatever its name."""
    from urllib.parse import quote

    return quote(path, safe="/-_.~")


def _code(command: str) -> str:
    """A code span around anything: its fence is longer than any run of backticks inside."""
    line = plain_line(command).replace(END, "").replace(BEGIN, "")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def _notes(data: RunData) -> Sequence[str]:
    lines = ["± is one standard error over articles; KLD in nats per token. KLD belongs to the file and the arithmetic "
             f"({md_text(data.header.backend)}, llama.cpp {md_text(data.header.llama_commit)}), not to the file alone. bpw is that "
             "of the whole file. Retention is not a benchmark score."]
    if data.letters:
        lines.append("Tiers that share a letter are not told apart by mean KLD; sharing a letter is not equality.")
    if data.base and data.base.memory:
        lines.append(f"Card: the smallest of {', '.join(map(str, CARDS_GIB))} GiB (2^30 bytes) that holds every layer, an F16 KV "
                     "cache and buffers. A file's size is not its memory.")
    lines += [md_text(note) for note in speed_notes(data.speeds.values())]
    lines += [f"† {md_text(row.tier)}: {100 * row.substituted:.1f} % of parameters have another type than was asked for; believe "
              "its bpw, not its name." for row in data.tiers if row.substituted]
    lines += [f"‡ {md_text(row.tier)}: {md_text('; '.join(row.reference.notes()))}" for row in data.tiers if row.reference]
    return [line for pair in ((text, "") for text in lines) for line in pair][:-1]


def _evidence(data: RunData, root: str) -> list[str]:
    header, link = data.header, _link(root) + "report"
    return [
        f"- Result `{header.result_id}`, protocol {md_text(header.protocol_name)} `{header.protocol_id}`, eval_id "
        f"`{header.eval_id}`" + (f", derived: {md_text(header.derived)}" if header.derived else ""),
        f"- Text {md_text(header.corpus_name)}, sha256 `{header.corpus_sha256}`; {md_text(header.chunk_rule)} of {header.n_ctx} "
        f"tokens; tokens sha256 `{header.token_ids_sha256}`",
        f"- [Every number]({link}/retention.csv), [the whole report]({link}/report.html), [plots as SVG]({link}/kld_vs_size.svg)",
        "- Files: " + ", ".join(f"{md_text(base_name(row.file))} `{row.sha256}`" for row in data.tiers),
    ]
