"""Reference packs of a model of 250 kB: one file however the work was spread or stopped, and the audits that it stands for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.core.errors import EngineError, InputError
from quantkit.core.files import sha256_file
from quantkit.job.ladder import audit_files
from quantkit.job.parts import Rows, read_parquet
from quantkit.job.progress import Silent
from quantkit.job.refpack import make_refpack
from quantkit.job.refpack_audit import audit_with_packs
from quantkit.job.refpack_parts import ChunkFolder
from quantkit.job.regenerate import RecheckOptions, recheck
from quantkit.job.remeasure_pack import remeasure_with_pack
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.session import RunOptions, RunResult
from quantkit.job.standalone import quantize_to_file
from quantkit.job.verify_findings import Findings
from quantkit.spec.protocol import Protocol, load_protocol
from quantkit.spec.refpack_file import Refpack
from tests.gguf_factory import tiny_model

pytestmark = pytest.mark.engine

ALONE = RunOptions(n_workers=1)
SETTINGS = ["eval.chunks=spread", "eval.n_chunk=12", "refpack.full_every=16", "refpack.mass=0.9"]  # its rows are nearly flat


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", SETTINGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("a model") / "bäse-BF16.gguf", n_embd=256, n_ff=256)[0]


@pytest.fixture(scope="module")
def tier(base: Path, protocol: Protocol) -> Path:
    target = base.parent / "tier-Q8_0.gguf"
    quantize_to_file(base, protocol, "Q8_0", target, Silent())
    return target


@pytest.fixture(scope="module")
def pack(base: Path, protocol: Protocol) -> Path:
    return make_refpack(base, protocol, base.parent / "ref.safetensors", Silent(), n_workers=1).path


@pytest.fixture(scope="module")
def direct(base: Path, tier: Path, protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return done(audit_files(base, protocol, tmp_path_factory.mktemp("direct") / "run", [tier], Silent()))


def done(result: RunResult) -> RunFolder:
    assert result.failed == {}
    return result.folder


def rows_of(run: RunFolder, tier: str) -> Rows:
    return read_parquet(run.rows(tier))[0]


class Stopping(Silent):
    """Interrupts after some units of work."""

    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, n: int = 1) -> None:
        self._left -= n
        if self._left <= 0:
            raise KeyboardInterrupt


def test_the_bytes_do_not_depend_on_workers_or_stops(base: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    make_refpack(base, protocol, tmp_path / "two", Silent(), n_workers=2)
    with pytest.raises(KeyboardInterrupt):
        make_refpack(base, protocol, tmp_path / "ref", Stopping(5), n_workers=2)
    (left,) = tmp_path.glob(".ref.*")
    (one, *_) = sorted(left.rglob("*.chunk"))
    one.write_bytes(b"damaged" + one.read_bytes()[7:])
    with pytest.raises(KeyboardInterrupt):
        make_refpack(base, protocol, tmp_path / "ref", Stopping(9))
    make_refpack(base, protocol, tmp_path / "ref", Silent())
    assert (tmp_path / "two").read_bytes() == pack.read_bytes()
    assert (tmp_path / "ref").read_bytes() == pack.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ref", "two"]


def test_a_pack_names_no_folder_of_this_machine(base: Path, pack: Path) -> None:
    assert str(base.parent).encode() not in pack.read_bytes()


def test_base_against_its_pack_is_exactly_zero(base: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    run = done(audit_with_packs([pack], protocol, tmp_path / "run", [base], Silent()))
    rows = rows_of(run, base.stem)
    assert np.count_nonzero(rows["kld"]) == 0
    assert np.array_equal(rows["nll_q"], rows["nll_base"])
    ref = read_json(run.summary(base.stem))["ref"]
    assert (ref["shortfall"], ref["shortfall_se"], ref["same_arithmetic"]) == (0.0, 0.0, True)


def test_all_but_the_kld_is_that_of_an_audit_and_the_shortfall_explains_the_rest(
        base: Path, tier: Path, protocol: Protocol, pack: Path, direct: RunFolder, tmp_path: Path) -> None:
    run = done(audit_with_packs([pack], protocol, tmp_path / "run", [tier], Silent(), RunOptions(n_workers=2)))
    expected, found = rows_of(direct, tier.stem), rows_of(run, tier.stem)
    for name in found.dtype.names or ():
        assert name == "kld" or np.array_equal(found[name], expected[name]), name
    assert found["kld"].mean() < expected["kld"].mean()
    ref = read_json(run.summary(tier.stem))["ref"]
    assert ref["n_full"] == len(read_json(run.shortfall(tier.stem))["tail_kld"]) > 20
    missing = expected["kld"].mean() - found["kld"].mean()
    assert abs(ref["shortfall"] - missing) < 4 * ref["shortfall_se"]
    assert read_json(run.manifest)["base"] == read_json(direct.manifest)["base"]
    assert list((run.parts / "refpack").iterdir()) == []


def test_an_audit_that_was_stopped_goes_on_to_the_same_rows(tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        audit_with_packs([pack], protocol, tmp_path / "stopped", [tier], Stopping(5))
    stopped = done(audit_with_packs([pack], protocol, tmp_path / "stopped", [tier], Silent()))
    whole = done(audit_with_packs([pack], protocol, tmp_path / "whole", [tier], Silent(), RunOptions(n_workers=1)))
    for name in ("rows", "summary", "shortfall"):
        assert getattr(stopped, name)(tier.stem).read_bytes() == getattr(whole, name)(tier.stem).read_bytes()
    assert stopped.manifest.read_bytes() == whole.manifest.read_bytes()


def test_a_tier_is_added_to_an_old_run_and_later_measured_against_base(
        base: Path, tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    quantize_to_file(base, protocol, "Q8_0", other, Silent())
    run = done(audit_files(base, protocol, tmp_path / "run", [base], Silent()))
    done(audit_with_packs([pack], protocol, run.path, [tier], Silent(), base=base))
    assert sorted(read_json(run.manifest)["tiers"]) == sorted([base.stem, tier.stem])
    assert "ref" in read_json(run.summary(tier.stem))
    assert "ref" not in read_json(run.summary(base.stem))
    done(audit_files(base, protocol, run.path, [tier], Silent()))
    assert "ref" not in read_json(run.summary(tier.stem))
    assert not run.shortfall(tier.stem).exists()
    summary = run.summary(tier.stem).read_bytes()
    done(audit_with_packs([pack], protocol, run.path, [tier], Silent()))  # better than a pack can be: left as it is
    assert run.summary(tier.stem).read_bytes() == summary


def test_one_file_measured_both_ways_is_not_told_from_itself(base: Path, tier: Path, protocol: Protocol, pack: Path,
                                                              tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tier.read_bytes())
    run = done(audit_files(base, protocol, tmp_path / "run", [tier], Silent()))
    done(audit_with_packs([pack], protocol, run.path, [copy], Silent()))
    comparisons = {c["statistic"]: c["pairs"][0] for c in read_json(run.pairs)["comparisons"]}
    assert comparisons["kld"]["p"] < 1e-3  # the pack's share of the KLD is missing in every row
    assert comparisons["kld"]["verdict"] == "not resolved"
    assert "measured against different references" in comparisons["kld"]["reason"]


def test_rows_against_a_pack_are_remeasured_as_a_bound(base: Path, tier: Path, protocol: Protocol, pack: Path,
                                                       tmp_path: Path) -> None:
    run = done(audit_files(base, protocol, tmp_path / "run", [base], Silent()))
    run.quants.mkdir()
    own = run.quants / "own.gguf"
    own.write_bytes(tier.read_bytes())
    done(audit_with_packs([pack], protocol, run.path, [own], Silent()))
    options = RecheckOptions(regenerate=False, n_remeasure=2, seed=1, tiers=("own",))
    findings = Findings()
    (found,) = recheck(run.path, base, options, findings, Silent()).remeasured
    assert findings.failures == []
    assert found.n_rows_differ == 0
    rows = rows_of(run, "own")
    rows["kld"] += 1e-3
    rewrite(run, "own", rows)
    recheck(run.path, base, options, findings, Silent())
    assert "a KLD of at most" in findings.failures[0].expected


def test_rows_are_remeasured_against_a_pack_without_the_base(base: Path, tier: Path, protocol: Protocol, pack: Path,
                                                            tmp_path: Path) -> None:
    run = done(audit_files(base, protocol, tmp_path / "run", [tier], Silent(), ALONE))
    run.quants.mkdir()
    own = run.quants / "own.gguf"
    own.write_bytes(base.read_bytes())
    (run.quants / tier.name).write_bytes(tier.read_bytes())
    done(audit_with_packs([pack], protocol, run.path, [own], Silent(), ALONE))
    options = RecheckOptions(regenerate=False, n_remeasure=2, seed=1, n_workers=1)
    findings = Findings()
    found = {m.tier: m for m in remeasure_with_pack(run.path, pack, options, findings, Silent()).remeasured}
    assert findings.failures == []
    assert {name: (m.n_rows, m.n_rows_differ) for name, m in found.items()} == {tier.stem: (126, 0), "own": (126, 0)}
    for name, column, told in (("own", "kld", "the row"), (tier.stem, "nll_q", "the row"), (tier.stem, "kld", "a KLD of at least")):
        rows, kept = rows_of(run, name), run.rows(name).read_bytes()
        rows[column] = 0.5 * rows[column] + 1e-9
        rewrite(run, name, rows)
        findings = Findings()
        remeasure_with_pack(run.path, pack, options, findings, Silent())
        assert [told in failure.expected for failure in findings.failures] == [True]
        run.rows(name).write_bytes(kept)
    other = make_refpack(tiny_model(tmp_path / "other-BF16.gguf", n_embd=256, n_ff=256, seed=1)[0], protocol, tmp_path / "ref",
                         Silent(), n_workers=1).path
    with pytest.raises(InputError, match="is the reference pack of another base"):
        remeasure_with_pack(run.path, other, options, Findings(), Silent())


def test_a_pack_of_another_evaluation_is_refused(tier: Path, pack: Path, tmp_path: Path) -> None:
    other = load_protocol("demo-v1", [*SETTINGS, "eval.n_chunk=13"])
    with pytest.raises(InputError, match=r"reference pack of another evaluation: expected eval_id .* of protocol demo-v1, found"):
        audit_with_packs([pack], other, tmp_path / "run", [tier], Silent())
    assert not (tmp_path / "run").exists()


def test_a_pack_of_another_mass_serves_the_same_protocol(base: Path, tier: Path, protocol: Protocol, tmp_path: Path) -> None:
    more = load_protocol("demo-v1", [*SETTINGS, "refpack.mass=0.9999"])
    pack = make_refpack(base, more, tmp_path / "ref", Silent())
    run = done(audit_with_packs([pack.path], protocol, tmp_path / "run", [tier], Silent()))
    assert read_json(run.summary(tier.stem))["ref"]["mass"] == 0.9999


def test_a_pack_of_another_base_is_refused(base: Path, tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other-BF16.gguf", n_embd=256, n_ff=256, seed=1)[0]
    with pytest.raises(InputError, match="is the reference pack of another base: expected sha256"):
        audit_with_packs([pack], protocol, tmp_path / "run", [tier], Silent(), base=other)
    done(audit_files(other, protocol, tmp_path / "run", [other], Silent()))
    with pytest.raises(InputError, match=r"holds a run of another base: expected sha256 .* the reference pack's bäse-BF16.gguf"):
        audit_with_packs([pack], protocol, tmp_path / "run", [tier], Silent())


def test_a_pack_from_other_arithmetic_does_not_go_beside_measured_tiers(
        base: Path, tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    run = done(audit_files(base, protocol, tmp_path / "run", [base], Silent()))
    rows = rows_of(run, base.stem)
    rows["nll_base"][3] += 1e-9
    rewrite(run, base.stem, rows)
    with pytest.raises(InputError, match="holds other answers of the base than the run"):
        audit_with_packs([pack], protocol, run.path, [tier], Silent())


def rewrite(run: RunFolder, tier: str, rows: Rows) -> None:
    """Put other rows in place of a tier's, and its summary in order."""
    from quantkit.job.parts import write_parquet

    write_parquet(run.rows(tier), rows, {})
    summary = read_json(run.summary(tier)) | {"rows_sha256": sha256_file(run.rows(tier))}
    run.summary(tier).write_text(json.dumps(summary))


