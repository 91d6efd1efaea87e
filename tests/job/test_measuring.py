"""Several texts, noise floors, the weights' share and screenings, on a model of 250 kB."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.cli.main import run as run_command
from quantkit.core.errors import InputError
from quantkit.job.ladder import RunOptions, RunResult, audit_files
from quantkit.job.parts import read_parquet
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder, read_json
from quantkit.job.sequential import parse_until
from quantkit.job.standalone import quantize_to_file
from quantkit.spec.json_records import record_from_json
from quantkit.spec.protocol import Corpus, Protocol, load_protocol
from quantkit.spec.verdict_records import Floor, Slices, Verdicts, WeightsKld
from tests.gguf_factory import tiny_model
from tests.job import test_verify as verification

pytestmark = pytest.mark.engine


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A random base and two quantized files of it."""
    folder = tmp_path_factory.mktemp("models")
    base = tiny_model(folder / "base-BF16.gguf", n_embd=256, n_ff=256)[0]
    tiers = [folder / f"{tier}.gguf" for tier in ("Q8_0", "Q4_K_M")]
    protocol = load_protocol("demo-v1", ["plan.tiers[Q4_K_M].rules=[]"])
    for path in tiers:
        quantize_to_file(base, protocol, path.stem, path, Silent())
    return base, tiers


def audited(models: tuple[Path, list[Path]], folder: Path, protocol: Protocol, progress: Silent = Silent(),  # noqa: B008 - silent
            **options: Any) -> RunFolder:
    base, tiers = models
    result: RunResult = audit_files(base, protocol, folder, tiers, progress, RunOptions(**options))
    assert result.failed == {}
    return result.folder


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load_protocol("demo-v1", ["eval.chunks=spread", "eval.n_chunk=24", "floors.n_chunk=8"])


