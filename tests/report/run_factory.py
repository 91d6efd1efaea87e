"""A run directory without an engine: rows with known structure, summaries, plans and a manifest, as a real run leaves them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.core.files import sha256_file
from quantkit.job.parts import write_parquet
from quantkit.job.rundir import RunFolder, write_json
from quantkit.measure.summary import base_rows, summarize
from quantkit.spec.base_facts import BaseFacts
from quantkit.spec.json_records import record_to_json
from quantkit.spec.memory_fit import ContextMemory
from quantkit.spec.plan_records import Change, Plan, PlanRow, tensor_size
from quantkit.spec.protocol import load_protocol, write_protocol
from quantkit.spec.speed_records import Machine, PlainSpeed, Ratio, SpeedResult
from tests.measure.synthetic import make_rows

TIERS = {"Q8_0": 0.002, "Q4_K_M": 0.02, "IQ1_M": 0.3}
_TYPES = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "IQ1_M": "IQ1_M"}


def make_plan(tier: str, type_name: str, *, change: Change = "", n_block: int = 2) -> Plan:
    """Embedding and output at Q6_K, a norm, and one matrix a block at the tier's type."""
    def row(name: str, shape: tuple[int, ...], type_: str, role: Any = "trunk", change: Change = "") -> PlanRow:
        quantizable = len(shape) > 1
        return PlanRow(name=name, shape=shape, role=role, source_type="BF16" if quantizable else "F32", type=type_,
                       rule="default" if quantizable else "keep: norm", wanted=type_, change=change, quantizable=quantizable,
                       size_bytes=tensor_size(shape, type_))

    return Plan(tier=tier, ftype=tier if tier in _TYPES else "Q8_0", rows=(
        row("token_embd.weight", (256, 512), "Q6_K", "embedding"), row("output.weight", (256, 512), "Q6_K", "output"),
        row("output_norm.weight", (256,), "F32"),
        *(row(f"blk.{i}.ffn_down.weight", (512, 256), type_name, change=change) for i in range(n_block))))


def make_run(path: Path, tiers: Mapping[str, float] = TIERS, *, n_article: int = 10, base_file: str = "tiny-BF16.gguf",
             with_base: bool = True, without_plan: Sequence[str] = (), seeds: Mapping[str, int] | None = None,
             files: Mapping[str, str] | None = None, **manifest: Any) -> RunFolder:
    """Write a run of some tiers; each is named by the level of its KLD.

    Args:
        seeds: of a tier's rows; all have the same tokens and articles.
        files: name of a tier's file, where it is not `tiny-<tier>.gguf`.
        manifest: keys to replace in manifest.json.
    """
    run, protocol = RunFolder(path=path), load_protocol("demo-v1")
    path.mkdir(parents=True, exist_ok=True)
    run.protocol.write_bytes(write_protocol(protocol))
    records = {}
    rows_of_base = make_rows(n_article=n_article)
    for i, (tier, level) in enumerate(tiers.items()):
        rows = make_rows(n_article=n_article, level=level, flip_share=min(0.9, 2 * level**0.5), seed=0)
        rng = np.random.default_rng((seeds or {}).get(tier, i))
        rows["kld"] *= np.exp(rng.normal(0, 0.1, len(rows)))
        rows["nll_q"] = rows["nll_base"] + level * rng.normal(0.5, 0.5, len(rows))
        write_parquet(run.rows(tier), rows, {})
        plan = make_plan(tier, _TYPES.get(tier, "Q8_0"))
        if tier not in without_plan:
            write_json(run.plan(tier), plan.to_json())
        write_json(run.summary(tier), {
            "tier": tier, "rows_sha256": sha256_file(run.rows(tier)), "n_ctx": 128, "n_chunk_total": 40,
            "chunks": np.unique(rows["chunk"]).tolist(),
            "summary": summarize(rows).to_json(), "base_summary": summarize(base_rows(rows_of_base)).to_json()})
        records[tier] = {
            "file": (files or {}).get(tier, f"tiny-{tier}.gguf"), "size_bytes": plan.tensor_bytes + 4096 - 100 * i,
            "sha256": hashlib.sha256(tier.encode()).hexdigest(), "bpw": plan.bpw, "bpw_core": plan.bpw_core, "plan_sha256": None,
            "rows_sha256": sha256_file(run.rows(tier)), "summary_sha256": sha256_file(run.summary(tier))}
    facts = {"name": protocol.name, "protocol_id": protocol.protocol_id, "eval_id": protocol.eval_id, "plan_id": protocol.plan_id,
             "imatrix_id": protocol.imatrix_id, "mtp_id": protocol.mtp_id, "derived": []}
    write_json(run.manifest, {
        "result_id": "a1" * 32, "schema": 1, "quantkit": "0.1.0", "rows_version": 1, "protocol": facts, "base": {
            "file": base_file, "sha256": "b2" * 32, "size_bytes": 2_000_000, "type": "BF16", "architecture": "llama",
            "n_params": 524_544, "bpw": 16.0, "bpw_core": 16.0},
        "corpus": {"name": "demo-eval.txt", "sha256": "c3" * 32}, "token_ids_sha256": "d4" * 32, "further_corpora": [],
        "imatrix": None,
        "build": {"backend": "CPU", "llama_cpp_python": "0.3.36", "llama_cpp_commit": "0c1e570", "system_info": "CPU : AVX2 = 1",
                  "n_gpu_layers": 0, "main_gpu": 0, "tensor_split": []},
        "libraries": {"numpy": "2.0.0"}, "tiers": records, "files": {}, **manifest})
    if with_base:
        write_json(path / "base.json", make_base().to_json())
    return run


def make_base() -> BaseFacts:
    """A base trained for 4,096 tokens."""
    memory = ContextMemory(n_ctx=4096, kv_type="F16", kv_bytes=1 << 30, recurrent_bytes=0, compute_bytes=1 << 28, source="header")
    return BaseFacts(name="Tiny", license="apache-2.0", repository="Owner/Tiny", languages=("en",), n_ctx_train=4096,
                     tied_embeddings=False, memory=(memory,))


def change_json(path: Path, **values: Any) -> None:
    """Replace keys of a JSON file."""
    write_json(path, {**json.loads(path.read_bytes()), **values})


def add_speed(run: RunFolder, tier: str, *, decode_tokens_per_s: float = 85.25) -> None:
    """A tier's times as a run leaves them, on a machine with a name that is no markup."""
    machine = Machine(processor="Some <CPU>", n_cores=8, n_threads=4, backend="CPU", llama_cpp_commit="abc", system_info="AVX2 = 1")
    plain = PlainSpeed(prompt_tokens_per_s=1234.56, decode_tokens_per_s=decode_tokens_per_s, peak_memory_bytes=3 << 30,
                       noise=Ratio(value=None, reason="fewer than two repeats"))
    write_json(run.record("speed", tier), record_to_json(SpeedResult(
        check_id="c", tier=tier, file=f"tiny-{tier}.gguf", machine=machine, n_prompt=3, n_voided=0, repeats=1, n_warmup=1,
        sampling="temperature 0.8", plain=plain, drafts=(), draft_peak_memory_bytes=None, best_n_draft=None)))
