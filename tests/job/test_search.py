"""A search from end to end: resumable to the byte, within its budget, its plan usable and its proposals judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

import pytest

from quantkit.core.errors import InputError
from quantkit.job.ladder import RunOptions
from quantkit.job.progress import Silent
from quantkit.job.refpack import make_refpack
from quantkit.job.refpack_texts import TextPack
from quantkit.job.search import SearchOutcome, search
from quantkit.job.search_budget import HEADER_SLACK, Budget, StockPlans, Want, make_budgets
from quantkit.job.sensitivity import make_groups
from quantkit.job.standalone import quantize_to_file
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import Plan
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.refpack_file import Refpack
from quantkit.spec.tensor_types import FTYPES
from tests.spec.plan_models import resolve, tiny

SETTINGS = ("search.types=[\"Q8_0\", \"Q4_K\", \"Q2_K\"]", "search.weights_types=[\"Q8_0\"]", "search.n_band=1",
            "search.search_n_chunk=3", "search.select_n_chunk=3", "search.report_n_chunk=12", "search.quick_n_chunk=2",
            "gate.min_n_chunk=12")
WANTS = (Want(kind="match", tier="Q4_K_M"), Want(kind="bpw", bpw=6.5))


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", SETTINGS)


@pytest.fixture(scope="module")
def options(shared: Path) -> RunOptions:
    return RunOptions(imatrix=shared / "oracle" / "imatrix-tiny.gguf", n_workers=2)


@pytest.fixture(scope="module")
def done(tiny_model: Path, protocol: Protocol, options: RunOptions, tmp_path_factory: pytest.TempPathFactory) -> SearchOutcome:
    return search(tiny_model, protocol, tmp_path_factory.mktemp("search") / "run", WANTS, Silent(), options)


class StopsAt(Silent):
    """Ends the job after so many units of work."""

    def __init__(self, n: int) -> None:
        self.left = n

    def advance(self, n: int = 1) -> None:
        self.left -= n
        if self.left < 0:
            raise RuntimeError("killed")


def test_groups_are_what_a_plan_decides_and_the_trunk_sees(protocol: Protocol) -> None:
    model = tiny(n_block=4, n_nextn=1)
    spec = load_protocol("demo-v1").search
    lengths = {t.name: t.shape[0] for t in model.header.tensors if "token_embd" not in t.name}
    groups = make_groups(model, spec, lengths)
    assert "blk.0.attn_norm.weight" not in groups
    assert not any(name.startswith("blk.4.") for name in groups)  # the MTP block
    assert "IQ2_S" in groups["blk.0.ffn_down.weight"].types
    assert "IQ2_XS" not in groups["token_embd.weight"].types  # looked up, so it has no importances
    banded = make_groups(model, protocol.search, lengths)
    assert banded["blk.*.ffn_down.weight band 0"].tensors == tuple(f"blk.{i}.ffn_down.weight" for i in range(4))


class FakePlans:
    """Mixes whose sizes are given."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model

    def plan(self, ftype: str) -> Plan:
        return resolve(self._model, default=FTYPES[ftype].default_type, ftype=ftype)

    def below(self, tensor_bytes: int) -> Plan:
        return self.plan("Q4_K_M")


def budgets(model: ModelInfo, *wants: Want) -> list[Budget]:
    return make_budgets(wants, cast(StockPlans, FakePlans(model)), model, load_protocol("demo-v1"))


def test_budgets_are_counted_in_tensor_bytes_smallest_first() -> None:
    model = tiny(n_block=2)
    match, size, bpw = (Want(kind="match", tier="Q4_K_M"), Want(kind="size", size_bytes=10_000_000), Want(kind="bpw", bpw=4.0))
    found = {b.name: b for b in budgets(model, match, size, bpw)}
    assert list(found) == sorted(found, key=lambda name: found[name].tensor_bytes)
    assert found["search-4-bpw"].tensor_bytes == model.n_params // 2
    assert found["search-10000000-bytes"].tensor_bytes == 10_000_000 - 4096 - HEADER_SLACK
    assert found["search-Q4_K_M"].tensor_bytes == found["search-Q4_K_M"].stock.tensor_bytes
    assert found["search-Q4_K_M"].has_incumbent
    assert not found["search-4-bpw"].has_incumbent  # the mix is larger