@pytest.fixture(scope="module")
def with_all(models: tuple[Path, list[Path]], protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return audited(models, tmp_path_factory.mktemp("all") / "run", protocol, floors=True, weights=True)


def test_every_file_has_a_floor_and_only_perturbed_kernels_are_in_it(with_all: RunFolder) -> None:
    for name in ("base", "Q8_0", "Q4_K_M"):
        floor = record_from_json(Floor, read_json(with_all.floor(name)))
        assert [kernel.kernel for kernel in floor.kernels] == ["no_flash_attn", "no_repack", "n_ubatch_96"]
        assert len(floor.chunks) == 8
        for kernel in floor.kernels:
            rows, _ = read_parquet(with_all.floor_rows(name, kernel.kernel))
            assert np.unique(rows["chunk"]).tolist() == list(floor.chunks)
            assert kernel.kld.value == rows["kld"].mean()
    base = record_from_json(Floor, read_json(with_all.floor("base")))
    largest = base.largest()
    assert largest is not None
    assert largest.kld.value is not None
    assert 0 < largest.kld.value < 1e-3


def test_the_weights_share_is_that_of_f32_files(with_all: RunFolder) -> None:
    whole = read_json(with_all.summary("Q8_0"))["summary"]["kld"]["value"]
    weights = record_from_json(WeightsKld, read_json(with_all.weights("Q8_0")))
    assert weights.kld.value is not None
    assert 0 < weights.kld.value < whole  # the rest of Q8_0's is 8-bit activations
    rows, _ = read_parquet(with_all.weights_rows("Q8_0"))
    assert weights.kld.value == rows["kld"].mean()
    assert [path.name for path in with_all.parts.rglob("*") if "F32" in path.name] == []


def test_verdicts_name_floors_and_slices_name_token_classes(with_all: RunFolder) -> None:
    verdicts = record_from_json(Verdicts, read_json(with_all.pairs))
    assert [floor.tier for floor in verdicts.floors] == ["Q8_0", "Q4_K_M"]
    assert all(pair.arithmetic is not None for pair in verdicts.comparison("kld").pairs)
    slices = record_from_json(Slices, read_json(with_all.slices("Q8_0")))
    assert {part.kind for part in slices.slices} == {"entropy", "margin", "position", "token"}


def test_what_is_measured_is_not_measured_again(models: tuple[Path, list[Path]], protocol: Protocol, with_all: RunFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in with_all.path.rglob("*.parquet") if "audit" in path.parts}
    notes = Notes()
    audited(models, with_all.path, protocol, notes, floors=True, weights=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [line for line in notes.lines if "measured already" in line] == [
        "audit Q8_0: measured already", "audit Q4_K_M: measured already", "floor base: measured already",
        "floor Q8_0: measured already", "floor Q4_K_M: measured already"]


def test_the_bundle_lists_floors_and_weights(with_all: RunFolder) -> None:
    files = read_json(with_all.manifest)["files"]
    assert {"audit/base/floor.json", "audit/Q8_0/floor/no_repack.parquet", "audit/Q8_0/weights.json", "audit/pairs.json",
            "audit/tokens.json", "audit/Q8_0/slices.json"} <= set(files)


def test_a_tier_called_base_has_no_room_for_a_floor(models: tuple[Path, list[Path]], protocol: Protocol, tmp_path: Path) -> None:
    copy = tmp_path / "base.gguf"
    copy.write_bytes(models[1][0].read_bytes())
    with pytest.raises(InputError, match="expected tiers with other names than 'base'"):
        audit_files(models[0], protocol, tmp_path / "run", [copy], Silent(), RunOptions(floors=True))


# Several texts.


def with_texts(protocol: Protocol, folder: Path, texts: Mapping[str, tuple[bytes, str]]) -> Protocol:
    """The protocol with further evaluation texts after its own, written into a folder."""
    corpora = list(protocol.corpora)
    for name, (text, kind) in texts.items():
        (folder / name).write_bytes(text)
        corpora.append(Corpus(name=name, file=name, sha256=hashlib.sha256(text).hexdigest(), size_bytes=len(text), documents="none",
                              format=kind, hub_dataset="", hub_config="", hub_split=""))  # type: ignore[arg-type]
    names = (*protocol.eval.corpora, *texts)
    return dataclasses.replace(protocol, corpora=tuple(corpora), eval=dataclasses.replace(protocol.eval, corpora=names))


@pytest.fixture
def texts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    monkeypatch.setenv("QUANTKIT_CORPUS_DIR", str(folder))
    return folder


def test_a_second_text_stays_apart(models: tuple[Path, list[Path]], protocol: Protocol, texts_folder: Path, tmp_path: Path) -> None:
    words = " ".join(f"word {i} of {i * i}" for i in range(600)).encode()
    both = with_texts(protocol, texts_folder, {"numbers.txt": (words, "text")})
    run = audited(models, tmp_path / "run", both)
    further = dataclasses.replace(run, corpus="numbers.txt")
    alone = audited(models, tmp_path / "alone", protocol)
    assert read_parquet(run.rows("Q8_0"))[0].tobytes() == read_parquet(alone.rows("Q8_0"))[0].tobytes()
    rows, _ = read_parquet(further.rows("Q8_0"))
    assert len(np.unique(rows["chunk"])) == 24
    assert read_json(further.summary("Q8_0"))["corpus"]["name"] == "numbers.txt"
    assert len(record_from_json(Verdicts, read_json(further.pairs)).comparison("kld").pairs) == 1
    manifest = read_json(run.manifest)
    assert [corpus["name"] for corpus in manifest["further_corpora"]] == ["numbers.txt"]
    assert "audit/Q8_0/numbers.txt/rows.parquet" in manifest["files"]
    assert verification.failures(run.path) == []
    for path, check in ((further.slices("Q8_0"), "slices"), (further.pairs, "verdicts")):  # of a text that does not lead
        sound = path.read_bytes()
        path.write_bytes(sound.replace(b'"n_article": 1', b'"n_article": 2', 1))
        verification.rewrite(run.path, lambda facts: None, relist=True)
        file = path.relative_to(run.path).as_posix()
        assert [found for found in verification.failures(run.path) if found[1] == check] == [(file, check)]
        path.write_bytes(sound)
        verification.rewrite(run.path, lambda facts: None, relist=True)


def test_one_file_is_not_taken_for_several_texts(models: tuple[Path, list[Path]], protocol: Protocol, texts_folder: Path,
                                                 tmp_path: Path) -> None:
    both = with_texts(protocol, texts_folder, {"x.txt": (b"x" * 9000, "text")})
    with pytest.raises(InputError, match=r"expected a folder that holds the 2 texts .* got the file"):
        audit_files(models[0], both, tmp_path / "run", models[1], Silent(), RunOptions(corpus=texts_folder / "x.txt"))


def test_conversations_pass_through_the_models_template(shared: Path, tiny_model: Path, protocol: Protocol, texts_folder: Path,
                                                        tmp_path: Path) -> None:
    talks = b"".join(json.dumps({"messages": [{"role": "user", "content": f"Count to {i}."}, {"role": "assistant",
                     "content": " ".join(map(str, range(i % 40)))}]}).encode() + b"\n" for i in range(120))
    chat = with_texts(protocol, texts_folder, {"talks.jsonl": (talks, "chat")})
    chat = dataclasses.replace(chat, eval=dataclasses.replace(chat.eval, corpora=("talks.jsonl",)))
    result = audit_files(tiny_model, chat, tmp_path / "run", [shared / "oracle" / "stock-Q8_0.gguf"], Silent())
    assert result.failed == {}
    rows, _ = read_parquet(result.folder.rows("stock-Q8_0"))
    slices = record_from_json(Slices, read_json(result.folder.slices("stock-Q8_0")))
    special = next(part for part in slices.slices if part.name == "special")
    assert special.n_scored > 0
    assert len(np.unique(rows["article"])) > 12  # conversations, not twelve runs of a text without documents


# Screenings.


def test_a_screening_stops_when_it_knows_enough(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    protocol = load_protocol("demo-v1", ["sequential.looks=[16, 32]"])
    run = audited(models, tmp_path / "run", protocol, until=parse_until("kld_rse=0.5"))
    record = read_json(run.screening)
    assert [record["n_chunk"], len(record["looks"]), record["n_looks"]] == [16, 1, 3]
    rows, _ = read_parquet(run.rows("Q8_0"))
    assert np.unique(rows["chunk"]).tolist() == record["chunks"]
    verdicts = record_from_json(Verdicts, read_json(run.pairs))
    assert verdicts.n_looks == 3
    manifest = read_json(run.manifest)
    assert manifest["protocol"]["derived"] == ["sequential.looks=[16, 32]", "until=kld_rse=0.5"]
    assert manifest["protocol"]["eval_id"] != protocol.eval_id
    assert [path.name for path in run.parts.rglob("*.rows")] == []
    full, _ = read_parquet(audited(models, tmp_path / "full", protocol).rows("Q8_0"))
    assert full[np.isin(full["chunk"], record["chunks"])].tobytes() == rows.tobytes()


def test_a_screening_that_never_knows_enough_measures_everything(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run = audited(models, tmp_path / "run", load_protocol("demo-v1"), until=parse_until("kld_rse=0.0001"))
    record = read_json(run.screening)
    assert [look["enough"] for look in record["looks"]] == [False, False]
    assert record["n_chunk"] == record["n_chunk_of"]


def test_neighbours_decide_and_later_tiers_take_the_same_chunks(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, tiers = models
    protocol = load_protocol("demo-v1", ["sequential.looks=[16]"])
    run = audited(models, tmp_path / "run", protocol, until=parse_until("pairs"))
    record = read_json(run.screening)
    assert record["looks"][0]["neighbours"] == {"Q8_0 Q4_K_M": "better"}
    assert record["n_chunk"] == 16
    later = tmp_path / "later.gguf"
    later.write_bytes(tiers[1].read_bytes())
    result = audit_files(base, protocol, run.path, [later], Silent(), RunOptions(until=parse_until("pairs")))
    assert result.failed == {}
    rows, _ = read_parquet(run.rows("later"))
    assert np.unique(rows["chunk"]).tolist() == record["chunks"]
    assert read_json(run.screening) == record


def test_a_frozen_protocols_run_is_no_screening(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run = audited(models, tmp_path / "run", load_protocol("demo-v1"))
    with pytest.raises(InputError, match="holds a run of protocol demo-v1"):
        audit_files(models[0], load_protocol("demo-v1"), run.path, models[1], Silent(), RunOptions(until=parse_until("pairs")))


@pytest.mark.parametrize("text", ["kld_rse", "kld_rse=", "kld_rse=0", "kld_rse=1.5", "kld_rse=x", "pairs=1", "ppl=1", ""])
def test_an_unknown_rule_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"expected kld_rse=0\.02"):
        parse_until(text)


def test_the_command_line_asks_for_all_of_it(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, tiers = models
    words = ["audit", str(tiers[0]), "-b", str(base), "-p", "demo-v1", "--set", "floors.n_chunk=4", "-o", str(tmp_path / "run"),
             "--floors", "--kld-weights", "--until", "kld_rse=0.9"]
    assert run_command(words) == 0
    run = RunFolder(path=tmp_path / "run")
    assert read_json(run.screening)["n_chunk"] == 32
    assert run.floor("Q8_0").exists()
    assert run.weights("Q8_0").exists()
    assert "a screening until kld_rse=0.9" in (run.report / "retention.md").read_text("utf-8")
    assert run_command(["audit", str(tiers[0]), "--ref", str(base), "-p", "demo-v1", "-o", str(tmp_path / "x"), "--floors"]) == 2
