"""Bundles without an engine: complete run directories whose rows are drawn from a seed, and which verify."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quantkit.core.files import write_atomic
from quantkit.engine.library import BuildFacts
from quantkit.engine.settings import Offload
from quantkit.job.audit import write_tier
from quantkit.job.evaluation import Evaluation, Subject, context_settings
from quantkit.job.manifest import refresh_files, write_manifest
from quantkit.job.rundir import RunFolder
from quantkit.measure.numbers import Rows
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import describe_model
from quantkit.spec.protocol import Protocol, load_protocol, write_protocol
from tests.gguf_factory import tiny_model
from tests.measure.synthetic import make_rows

BUILD = BuildFacts(backend="CPU", llama_cpp_python="0", llama_cpp_commit="none", system_info="none")
N_ARTICLE, N_CHUNK_EACH, N_POS = 16, 4, 63  # demo-v1 scores 63 positions of a chunk


def base_rows_of(seed: int = 0) -> Rows:
    """Rows as one tier of the demo's protocol leaves them; tiers of one bundle must share their base columns."""
    rows = make_rows(n_article=N_ARTICLE, n_chunk=N_CHUNK_EACH, n_pos=N_POS, seed=seed)
    rows["pos"] = 64 + np.arange(len(rows)) % N_POS
    return rows


def tier_rows(rows: Rows, *, kld_factor: float = 1.0, flips: int = 0) -> Rows:
    """Another tier on the same base: KLD scaled, and some more top tokens that differ."""
    own = rows.copy()
    own["kld"] *= kld_factor
    same = np.flatnonzero(own["top1_q"] == own["top1_base"])[:: 7]
    own["top1_q"][same[:flips]] += 1
    return own


def make_bundle(folder: Path, tiers: Mapping[str, Rows], *, sizes: Mapping[str, int] | None = None,
                protocol: Protocol | None = None) -> Path:
    """A run directory with a manifest, rows, summaries and whatever is computed from them.

    Args:
        tiers: rows by name. sizes: of their files, which are not in the bundle; 100 kB each by default.
    """
    protocol = protocol or load_protocol("demo-v1")
    folder.mkdir(parents=True)
    model = describe_model(read_header(tiny_model(folder.parent / f".{folder.name}-BF16.gguf")[0]))
    base = Subject(name="base", model=model, sha256="ba" * 32)
    evaluation = _evaluation(protocol, next(iter(tiers.values())))
    run = RunFolder(path=folder)
    write_atomic(run.protocol, write_protocol(protocol))
    records = {}
    for name, rows in tiers.items():
        size = (sizes or {}).get(name, 100_000)
        sha256 = hashlib.sha256(f"{name} {size}".encode() + rows.tobytes()).hexdigest()
        header = dataclasses.replace(model.header, parts=(Path(f"model-{name}.gguf"),), file_bytes=size)
        subject = Subject(name=name, model=dataclasses.replace(model, header=header), sha256=sha256)
        chunks = {int(chunk): rows[rows["chunk"] == chunk] for chunk in np.unique(rows["chunk"])}
        write_tier(run, evaluation, base.sha256, subject, chunks)
        records[name] = {"file": subject.path.name, "size_bytes": size, "sha256": sha256, "bpw": model.bpw,
                         "bpw_core": model.bpw_core, "imatrix_sha256": None}
    write_manifest(run, protocol, base, evaluation, records, None)
    refresh_files(run)
    return folder


def _evaluation(protocol: Protocol, rows: Rows) -> Evaluation:
    chunks, first = np.unique(rows["chunk"], return_index=True)
    tokens = np.zeros(len(chunks) * protocol.eval.n_ctx, np.int32)
    return Evaluation(
        eval_id=protocol.eval_id, corpus=protocol.corpus(protocol.eval.corpora[0]), text=b"",
        settings=context_settings(protocol.eval), offload=Offload(), tokens=tokens,
        token_ids_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(), add_bos=False,
        n_chunk_total=len(chunks), chunks=chunks.astype(np.int64), articles=rows["article"][first], build=BUILD)