def test_a_tier_of_other_tokens_fails_alone(tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    stranger = tiny_model(tmp_path / "stranger.gguf", n_embd=256, n_ff=256, add_bos=True)[0]
    result = audit_with_packs([pack], protocol, tmp_path / "run", [stranger, tier], Silent())
    assert list(result.failed) == ["stranger"]
    assert "is not a tier of this base" in str(result.failed["stranger"])
    assert list(read_json(result.folder.manifest)["tiers"]) == [tier.stem]


def test_a_damaged_chunk_is_named_and_the_pack_is_refused(tier: Path, protocol: Protocol, pack: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ref.safetensors"
    data = bytearray(pack.read_bytes())
    place = Refpack(pack).content.offsets
    data[-1 - int(place[-1, 1])] ^= 1  # the last byte of the heads
    copy.write_bytes(data)
    result = audit_with_packs([copy], protocol, tmp_path / "run", [tier], Silent())
    assert "is damaged: the rows of chunk" in str(result.failed[tier.stem])
    data[300] ^= 1
    copy.write_bytes(data)
    with pytest.raises(InputError, match=r"damaged|not a reference pack"):
        audit_with_packs([copy], protocol, tmp_path / "run", [tier], Silent())


def test_a_pack_never_replaces_an_input_or_a_file(base: Path, protocol: Protocol, pack: Path) -> None:
    with pytest.raises(InputError, match="would destroy the input"):
        make_refpack(base, protocol, base, Silent(), force=True)
    with pytest.raises(InputError, match="exists already"):
        make_refpack(base, protocol, pack, Silent())


def test_a_base_that_cannot_be_run_leaves_nothing(base: Path, protocol: Protocol, tmp_path: Path) -> None:
    hollow = tiny_model(tmp_path / "hollow.gguf", metadata={"llama.attention.head_count": 3})[0]
    with pytest.raises((EngineError, InputError)):
        make_refpack(hollow, protocol, tmp_path / "ref", Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["hollow.gguf"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data + b"x"])
def test_a_chunk_file_that_is_not_sound_is_missing(tmp_path: Path, change: Any) -> None:
    folder = ChunkFolder(tmp_path / "work", 2)
    folder.save(7, (b"one", b""))
    assert folder.load(7) == [b"one", b""]
    assert folder.missing([6, 7]) == [6]
    (path,) = (tmp_path / "work").iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert folder.missing([6, 7]) == [6, 7]


@pytest.fixture(scope="module")
def texts(base: Path) -> Path:
    """A folder with two texts: the demo's, and its second half."""
    folder = base.parent / "texts"
    folder.mkdir()
    data = (Path(quantkit.__file__).parent / "data" / "demo" / "demo-eval.txt").read_bytes()
    (folder / "demo-eval.txt").write_bytes(data)
    (folder / "half.txt").write_bytes(data[len(data) // 2:])
    return folder


@pytest.fixture(scope="module")
def several(texts: Path) -> Protocol:
    protocol, half = load_protocol("demo-v1", [*SETTINGS, "eval.n_chunk=3"]), texts / "half.txt"
    second = dataclasses.replace(protocol.corpus("demo-eval.txt"), name=half.name, file=half.name, sha256=sha256_file(half),
                                 size_bytes=half.stat().st_size)
    return dataclasses.replace(protocol, corpora=(*protocol.corpora, second),
                               eval=dataclasses.replace(protocol.eval, corpora=("demo-eval.txt", half.name)))


def test_of_several_texts_each_has_its_own_pack_and_its_own_rows(base: Path, tier: Path, several: Protocol, texts: Path,
                                                                 tmp_path: Path) -> None:
    packs = [make_refpack(base, several, tmp_path / name, Silent(), name=name, corpus=texts / name, n_workers=1).path
             for name in several.eval.corpora]
    run = done(audit_with_packs(packs[::-1], several, tmp_path / "run", [tier], Silent(), RunOptions(corpus=texts, n_workers=1)))
    further = dataclasses.replace(run, corpus="half.txt")
    assert [read_json(folder.summary(tier.stem))["ref"]["file"] for folder in (run, further)] == ["demo-eval.txt", "half.txt"]
    assert not np.array_equal(rows_of(run, tier.stem)["token"], rows_of(further, tier.stem)["token"])
    assert np.array_equal(rows_of(further, tier.stem)["nll_base"], Refpack(packs[1]).content.rows["nll"].ravel())
    assert [text["name"] for text in read_json(run.manifest)["further_corpora"]] == ["half.txt"]
    with pytest.raises(InputError, match=r"got none of half.txt: make it with `quantkit refpack make --text half.txt`"):
        audit_with_packs(packs[:1], several, tmp_path / "no", [tier], Silent())
    with pytest.raises(InputError, match=r"expected one reference pack of demo-eval.txt, got"):
        audit_with_packs([packs[0], packs[0]], several, tmp_path / "no", [tier], Silent())
    with pytest.raises(InputError, match=r"is a reference pack of another text: expected demo-eval.txt"):
        audit_with_packs(packs[1:], load_protocol("demo-v1", SETTINGS), tmp_path / "no", [tier], Silent())
    with pytest.raises(InputError, match=r"expected a text that protocol .* measures on \(demo-eval.txt, half.txt\)"):
        make_refpack(base, several, tmp_path / "no", Silent(), name="demo-calibration.txt")


def test_a_pack_of_all_chunks_serves_every_choice_of_them(base: Path, tier: Path, protocol: Protocol, pack: Path,
                                                          tmp_path: Path) -> None:
    whole = load_protocol("demo-v1", ["refpack.full_every=16", "refpack.mass=0.9"])
    large = make_refpack(base, whole, tmp_path / "all", Silent(), n_workers=1)
    assert len(large.content.chunks) == large.facts.n_chunk_total > 12
    some = done(audit_with_packs([large.path], protocol, tmp_path / "some", [tier], Silent(), ALONE))
    expected = done(audit_with_packs([pack], protocol, tmp_path / "expected", [tier], Silent(), ALONE))
    assert np.array_equal(rows_of(some, tier.stem), rows_of(expected, tier.stem))
    assert some.shortfall(tier.stem).read_bytes() == expected.shortfall(tier.stem).read_bytes()
    with pytest.raises(InputError, match="is a reference pack of another evaluation"):
        audit_with_packs([pack], whole, tmp_path / "no", [tier], Silent())
