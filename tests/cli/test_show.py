"""`quantkit show`: the same facts in three forms, soon, and no text out of a file can steer a terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli.show import show
from quantkit.core.errors import GgufError
from tests.gguf_factory import raw_gguf, raw_key, raw_tensor, raw_text, tiny_model


def shown(path: Path, output_format: str = "md") -> str:
    result = CliRunner().invoke(show, [str(path), "--format", output_format], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines() if line.startswith("| ")]


def test_markdown(shared: Path) -> None:
    text = shown(shared / "oracle" / "stock-IQ1_M.gguf")
    rows = {row[0]: row[1:] for row in cells(text)}
    expected = {
        "size": ["3,157,632 bytes, 3.01 MiB"], "ftype": ["IQ1_M"], "parameters": ["6,704,088"], "bpw, whole file": ["3.6074"],
        "bpw, without embedding, output and MTP": ["2.0051"], "trunk blocks": ["4"], "MTP (NextN) blocks": ["1"],
        "recurrent blocks": ["3: 0-2"], "tied embeddings": ["no"], "adds BOS": ["no"],
        "Q8_0": ["8", "983,040", "14.7%", "1,044,480", "34.6%", "8.5000"],
        "quantize.imatrix.chunks_count": ["8"],
    }
    assert expected == {label: rows[label] for label in expected}
    assert len({len(line) for line in text.split("\n\n")[0].splitlines()}) == 1


def test_json(moe_model: Path) -> None:
    data = json.loads(shown(moe_model, "json"))
    expected = {"file": moe_model.name, "architecture": "qwen3moe", "ftype": "BF16", "tied_embeddings": True, "n_expert": 4,
                "n_expert_used": 2, "n_nextn": 0, "add_bos": True, "n_params": 3_018_240, "problems": [], "notes": [],
                "chat_template_sha256": None}
    assert expected == {key: data[key] for key in expected}
    assert 8 * data["tensor_bytes"] / data["n_params"] == data["bpw"]
    assert data["tensor_bytes"] == sum(row["size_bytes"] for row in data["types"])


def test_csv_holds_what_json_holds(moe_model: Path) -> None:
    data = json.loads(shown(moe_model, "json"))
    rows = dict(csv.reader(io.StringIO(shown(moe_model, "csv"))))
    assert rows.pop("key") == "value"
    types = data.pop("types")
    flat = {key: value for key, value in data.items() if not isinstance(value, list)}
    flat |= {f"types.{row['type']}.{column}": value for row in types for column, value in row.items() if column != "type"}
    assert {k: json.dumps(v).strip('"') if v is not None else "" for k, v in flat.items()} == rows


def test_any_shard_shows_the_whole(tmp_path: Path) -> None:
    parts = tiny_model(tmp_path / "m.gguf", n_part=3)
    data = json.loads(shown(parts[1], "json"))
    assert data["parts"] == 3
    assert sum(p.stat().st_size for p in parts) == data["file_bytes"]


def test_problems_and_notes_are_listed(tmp_path: Path) -> None:
    (path,) = tiny_model(tmp_path / "m.gguf", n_nextn=1, metadata={"llama.nextn_predict_layers": 0, "general.file_type": 7})
    problem, note = shown(path).splitlines()[-2:]
    assert problem.startswith("- problem: llama.nextn_predict_layers is 0 and llama.block_count is 3")
    assert note.startswith("- note: general.file_type says Q8_0")


def test_big_endian_is_shown(tmp_path: Path) -> None:
    keys = [raw_key("general.architecture", 8, raw_text("x", ">"), ">"), raw_key("x.block_count", 4, bytes(4), ">")]
    (tmp_path / "a.gguf").write_bytes(raw_gguf(keys, order=">"))
    text = shown(tmp_path / "a.gguf")
    assert ["byte order", "big-endian"] in cells(text)
    assert "llama.cpp does not load" in text


@pytest.mark.parametrize("output_format", ["md", "json", "csv"])
def test_hostile_text(tmp_path: Path, output_format: str) -> None:
    name = "a|b\x1b[2J\x9b\n| forged | row |\u202e<b>\ud7ff" + "x" * 1000
    keys = [raw_key(key, 8, raw_text(value)) for key, value in
            (("general.architecture", "llama\x07"), ("general.name", name), ("tokenizer.ggml.pre", "`p`[q](r)\\"))]
    (tmp_path / "a.gguf").write_bytes(raw_gguf(keys, [raw_tensor("t\x1b]0;x")], data=bytes(128)))
    text = shown(tmp_path / "a.gguf", output_format)
    assert text.replace("\n", "").isprintable()
    if output_format == "md":
        (row,) = [line for line in text.splitlines() if line.startswith("| name ")]
        assert r"a\|b\\x1b\[2J\\x9b\\n\| forged \| row \|\\u202e&lt;b>" in row
        assert len(row) < 500
        assert r"\`p\`\[q](r)\\" in text
    if output_format == "json":
        assert json.loads(text)["name"] == name


def test_a_bad_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no")
    with pytest.raises(GgufError, match=r"a\.gguf: the magic needs 4 bytes"):
        CliRunner().invoke(show, [str(tmp_path / "a.gguf")], catch_exceptions=False)


@pytest.mark.system
def test_large_header_is_shown_within_a_second_and_150_mb(tmp_path: Path) -> None:
    """A tokenizer of full size and 1000 tensors, 50 GB of hole behind; the whole process is measured, its start too."""
    path = tmp_path / "large.gguf"
    tokens = b"".join(raw_text(f"t{i:06d}") for i in range(248_320))
    merges = b"".join(raw_text(f"t{i:06d} t{i + 1:06d}") for i in range(247_000))
    keys = [raw_key("general.architecture", 8, raw_text("llama")), raw_key("llama.block_count", 4, struct.pack("<I", 500)),
            raw_key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 248_320) + tokens),
            raw_key("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 248_320) + bytes(4 * 248_320)),
            raw_key("tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 247_000) + merges)]
    names = [f"blk.{i}.ffn_{kind}.weight" for i in range(500) for kind in ("up", "down")]
    size_bytes = 2 * 5120 * 5120
    head = raw_gguf(keys, [raw_tensor(name, (5120, 5120), 30, i * size_bytes) for i, name in enumerate(names)])
    path.write_bytes(head)
    os.truncate(path, len(head) + len(names) * size_bytes)
    code = ("import re, sys, time; from quantkit.cli.show import show; show([sys.argv[1]], standalone_mode=False); "
            "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()); "
            "print(time.process_time(), peak[1], 'numpy' in sys.modules, file=sys.stderr)")
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    t_cpu_s, peak_kb, has_numpy = result.stderr.split()
    assert ["parameters", f"{1000 * 5120 * 5120:,}"] in cells(result.stdout)
    assert float(t_cpu_s) < 1
    assert int(peak_kb) < 150_000
    assert has_numpy == "False"
