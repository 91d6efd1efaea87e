"""How fast the tiers are, on the page: under the table of what they keep, on the machine that is named."""

from __future__ import annotations

from quantkit.core.units import format_bytes
from quantkit.report.cells import draft_text, rate_text, speed_notes
from quantkit.report.html_parts import Cell, Html, bullets, element, table
from quantkit.report.run_data import RunData
from quantkit.spec.speed_records import SpeedResult

_COLUMNS = ["Tier", "Size", "Prompt tok/s", "Decode tok/s", "Peak memory"]


def speed_table(data: RunData) -> list[Html]:
    """A heading, the table, and what it was taken on; nothing where no tier was timed."""
    if not data.speeds:
        return []
    shown = [(row, data.speeds[row.tier]) for row in data.tiers if row.tier in data.speeds]
    with_drafts = any(speed.drafts for _, speed in shown)
    rows = []
    for row, speed in shown:
        plain = speed.plain
        rows.append([Cell(row.tier), Cell(format_bytes(row.size_bytes), row.size_bytes),
                     Cell(rate_text(plain.prompt_tokens_per_s), plain.prompt_tokens_per_s),
                     Cell(rate_text(plain.decode_tokens_per_s), plain.decode_tokens_per_s),
                     Cell(format_bytes(plain.peak_memory_bytes), plain.peak_memory_bytes),
                     *([Cell(draft_text(speed), _best(speed))] if with_drafts else [])])
    return [element("h3", "Speed"), table([*_COLUMNS, *["With drafts"] * with_drafts], rows, sortable=True),
            bullets(speed_notes(speed for _, speed in shown))]


def _best(speed: SpeedResult) -> float | None:
    return max((d.speedup.value for d in speed.drafts if d.speedup.value is not None), default=None)
