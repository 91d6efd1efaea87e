"""The report of a run directory: tables, pictures and the page, all from its records, and the same bytes every time.

    report/ retention.md .csv .json .parquet  kld_vs_size.png .svg  ...  mtp.md
            report.html  speed.md .json            what was timed, on the machine that it names; listed apart
            <corpus>/ the same of a second and later text

Nothing is computed here. report/speed.json is the record of the times: whoever has the bundle makes the page from it again.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quantkit.core.files import write_atomic
from quantkit.job.fit import keep_base
from quantkit.job.manifest import refresh_files
from quantkit.job.rundir import RunFolder
from quantkit.report.html import report_html
from quantkit.report.mtp_report import acceptance_md, keep_speeds, read_results, read_speeds, speed_md
from quantkit.report.pictures import NAMES, draw_run, draw_texts
from quantkit.report.plot_style import Picture
from quantkit.report.run_data import RunData, read_run, read_texts
from quantkit.report.table import (
    COLUMNS,
    TableHeader,
    TableRow,
    order_rows,
    retention_csv,
    retention_json,
    retention_md,
)


class Tables(NamedTuple):
    """One table in three forms."""

    markdown: str
    csv: str
    json: str


def write_report(path: Path) -> Tables:
    """Write everything in report/ that comes from the run's records, and list it in the manifest.

    Raises:
        InputError: no run there, or none with a measured tier.
    """
    run = RunFolder(path=path)
    keep_base(run)
    keep_speeds(run)
    refresh_files(run)  # the id that the tables print is that of everything measured so far
    made = render_report(run)
    for name in report_names(made) - set(made):
        (run.path / name).unlink(missing_ok=True)  # a picture of what is no longer there
    for name, content in made.items():
        write_atomic(run.path / name, content)
    refresh_files(run)
    texts = [made[f"report/retention.{kind}"].decode() for kind in ("md", "csv", "json")]
    return Tables(*texts)


def render_report(run: RunFolder) -> dict[str, bytes]:
    """Every file of the report by its path in the run directory; of a second and later text in a folder of its name.

    Raises:
        InputError: see `read_run`.
    """
    texts = read_texts(run.path)
    out: dict[str, bytes] = {}
    for data in texts:
        folder = f"report/{data.run.corpus}/" if data.run.corpus else "report/"
        pictures = draw_run(data)
        if len(texts) > 1 and data is texts[0]:
            pictures = {"kld_by_text": draw_texts(texts), **pictures}
        out |= {folder + name: content for name, content in _render_text(data, pictures).items()}
    if results := read_results(run):
        out["report/mtp.md"] = acceptance_md(results).encode()
    if speeds := read_speeds(run):
        out["report/speed.md"] = speed_md(speeds).encode()
    return out


def _render_text(data: RunData, pictures: Mapping[str, Picture]) -> dict[str, bytes]:
    out = {
        "retention.md": retention_md(data.header, data.rows, data.verdicts).encode(),
        "retention.csv": retention_csv(data.rows).encode(),
        "retention.json": retention_json(data.header, data.rows, data.verdicts).encode(),
        "retention.parquet": retention_parquet(data.rows),
        "report.html": report_html(data, pictures).encode(),
    }
    for name, picture in pictures.items():
        out[f"{name}.png"], out[f"{name}.svg"] = picture.png, picture.svg
    return out


def report_names(made: Iterable[str]) -> set[str]:
    """Every path that a report with these files could have: what of it is there and was not made is out of date."""
    kinds = [f"retention.{kind}" for kind in ("md", "csv", "json", "parquet")] + ["report.html"]
    kinds += [f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")]
    return ({f"{folder}/{kind}" for folder in {name.rpartition("/")[0] for name in made} for kind in kinds}
            | {"report/mtp.md", "report/speed.md"})


def make_tables(run: RunFolder) -> Tables:
    """The tables of a run from its records, as `write_report` writes them.

    Raises:
        InputError: see `read_run`.
    """
    data = read_run(run.path)
    return Tables(retention_md(data.header, data.rows, data.verdicts), retention_csv(data.rows),
                  retention_json(data.header, data.rows, data.verdicts))


def tables_by_name(tables: Tables) -> dict[str, str]:
    """Each table by its path in the run directory."""
    return {"report/retention.md": tables.markdown, "report/retention.csv": tables.csv, "report/retention.json": tables.json}


def read_tables(run: RunFolder) -> tuple[TableHeader, list[TableRow]]:
    """The records of a run as the table takes them; the base first.

    Raises:
        InputError: see `read_run`.
    """
    data = read_run(run.path)
    return data.header, list(data.rows)


def retention_parquet(rows: Sequence[TableRow]) -> bytes:
    """The csv's table with its types: texts, 64-bit integers, float64; null where a number is not defined."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ordered = order_rows(rows)
    columns = {}
    for name, read in COLUMNS.items():
        values = [read(row) for row in ordered]
        if any(isinstance(value, str) for value in values):
            kind = pa.string()
        else:
            kind = pa.int64() if all(isinstance(value, int) for value in values) else pa.float64()
        columns[name] = pa.array([float(v) if kind == pa.float64() and v is not None else v for v in values], kind)
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd", compression_level=3, use_dictionary=False, write_statistics=False,
                   version="2.6", data_page_version="1.0")
    return out.getvalue()