def test_a_size_below_the_header_and_a_budget_twice_are_refused() -> None:
    with pytest.raises(InputError, match="beyond the header's"):
        budgets(tiny(), Want(kind="size", size_bytes=5000))
    with pytest.raises(InputError, match="got one twice"):
        budgets(tiny(), Want(kind="bpw", bpw=4.0), Want(kind="bpw", bpw=4.0))


@pytest.mark.engine
def test_plans_meet_their_budgets_from_below_in_the_order_of_the_ladder(done: SearchOutcome) -> None:
    small, large = done.result.proposals
    assert (small.tier, large.tier) == ("search-Q4_K_M", "search-6.5-bpw")
    for proposal in (small, large):
        assert proposal.tensor_bytes <= proposal.budget_bytes
        assert proposal.predicted_kld > 0
        assert proposal.bound <= proposal.predicted_kld * (1 + 1e-9)
        assert proposal.unmeasured_kld <= 0.02 * proposal.predicted_kld
    sizes = [{c.group: c.size_bytes for c in p.choices} for p in (small, large)]
    assert all(sizes[0][group] <= sizes[1][group] for group in sizes[0])
    assert large.search_kld < small.search_kld


@pytest.mark.engine
def test_sets_share_no_chunk_and_the_log_holds_what_the_report_set_judged(done: SearchOutcome) -> None:
    sets = [set(done.result.search_chunks), set(done.result.select_chunks), set(done.result.report_chunks)]
    assert sum(map(len, sets)) == len(set.union(*sets))
    judged = [p for p in done.result.proposals if p.k]
    log = done.folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert [(line["tier"], line["k"], line["label"]) for line in lines] == [(p.tier, p.k, p.label) for p in judged]


@pytest.mark.engine
def test_a_plan_quantizes_to_the_types_and_the_bytes_it_promised(done: SearchOutcome, tiny_model: Path, options: RunOptions,
                                                                 tmp_path: Path) -> None:
    proposal = done.result.proposals[0]
    quantize_to_file(tiny_model, load_protocol(done.files[proposal.tier]), proposal.tier, tmp_path / "q.gguf", Silent(),
                     imatrix=options.imatrix)
    written = read_header(tmp_path / "q.gguf")
    assert sum(t.size_bytes + -t.size_bytes % 32 for t in written.tensors) == proposal.tensor_bytes
    assert written.data_offset[0] <= read_header(tiny_model).data_offset[0] + HEADER_SLACK  # what --size sets aside
    types = {t.name: t.type.name for t in written.tensors}
    groups = {g.name: g.tensors for g in done.result.groups}
    assert {name: c.type for c in proposal.choices for name in groups[c.group]} == {
        name: types[name] for c in proposal.choices for name in groups[c.group]}
    assert describe_model(written).ftype_name == proposal.ftype


@pytest.mark.engine
def test_a_plan_is_exported_for_llama_quantize(done: SearchOutcome) -> None:
    path = done.files["search-Q4_K_M"]
    lines = path.with_name("search-Q4_K_M.tensor-types.txt").read_text().splitlines()
    chosen = {c.group: c.type for c in done.result.proposals[0].choices}
    assert f"^output\\.weight$={chosen['output.weight'].lower()}" in lines
    assert path.with_name("search-Q4_K_M.command.txt").read_text().endswith("search-Q4_K_M.gguf Q4_K_M\n")
    assert f"#   output.weight  {chosen['output.weight']}" in path.read_text()


