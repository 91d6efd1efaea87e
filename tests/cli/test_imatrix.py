"""`quantkit imatrix`: what its verbs print, refuse and write."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli.main import run
from quantkit.spec.imatrix_file import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from tests.gguf_factory import raw_gguf, tiny_model

UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"


def entry(value: float, n: int, rows: float = 512) -> ImatrixEntry:
    return ImatrixEntry(in_sum2=np.full((1, n), value, np.float32), counts=np.array([rows], np.float32))


def write(path: Path, entries: Mapping[str, ImatrixEntry], *, chunk_size: int = 512) -> Path:
    write_imatrix(path, Imatrix(entries=entries, datasets=("a.txt",), chunk_count=1, chunk_size=chunk_size, legacy=False))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf", {UP: entry(512, 64), DOWN: entry(1024, 128)})


def quantkit(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


class TestWords:
    def test_without_a_subcommand_it_collects(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, _, err = quantkit(capsys, "imatrix", "-b", tmp_path / "none.gguf", "-p", "demo-v1", "-o", tmp_path / "i.gguf")
        assert (code, "none.gguf" in err) == (2, True)
        code, _, err = quantkit(capsys, "imatrix", "-p", "demo-v1")
        assert (code, "Missing option '-b' / '--base'" in err) == (2, True)

    @pytest.mark.parametrize("words", [["imatrix"], ["imatrix", "--help"], ["imatrix", "-h"]])
    def test_help_names_its_verbs(self, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        _, out, err = quantkit(capsys, *words)
        assert all(f"\n  {verb} " in out + err for verb in ("collect", "merge", "show"))

    def test_an_unknown_verb_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert quantkit(capsys, "imatrix", "melt")[0] == 2


@pytest.mark.system
class TestMerge:
    def test_sums_and_counts_are_added(self, capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
        held = read_imatrix(small)
        write_imatrix(tmp_path / "b.gguf", replace(held, datasets=("/home/user/texts/b, c.txt",)))
        code, out, err = quantkit(capsys, "imatrix", "merge", small, tmp_path / "b.gguf", "-o", tmp_path / "c.gguf")
        assert (code, out, err) == (0, f"{tmp_path / 'c.gguf'}: 2 entries, 2 chunks of 512 tokens\n", "")
        both = read_imatrix(tmp_path / "c.gguf")
        assert (both.entries[UP].in_sum2[0, 0], both.entries[UP].counts[0], both.datasets) == (1024, 1024, ("a.txt", "b, c.txt"))

    @pytest.mark.parametrize(("entries", "chunk_size", "message"), [
        ({UP: entry(1, 64)}, 512, "different models: blk.0.ffn_down.weight in one of them only"),
        ({UP: entry(1, 64), DOWN: entry(1, 64)}, 512, "different models: blk.0.ffn_down.weight of other shapes"),
        ({UP: entry(1, 64), DOWN: entry(1, 128)}, 256, "different chunk sizes, got 512 and 256 tokens")])
    def test_what_does_not_belong_together_is_refused(self, capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path,
                                                      entries: Mapping[str, ImatrixEntry], chunk_size: int, message: str) -> None:
        other = write(tmp_path / "b.gguf", entries, chunk_size=chunk_size)
        code, out, err = quantkit(capsys, "imatrix", "merge", small, other, "-o", tmp_path / "c.gguf")
        assert (code, out, message in err) == (2, "", True)
        assert not (tmp_path / "c.gguf").exists()

    def test_an_input_is_never_written_over_and_a_file_only_by_force(self, capsys: pytest.CaptureFixture[str], small: Path,
                                                                     tmp_path: Path) -> None:
        other = write(tmp_path / "b.gguf", read_imatrix(small).entries)
        before = small.read_bytes()
        assert quantkit(capsys, "imatrix", "merge", small, other, "-o", small, "--force")[0] == 2
        assert small.read_bytes() == before
        (tmp_path / "c.gguf").write_bytes(b"mine")
        code, _, err = quantkit(capsys, "imatrix", "merge", small, other, "-o", tmp_path / "c.gguf")
        assert (code, "--force" in err) == (2, True)
        assert quantkit(capsys, "imatrix", "merge", small, other, "-o", tmp_path / "c.gguf", "--force")[0] == 0


@pytest.mark.system
class TestShow:
    def test_a_sound_matrix(self, capsys: pytest.CaptureFixture[str], shared: Path) -> None:
        code, out, err = quantkit(capsys, "imatrix", "show", shared / "oracle" / "imatrix-tiny.gguf")
        assert (code, err) == (0, "")
        rows = {cells[0]: cells[1:] for line in out.splitlines() if (cells := [c.strip() for c in line.strip("| ").split(" | ")])}
        assert (rows["entries"], rows["chunks"], rows["tokens a chunk"]) == (["31"], ["8"], ["512"])
        assert rows["calibration text"] == ["calibration.txt"]  # a path in the file
        assert rows["ffn_down"] == ["4", "0-3", "4096", "4096"]
        assert "Every entry has rows everywhere, no zeros, and finite values." in out
        assert out.index("Most important") < out.index("Least important")

    def test_what_is_missing(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        experts = ImatrixEntry(in_sum2=np.array([[0, 0], [5, 0], [90, 90]], np.float32), counts=np.array([0, 5, 90], np.float32))
        bad = ImatrixEntry(in_sum2=np.array([[np.nan, 1]], np.float32), counts=np.array([900], np.float32))
        path = write(tmp_path / "i.gguf", {"blk.0.ffn_up_exps.weight": experts, DOWN: bad, UP: entry(1, 2)})
        _, out, _ = quantkit(capsys, "imatrix", "show", path)
        lines = [" ".join(line.replace("|", " ").split()) for line in out.splitlines()]
        assert "blk.0.ffn_up_exps.weight 0 1 1 3 1 0" in lines
        assert "blk.0.ffn_down.weight 900 0 0 1 0 1" in lines
        assert not any(line.startswith(f"{UP} 512 0") for line in lines)

    def test_coverage_of_a_model_is_told_both_ways(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        base = tiny_model(tmp_path / "base.gguf")[0]
        path = write(tmp_path / "i.gguf", {UP: entry(1, 64), DOWN: entry(1, 64), "blk.9.ffn_up.weight": entry(1, 64)})
        _, out, _ = quantkit(capsys, "imatrix", "show", path, "-b", base)
        assert "- 2 of the 15 matrices of base.gguf that can be quantized have an entry" in out
        assert "- Not applicable, rows are looked up: 1: token_embd.weight" in out
        assert "- Entries that the base does not know: 1: blk.9.ffn_up.weight" in out
        assert "- Of another length: 1: blk.0.ffn_down.weight" in out
        assert "- Without an entry: 13: output.weight, blk.0.attn_q.weight" in out

    def test_json_and_csv_hold_every_entry(self, capsys: pytest.CaptureFixture[str], small: Path) -> None:
        data = json.loads(quantkit(capsys, "imatrix", "show", small, "--format", "json")[1])
        assert (data["file"], data["datasets"], data["chunk_count"], data["coverage"]) == ("small.gguf", ["a.txt"], 1, None)
        assert [(t["name"], t["mean_square"]) for t in data["tensors"]] == [(DOWN, 2.0), (UP, 1.0)]
        rows = list(csv.DictReader(io.StringIO(quantkit(capsys, "imatrix", "show", small, "--format", "csv")[1])))
        assert [(row["name"], row["layer"], row["mean_square"]) for row in rows] == [(DOWN, "0", "2.0"), (UP, "0", "1.0")]

    def test_a_plot_is_written_and_nothing_written_over(self, capsys: pytest.CaptureFixture[str], small: Path) -> None:
        plot = small.with_name("plot.png")
        assert quantkit(capsys, "imatrix", "show", small, "--plot", plot)[0] == 0
        assert plot.read_bytes().startswith(b"\x89PNG")
        code, out, _ = quantkit(capsys, "imatrix", "show", small, "--plot", plot)
        assert (code, out) == (2, "")
        assert quantkit(capsys, "imatrix", "show", small, "--plot", small, "--force")[0] == 2
        assert quantkit(capsys, "imatrix", "show", small, "--plot", plot, "--force")[0] == 0

    def test_names_steer_no_terminal(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = write(tmp_path / "i.gguf", {"blk.0.\x1b[31m|\n.weight": entry(1, 4)})
        for output_format in ("md", "json", "csv"):
            _, out, _ = quantkit(capsys, "imatrix", "show", path, "--format", output_format)
            assert "\x1b" not in out
            assert r"\x1b[31m" in out.replace("\\u001b", r"\x1b").replace(r"\\x1b\[", r"\x1b[")

    @pytest.mark.parametrize("data", [b"", b"GGUF", raw_gguf(), bytes(64), b"\xff" * 64, raw_gguf(n_tensors=1 << 40)])
    def test_what_is_no_matrix_is_refused_in_a_sentence(self, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                        data: bytes) -> None:
        (tmp_path / "x.gguf").write_bytes(data)
        code, out, err = quantkit(capsys, "imatrix", "show", tmp_path / "x.gguf")
        assert (code, out, err.count("\n")) == (2, "", 1)

    def test_a_model_in_its_place_is_told(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        base = tiny_model(tmp_path / "base.gguf")[0]
        assert "got a model" in quantkit(capsys, "imatrix", "show", base)[2]
        assert "for both" in quantkit(capsys, "imatrix", "show", base, "-b", base)[2]