@pytest.mark.engine
@pytest.mark.parametrize("n", [5, 22])
def test_killed_and_resumed_with_one_worker_it_gives_the_same_bytes(n: int, done: SearchOutcome, tiny_model: Path,
                                                                    protocol: Protocol, options: RunOptions,
                                                                    tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        search(tiny_model, protocol, tmp_path / "run", WANTS, StopsAt(n), options)
    cache = tmp_path / "run" / "parts" / "search" / "trials.jsonl"
    if cache.exists():
        cache.write_bytes(cache.read_bytes() + b'{"key": "cut off in the mid')
    alone = RunOptions(imatrix=options.imatrix, n_workers=1)
    again = search(tiny_model, protocol, tmp_path / "run", WANTS, Silent(), alone)
    assert again.result == done.result
    for path in sorted(p for p in done.folder.rglob("*") if p.is_file()):
        assert path.read_bytes() == (again.folder / path.relative_to(done.folder)).read_bytes(), path.name


@pytest.mark.engine
def test_quick_verifies_nothing_and_leaves_the_report_set_alone(tiny_model: Path, protocol: Protocol, options: RunOptions,
                                                                tmp_path: Path) -> None:
    quick = search(tiny_model, protocol, tmp_path / "run", WANTS[:1], Silent(), options, quick=True)
    assert [p.label for p in quick.result.proposals] == ["not verified"]
    assert not (quick.folder / "log.jsonl").exists()
    assert not (quick.folder / "plans").exists()


@pytest.mark.engine
def test_a_budget_below_the_smallest_types_is_refused(tiny_model: Path, protocol: Protocol, options: RunOptions,
                                                      tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a budget of at least"):
        search(tiny_model, protocol, tmp_path / "run", [Want(kind="bpw", bpw=2.0)], Silent(), options)


@pytest.mark.engine
def test_packs_of_all_chunks_stand_in_base_place_on_both_texts(done: SearchOutcome, tiny_model: Path, options: RunOptions,
                                                               tmp_path: Path) -> None:
    options = dataclasses.replace(options, n_workers=1)
    second = load_protocol("demo-v1", [*SETTINGS, "search.second_corpus=calibration.txt", "search.second_n_chunk=8",
                                       "refpack.mass=0.999"])
    packs = [make_refpack(tiny_model, second, tmp_path / name, Silent(), name=name, n_workers=1).path
             for name in ("calibration.txt", "demo-eval.txt")]
    assert len(Refpack(packs[0]).content.chunks) == 8  # what a search takes of it
    result = search(tiny_model, second, tmp_path / "run", WANTS[:1], Silent(), options, refs=packs).result
    assert [(r.corpus, r.mass) for r in result.references] == [("demo-eval.txt", 0.999), ("calibration.txt", 0.999)]
    known = {(c.group, c.type): c for c in done.result.costs if c.source != "predicted"}
    both = [(known[c.group, c.type], c) for c in result.costs if c.source != "predicted" and (c.group, c.type) in known]
    assert len(both) > len(result.groups)
    assert all(0.99 * full.kld < own.kld < full.kld for full, own in both)  # a lower bound, and a close one
    assert len(result.second_chunks) == 8


@pytest.mark.engine
def test_packs_that_a_search_cannot_use_are_refused_before_any_work(tiny_model: Path, protocol: Protocol, options: RunOptions,
                                                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(options, n_workers=1)
    few = load_protocol("demo-v1", [*SETTINGS, "eval.chunks=spread", "eval.n_chunk=4"])
    pack = make_refpack(tiny_model, few, tmp_path / "few", Silent(), n_workers=1).path
    with pytest.raises(InputError, match=r"does not hold chunk \d+ of demo-eval.txt, which the search's search set needs: it has"):
        search(tiny_model, few, tmp_path / "run", WANTS, Silent(), options, refs=[pack])
    with pytest.raises(InputError, match="is a reference pack of another evaluation"):
        search(tiny_model, protocol, tmp_path / "other", WANTS, Silent(), options, refs=[pack])
    monkeypatch.setattr(TextPack, "same_arithmetic", lambda *_: False)
    with pytest.raises(InputError, match="holds answers of the base from another build or device"):
        search(tiny_model, few, tmp_path / "run", WANTS, Silent(), options, refs=[pack])


@pytest.mark.engine
def test_a_report_set_below_what_the_commit_rule_wants_is_refused(tiny_model: Path, options: RunOptions, tmp_path: Path) -> None:
    protocol = load_protocol("demo-v1", [*SETTINGS, "gate.min_n_chunk=13"])
    with pytest.raises(InputError, match=r"expected at least 13 chunks to report on \(gate.min_n_chunk\), got 12"):
        search(tiny_model, protocol, tmp_path / "run", WANTS, Silent(), options)
