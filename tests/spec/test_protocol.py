"""Protocols: what is refused and how it is told, ids, deriving, and the published files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import random
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.errors import ProtocolError
from quantkit.core.files import sha256_json
from quantkit.spec.gguf_header import read_header
from quantkit.spec.model import ModelInfo, describe_model
from quantkit.spec.plan import resolve_plan
from quantkit.spec.plan_rules import bits
from quantkit.spec.protocol import (
    Protocol,
    derive_protocol,
    known_protocols,
    load_protocol,
    parse_protocol,
    protocol_path,
    protocols_folder,
    write_protocol,
)
from quantkit.spec.toml_records import read_record, record_to_table, write_toml
from tests.spec.plan_models import model_of, tiny

ROOT = Path(__file__).parents[2]
NAMES = ["demo-v1", "wikitext2-first16-v1", "wikitext2-quick-v1", "wikitext2-stock-v1", "wikitext2-v1"]
GUARDED, STOCK, QUICK = (load_protocol(name) for name in ("wikitext2-v1", "wikitext2-stock-v1", "wikitext2-quick-v1"))


def table(name: str = "wikitext2-v1") -> dict[str, Any]:
    return record_to_table(load_protocol(name))


def refusal(whole: dict[str, Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse_protocol(write_toml(whole).encode())
    return str(caught.value)


def with_settings(*pairs: tuple[str, object], name: str = "wikitext2-v1") -> dict[str, Any]:
    """The table of a protocol with values set by dotted path, unchecked."""
    whole = table(name)
    for path, value in pairs:
        holder: Any = whole
        *steps, last = [int(step) if step.isdigit() else step for step in re.findall(r"[A-Za-z_0-9]+", path)]
        for step in steps:
            holder = holder[step]
        holder[last] = value
    return whole


class TestReading:
    def test_values_stand_where_the_file_puts_them(self) -> None:
        assert GUARDED.eval.corpora == ("wiki.test.raw",)
        assert (GUARDED.eval.n_ctx, GUARDED.eval.chunks, GUARDED.eval.n_chunk, GUARDED.eval.flash_attn) == (512, "all", 0, "on")
        assert (QUICK.eval.chunks, QUICK.eval.n_chunk, QUICK.imatrix.corpus) == ("spread", 64, "calibration.txt")
        assert [t.name for t in GUARDED.plan.tiers] == ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "IQ2_S", "IQ1_M"]
        assert GUARDED.corpus("wiki.test.raw").size_bytes == 1_290_590
        assert GUARDED.plan.tier("Q4_K_M").default == "Q4_K"

    def test_unknown_names_list_the_known(self) -> None:
        with pytest.raises(ProtocolError, match=r"plan\.tiers: expected one of Q8_0, Q6_K, .*, got 'Q9'"):
            GUARDED.plan.tier("Q9")
        with pytest.raises(ProtocolError, match=r"corpora: expected one of wiki\.test\.raw, .*, got 'x'"):
            GUARDED.corpus("x")

    def test_by_path_and_by_name(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_bytes((protocols_folder() / "wikitext2-v1.toml").read_bytes())
        assert load_protocol(path) == load_protocol(str(path)) == load_protocol("wikitext2-v1")

    def test_unknown_protocol_lists_the_known(self) -> None:
        with pytest.raises(ProtocolError, match=r"packaged protocol \(demo-v1, .*wikitext2-v1\), got 'wikitext3'"):
            load_protocol("wikitext3")

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ProtocolError, match=r"expected a protocol file at .*none\.toml, got: No such file"):
            load_protocol(tmp_path / "none.toml")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ProtocolError, match="Is a directory"):
            load_protocol(tmp_path)

    def test_messages_name_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.toml"
        path.write_bytes(b"schema = 1")
        with pytest.raises(ProtocolError, match=r"bad\.toml: name: expected this key"):
            load_protocol(path)

    @pytest.mark.parametrize("data", [b"", b"schema = ", b"\xff\xfe", b"a = 1\na = 2", b"a = " + b"[" * 5000, b"a = " + b"9" * 9999,
                                      b"\x00", b"schema = 1\r"])
    def test_what_is_no_toml_or_no_protocol(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="expected"):
            parse_protocol(data)

    def test_huge_files_are_not_read(self) -> None:
        with pytest.raises(ProtocolError, match="at most 4194304 bytes"):
            parse_protocol(b"#" * (5 << 20))

    @pytest.mark.slow
    def test_a_plan_of_two_thousand_rules(self) -> None:
        rule = {"match": "blk.*.attn_q.weight", "layers": "", "type": "", "at_least": "Q5_K", "optional": True}
        whole = with_settings(("plan.tiers[3].rules", [{**rule, "layers": str(i)} for i in range(2000)]))
        assert len(parse_protocol(write_toml(whole).encode()).plan.tiers[3].rules) == 2000

    def test_every_key_is_needed(self) -> None:
        """Each table of the file in turn loses each of its keys."""
        whole = table()
        for holder, path in tables_of(whole):
            for key in list(holder):
                kept = dict(holder)
                del holder[key]
                with pytest.raises(ProtocolError) as caught:
                    read_record(Protocol, whole)
                assert str(caught.value) == f"{path}{key}: expected this key (a protocol states every key), got none; add it"
                holder.update(kept)

    def test_no_other_key_is_let_in(self) -> None:
        for i in range(len(tables_of(table()))):
            whole = table()
            holder, path = tables_of(whole)[i]
            holder["surplus"] = 1
            assert refusal(whole).startswith(f"{path}surplus: expected one of the keys ")

    @given(st.binary(max_size=200))
    def test_any_bytes_are_refused_in_words(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            parse_protocol(data)

    @given(st.data())
    @settings(max_examples=60)
    def test_damaged_files_are_refused_in_words_or_read(self, data: st.DataObject) -> None:
        good = (protocols_folder() / "demo-v1.toml").read_bytes()
        at, n = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 40))
        damaged = good[:at] + data.draw(st.binary(max_size=20)) + good[at + n:]
        with contextlib.suppress(ProtocolError):
            assert parse_protocol(damaged).schema == 1


def tables_of(whole: dict[str, Any], path: str = "") -> list[tuple[dict[str, Any], str]]:
    """Every table of a document with its dotted path, the root first; of an array the first element."""
    found = [(whole, path)]
    for key, value in whole.items():
        if isinstance(value, dict):
            found += tables_of(value, f"{path}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found += tables_of(value[0], f"{path}{key}[0].")
    return found


WRONG: list[tuple[str, list[tuple[str, object]], str]] = [
    ("other schema", [("schema", 2)], "schema: expected 1, got 2"),
    ("name", [("name", "a b")], "name: expected letters, digits"),
    ("odd n_ctx", [("eval.n_ctx", 511)], "eval.n_ctx: expected an even number of at least 8, got 511"),
    ("small n_ctx", [("eval.n_ctx", 6)], "eval.n_ctx: expected an even number of at least 8, got 6"),
    ("odd n_ctx of imatrix", [("imatrix.n_ctx", 7)], "imatrix.n_ctx: expected an even number"),
    ("n_ubatch", [("eval.n_ubatch", 1024)], "eval.n_ubatch: expected at most n_batch = 512, got 1024"),
    ("n_chunk with all", [("eval.n_chunk", 8)], "eval.n_chunk: expected 0 with chunks = 'all', and at least 1 otherwise, got 8"),
    ("no n_chunk", [("eval.chunks", "spread")], "eval.n_chunk: expected 0 with chunks = 'all'"),
    ("no imatrix chunks", [("imatrix.n_chunk", 0)], "imatrix.n_chunk: expected 0 with"),
    ("no teacher chunks", [("mtp.teacher_n_chunk", 0)], "mtp.teacher_n_chunk: expected 0 with"),
    ("chunk set", [("eval.chunks", "last")], "eval.chunks: expected 'all' or 'spread' or 'first', got 'last'"),
    ("no corpus", [("eval.corpora", [])], "eval.corpora: expected at least one text"),
    ("unknown corpus", [("eval.corpora", ["x"])], "eval.corpora[0]: expected a name from [[corpora]] (wiki.test.raw, "),
    ("corpus twice", [("eval.corpora", ["wiki.test.raw"] * 2)], "eval.corpora[1]: expected a name that stands once"),
    ("corpus name twice", [("corpora[1].name", "wiki.test.raw")], "corpora[1].name: expected a name that stands once"),
    ("corpus file twice", [("corpora[1].file", "wiki.test.raw")], "corpora[1].file: expected a name that stands once"),
    ("path as file", [("corpora[0].file", "../x")], "corpora[0].file: expected a file name without folders"),
    ("hidden file", [("corpora[0].file", ".x")], "corpora[0].file: expected a file name without folders"),
    ("hash", [("corpora[0].sha256", "A" * 64)], "corpora[0].sha256: expected a sha256 of 64 lower-case hex digits"),
    ("half a hub", [("corpora[0].hub_split", "")], "corpora[0]: expected hub_dataset, hub_config and hub_split all given"),
    ("no threads", [("eval.n_threads", 0)], "eval.n_threads: expected a number of threads"),
    ("quantized V", [("eval.type_v", "Q8_0"), ("eval.flash_attn", "off")],
     "eval.type_v: expected F32, F16 or BF16 while flash_attn is 'off'"),
    ("KV type", [("eval.type_k", "q8_0")], "eval.type_k: expected 'F32' or 'F16'"),
    ("free offload", [("eval.offload.n_gpu_layers", 9)], "eval.offload: expected n_gpu_layers = 0"),
    ("kernel with quantized V", [("eval.type_v", "Q8_0")], "floors.kernels[0].flash_attn: expected 'on' while eval.type_v is Q8_0"),
    ("kernel twice", [("floors.kernels[0].name", "no_repack")], "floors.kernels[1].name: expected a name that stands once"),
    ("looks", [("sequential.looks", [64, 64])], "sequential.looks[1]: expected more than the 64 before it, got 64"),
    ("calibration on test", [("imatrix.corpus", "wiki.test.raw")], "imatrix.corpus: expected a text that is not evaluated on"),
    ("no imatrix corpus", [("imatrix.corpus", "")], "imatrix.corpus: expected a name from [[corpora]]"),
    ("zero floor", [("imatrix.zero_floor", 0)], "imatrix.zero_floor: expected a number above 0"),
    ("ladder", [("plan.ladder", "mine")], "plan.ladder: expected 'guarded' or 'stock', got 'mine'"),
    ("stock rules", [("plan.ladder", "stock")], "plan.rules: expected [] with ladder = 'stock'"),
    ("stock tier rules", [("plan.ladder", "stock"), ("plan.rules", [])], "plan.tiers[2].rules: expected [] with ladder = 'stock'"),
    ("no tiers", [("plan.tiers", [])], "plan.tiers: expected at least one tier"),
    ("tier twice", [("plan.tiers[1].name", "q8_0")], "plan.tiers[1].name: expected a name that stands once, got 'q8_0' again"),
    ("tier as path", [("plan.tiers[1].name", "../x")], "plan.tiers[1].name: expected letters, digits"),
    ("ftype", [("plan.tiers[1].ftype", "Q6_K_M")], "plan.tiers[1].ftype: expected an ftype that llama.cpp can write"),
    ("type", [("plan.tiers[1].default", "Q4_K_M")], "plan.tiers[1].default: expected a tensor type that llama.cpp can write"),
    ("memory type", [("plan.tiers[1].default", "Q8_K")], "plan.tiers[1].default: expected a tensor type that llama.cpp can write"),
    ("rule with both", [("plan.tiers[2].rules[0].type", "Q6_K")],
     "plan.tiers[2].rules[0]: expected exactly one of type and at_least, the other '', got type = 'Q6_K', at_least = 'Q6_K'"),
    ("rule with none", [("plan.rules[0].at_least", "")], "plan.rules[0]: expected exactly one of type and at_least"),
    ("rule without glob", [("plan.rules[0].match", "")], "plan.rules[0].match: expected a glob"),
    ("layers", [("plan.rules[0].layers", "first")], "plan.rules[0].layers: expected '', a block such as '7', a range"),
    ("optional", [("plan.rules[0].optional", "yes")], "plan.rules[0].optional: expected true or false, got 'yes'"),
    ("MTP mode", [("plan.mtp_mode", "out")], "plan.mtp_mode: expected 'inside' or 'strip' or 'separate', got 'out'"),
    ("no prompts", [("mtp.n_prompt", 0)], "mtp.n_prompt: expected at least one prompt"),
    ("short context", [("mtp.n_predict", 500)], "mtp.n_ctx: expected at least prompt_n_tokens + n_predict = 564, got 512"),
    ("no drafts", [("mtp.n_draft", [])], "mtp.n_draft: expected at least one draft length"),
    ("drafts", [("mtp.n_draft", [2, 1])], "mtp.n_draft[1]: expected more than the 2 before it"),
    ("draft of 0", [("mtp.n_draft", [0])], "mtp.n_draft[0]: expected a number from 1 to 64"),
    ("repeats", [("mtp.repeats", 2)], "mtp.repeats: expected a number from 3 to 1000, got 2"),
    ("head type twice", [("mtp.head_types", ["Q8_0", "Q8_0"])], "mtp.head_types[1]: expected a name that stands once"),
    ("no candidates", [("search.types", [])], "search.types: expected at least one candidate type"),
    ("float candidate", [("search.types", ["BF16"])], "search.types[0]: expected a quantized tensor type"),
    ("weights type", [("search.weights_types", ["Q4_1"])], "search.weights_types[0]: expected one of search.types"),
    ("shares", [("search.report_share", 0.4)], "search.search_share: expected three shares of the articles"),
    ("second text", [("search.second_corpus", "wiki.train.raw")], "search.second_corpus: expected a text that is neither"),
    ("chunks of nothing", [("search.second_corpus", ""), ("search.second_n_chunk", 4)], "search.second_n_chunk: expected 0"),
    ("margin", [("gate.margins.kld_mean", 0)], "gate.margins.kld_mean: expected a number above 0"),
    ("smoke", [("gate.smoke_n_predict", 8)], "gate.smoke_n_predict: expected a number from 16 to 4096, got 8"),
    ("mass", [("refpack.mass", 1.5)], "refpack.mass: expected a number above 0, at most 1, got 1.5"),
    ("derived", [("derived", ["eval.n_ctx"])], "derived[0]: expected path=value such as eval.n_chunk=8, got 'eval.n_ctx'"),
]


@pytest.mark.parametrize(("pairs", "expected"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_refused(pairs: list[tuple[str, object]], expected: str) -> None:
    assert refusal(with_settings(*pairs)).startswith(expected)


def test_the_stock_ladder_takes_llama_cpps_default_types() -> None:
    assert refusal(with_settings(("plan.tiers[5].default", "IQ2_S"), name="wikitext2-stock-v1")) == (
        "plan.tiers[5].default: expected 'IQ2_XS' with ladder = 'stock', llama.cpp's default type of IQ2_S, got 'IQ2_S'; "
        "write that, or take another ladder")


class TestIds:
    def test_stock_and_guarded_may_stand_on_one_table(self) -> None:
        assert GUARDED.eval_id == STOCK.eval_id
        assert GUARDED.imatrix_id == STOCK.imatrix_id
        assert GUARDED.mtp_id == STOCK.mtp_id
        assert GUARDED.plan_id != STOCK.plan_id
        assert GUARDED.protocol_id != STOCK.protocol_id

    def test_other_chunks_may_not(self) -> None:
        assert len({load_protocol(name).eval_id for name in NAMES}) == 4

    @given(st.randoms(use_true_random=False))
    @settings(max_examples=10)
    @pytest.mark.slow
    def test_the_order_of_keys_does_not_matter(self, rng: random.Random) -> None:
        assert parse_protocol(write_toml(shuffled(table(), rng)).encode()).ids() == GUARDED.ids()

    def test_names_comments_and_unused_texts_do_not_matter(self) -> None:
        whole = table()
        whole["name"], whole["title"] = "another", "Another one"
        whole["corpora"] = [c for c in whole["corpora"] if c["name"] != "calibration.txt"]
        whole["corpora"][0] |= {"name": "test", "file": "elsewhere.txt", "hub_dataset": "", "hub_config": "", "hub_split": ""}
        whole["eval"]["corpora"] = ["test"]
        whole["mtp"]["corpus"] = "test"
        assert parse_protocol(b"# a comment\n" + write_toml(whole).encode()).ids() == GUARDED.ids()

    def test_an_integer_where_a_fraction_is_meant(self) -> None:
        assert parse_protocol(write_toml(with_settings(("floors.factor", 2))).encode()).ids() == GUARDED.ids()

    @pytest.mark.parametrize(("path", "value", "changed"), [
        ("eval.n_ctx", 1024, {"eval_id"}),
        ("eval.use_extra_bufts", False, {"eval_id"}),
        ("eval.n_threads", 2, {"eval_id"}),
        ("corpora[0].documents", "none", {"eval_id", "mtp_id"}),
        ("corpora[0].sha256", "0" * 64, {"eval_id", "mtp_id"}),
        ("corpora[1].sha256", "0" * 64, {"imatrix_id"}),
        ("corpora[2].sha256", "0" * 64, set()),
        ("corpora[3].sha256", "0" * 64, {"protocol_id"}),
        ("imatrix.zero_floor", 0.5, {"imatrix_id"}),
        ("plan.tiers[3].rules[0].at_least", "Q6_K", {"plan_id"}),
        ("plan.mtp_type", "BF16", {"plan_id"}),
        ("mtp.seed", 2, {"mtp_id"}),
        ("floors.factor", 3.0, {"protocol_id"}),
        ("sequential.alpha", 0.01, {"protocol_id"}),
        ("search.seed", 2, {"protocol_id"}),
        ("gate.margins.kld_mean", 0.5, {"protocol_id"}),
        ("refpack.mass", 0.5, {"protocol_id"}),
    ])
    def test_each_part_moves_its_own_id(self, path: str, value: object, changed: set[str]) -> None:
        ids = parse_protocol(write_toml(with_settings((path, value))).encode()).ids()
        expected = changed | ({"protocol_id"} if changed else set())
        assert {key for key, value in GUARDED.ids().items() if ids[key] != value} == expected

    def test_an_id_is_the_hash_of_canonical_json(self) -> None:
        text = {"sha256": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08", "size_bytes": 1290590,
                "documents": "wikitext", "format": "text"}
        assert GUARDED.eval_id == sha256_json({
            "schema": 1, "part": "eval", "n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "type_k": "F16", "type_v": "F16",
            "flash_attn": "on", "use_extra_bufts": True, "n_threads": 1, "corpora": [text], "chunks": "all", "n_chunk": 0,
            "seed": 1, "offload": {"fixed": False, "n_gpu_layers": 0, "main_gpu": 0, "tensor_split": []}})


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


class TestDeriving:
    def test_values_change_and_are_marked(self) -> None:
        derived = derive_protocol(GUARDED, ["eval.chunks=spread", "eval.n_chunk=8", "plan.mtp_type=Q4_K"])
        assert (derived.eval.chunks, derived.eval.n_chunk, derived.plan.mtp_type) == ("spread", 8, "Q4_K")
        assert derived.derived == ("eval.chunks=spread", "eval.n_chunk=8", "plan.mtp_type=Q4_K")
        assert derived.name == "wikitext2-v1"
        assert derived.eval_id != GUARDED.eval_id
        assert derived.imatrix_id == GUARDED.imatrix_id

    def test_another_calibration_leaves_the_evaluation(self) -> None:
        derived = load_protocol("wikitext2-quick-v1", ["imatrix.corpus=wiki.train.raw"])
        assert derived.eval_id == QUICK.eval_id
        assert derived.imatrix_id != QUICK.imatrix_id

    def test_written_and_read_back_with_its_marks(self, tmp_path: Path) -> None:
        derived = derive_protocol(QUICK, ["eval.n_chunk=8", "plan.tiers[3].default=Q5_K"])
        path = tmp_path / "protocol.toml"
        path.write_bytes(write_protocol(derived))
        held = load_protocol(path)
        assert held == derived
        assert held.ids() == derived.ids()
        assert held.derived == ("eval.n_chunk=8", "plan.tiers[Q4_K_M].default=Q5_K")

    def test_the_last_value_of_a_key_counts(self) -> None:
        once = derive_protocol(QUICK, ["eval.n_chunk=8"])
        assert derive_protocol(QUICK, ["eval.n_chunk=9", "eval.n_chunk=8"]) == once
        assert derive_protocol(once, ["eval.n_chunk=12"]) == derive_protocol(QUICK, ["eval.n_chunk=12"])

    def test_what_changes_nothing_leaves_no_mark(self) -> None:
        assert derive_protocol(QUICK, ["eval.n_chunk=64", "eval.flash_attn=on"]) == QUICK

    def test_by_index_and_by_name(self) -> None:
        by_name = derive_protocol(GUARDED, ["plan.tiers[Q4_K_M].rules[0].at_least=Q6_K"])
        assert by_name == derive_protocol(GUARDED, ["plan.tiers[3].rules[0].at_least=Q6_K"])
        assert by_name.plan.tier("Q4_K_M").rules[0].at_least == "Q6_K"
        named = derive_protocol(GUARDED, ["corpora[wiki.test.raw].documents=none"])
        assert named.corpus("wiki.test.raw").documents == "none"

    @pytest.mark.parametrize(("setting", "value"), [
        ("eval.offload.tensor_split=[3, 1]", None),
        ("floors.factor=3", 3.0),
        ("gate.smoke_prompt=a = b # c", "a = b # c"),
        ('gate.smoke_prompt="a\\n"', "a\n"),
        ("gate.smoke_prompt=12", "12"),
        ("gate.smoke_prompt=", ""),
        ("mtp.n_draft=[1, 2]", (1, 2)),
        ("eval.use_extra_bufts=false", False),
    ])
    def test_values_are_toml_or_bare_words(self, setting: str, value: object) -> None:
        settings_ = [setting, "eval.offload.fixed=true"] if "offload" in setting else [setting]
        derived = derive_protocol(GUARDED, settings_)
        if value is None:
            assert derived.eval.offload.tensor_split == (3.0, 1.0)
        else:
            section, key = setting.split("=")[0].split(".")
            assert getattr(getattr(derived, section), key) == value

    def test_arrays_of_tables_can_be_set_whole(self) -> None:
        derived = derive_protocol(GUARDED, ["floors.kernels=[]", "plan.tiers[Q8_0].rules=[{match='output.weight', layers='', "
                                            "type='BF16', at_least='', optional=false}]"])
        assert derived.floors.kernels == ()
        assert derived.plan.tier("Q8_0").rules[0].type == "BF16"
        assert parse_protocol(write_protocol(derived)) == derived

    @pytest.mark.parametrize(("setting", "expected"), [
        ("eval.n_chunk", "--set: expected path=value such as eval.n_chunk=8, got 'eval.n_chunk'"),
        ("=8", "--set: expected path=value"),
        ("eval.n_chnk=8", "--set: expected one of n_ctx, n_batch, .* after 'eval', got 'n_chnk' in 'eval.n_chnk'"),
        ("nothing.n=8", "--set: expected one of schema, name, .* after 'the start', got 'nothing'"),
        ("eval.n_ctx.more=8", "--set: expected nothing more after 'eval.n_ctx', got 'more'"),
        ("plan.tiers.Q8_0=8", r"--set: expected an index below 7 or a name in brackets after 'plan.tiers', got 'Q8_0'"),
        ("plan.tiers[7].name=x", r"--set: expected an index below 7 or a name in brackets after 'plan.tiers', got '7'"),
        ("plan.tiers[Q9].name=x", "got 'Q9' in "),
        ("eval..n_ctx=8", "--set: expected a dotted path"),
        (".eval.n_ctx=8", "--set: expected a dotted path"),
        ("eval.n ctx=8", "--set: expected a dotted path"),
        ("schema=2", "--set: expected a value that can change a number, got schema"),
        ("name=x", "got name, which is not for setting"),
        ("derived=[]", "got derived, which is not for setting"),
        ("eval.n_ctx=9", "eval.n_ctx: expected an even number of at least 8, got 9"),
        ("eval.n_ctx=many", "eval.n_ctx: expected an integer, got 'many'"),
        ("eval.n_ctx=8\nn_batch = 8", "eval.n_ctx: expected an integer, got '8.nn_batch = 8'"),
        ("eval.n_chunk=8", "eval.n_chunk: expected 0 with chunks = 'all'"),
        ("eval={}", "eval.n_ctx: expected this key"),
    ])
    def test_what_cannot_be_set(self, setting: str, expected: str) -> None:
        with pytest.raises(ProtocolError) as caught:
            derive_protocol(GUARDED, [setting])
        assert re.search(expected, str(caught.value))


class TestPublished:
    def test_these_and_no_others(self) -> None:
        assert known_protocols() == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_named_as_its_file_and_not_derived(self, name: str) -> None:
        protocol = load_protocol(name)
        assert (protocol.name, protocol.derived, protocol_path(name).stem) == (name, (), name)

    @pytest.mark.parametrize("name", NAMES)
    def test_reads_back_from_its_canonical_form(self, name: str) -> None:
        protocol = load_protocol(name)
        assert parse_protocol(write_protocol(protocol)) == protocol

    @pytest.mark.parametrize("name", NAMES)
    def test_any_text_can_calibrate_without_touching_the_evaluation(self, name: str) -> None:
        for text in load_protocol(name).corpora:
            if text.name not in load_protocol(name).eval.corpora and text.name != load_protocol(name).search.second_corpus:
                assert load_protocol(name, [f"imatrix.corpus={text.name}"]).eval_id == load_protocol(name).eval_id

    def test_every_key_is_explained(self) -> None:
        text = (ROOT / "docs" / "PROTOCOL.md").read_text("utf-8")
        assert [key for key in schema_keys(Protocol) if f"`{key}`" not in text] == []

    def test_bundled_texts(self) -> None:
        protocol = load_protocol("demo-v1")
        for name in (*protocol.eval.corpora, protocol.imatrix.corpus):
            corpus = protocol.corpus(name)
            data = (ROOT / "quantkit" / "data" / "demo" / corpus.file).read_bytes()
            assert (hashlib.sha256(data).hexdigest(), len(data)) == (corpus.sha256, corpus.size_bytes)


def schema_keys(kind: Any, path: str = "") -> list[str]:
    """Dotted paths of all keys of the schema; a rule's own keys stand alone, once."""
    keys = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        inner = typing.get_args(inner)[0] if typing.get_origin(inner) is tuple else inner
        name = f"{path}{field.name}"
        if field.name == "rules":
            keys += [name, *schema_keys(inner)]
        elif isinstance(inner, type) and dataclasses.is_dataclass(inner):
            keys += schema_keys(inner, f"{name}.")
        else:
            keys.append(name)
    return keys


def shape_of_27b(shared: Path, *, mtp: bool) -> ModelInfo:
    spec = importlib.util.spec_from_file_location("make_shape27b", shared / "models" / "make_shape27b.py")
    assert spec is not None
    assert spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = {name: (tuple(reversed(shape)), "BF16" if kind is module.BF16 else "F32")
               for name, shape, kind in module.tensors(int(mtp))}
    return model_of(tensors, {"qwen35.block_count": 64 + mtp, "qwen35.nextn_predict_layers": int(mtp)}, arch="qwen35")


class TestLadders:
    @pytest.mark.parametrize("model", [
        tiny(n_block=30, n_embd=576, n_ff=1536, tied=True),  # rows that 256 does not divide
        tiny(n_block=16, n_embd=2048, n_ff=8192, tied=True),
        tiny(n_block=48, n_embd=2048, n_ff=768, n_expert=8),
        tiny(n_block=1), tiny(n_block=2, tied=True, n_expert=4), tiny(n_block=5, n_nextn=1),
    ], ids=["rows of 576", "tied", "experts", "one block", "tied experts", "NextN"])
    def test_guarded_sizes_fall(self, model: ModelInfo) -> None:
        assert_sizes_fall(model)

    @pytest.mark.slow
    def test_guarded_sizes_fall_on_27b(self, shared: Path) -> None:
        assert_sizes_fall(shape_of_27b(shared, mtp=False))
        assert_sizes_fall(shape_of_27b(shared, mtp=True))

    def test_guarded_sizes_fall_on_the_test_models(self, tiny_model: Path, moe_model: Path) -> None:
        assert_sizes_fall(describe_model(read_header(tiny_model)))
        assert_sizes_fall(describe_model(read_header(moe_model)))

    @pytest.mark.parametrize("tier", ["Q8_0", "Q4_K_M", "IQ2_S", "IQ1_M"])
    def test_guarded_roles_never_get_fewer_bits_than_stock(self, shared: Path, tiny_model: Path, tier: str) -> None:
        """Against files that llama-quantize wrote. `ffn_down` has one type in all layers instead of two."""
        stock = {t.name: t.type.name for t in read_header(shared / "oracle" / f"stock-{tier}.gguf").tensors}
        plan = resolve_plan(describe_model(read_header(tiny_model)), GUARDED.plan.tier(tier), GUARDED.plan, None)
        lower = {row.name for row in plan.rows if bits(row.type) < bits(stock[row.name])}
        higher = {row.name for row in plan.rows if bits(row.type) > bits(stock[row.name])}
        assert all("ffn_down" in name for name in lower)
        assert len(lower) <= 1
        assert len(higher) >= (0 if tier == "Q8_0" else 25)

    def test_gates_and_head_are_never_below_q8_0(self, tiny_model: Path) -> None:
        model = describe_model(read_header(tiny_model))
        for tier in GUARDED.plan.tiers:
            rows = resolve_plan(model, tier, GUARDED.plan, None).rows
            gates = {row.type for row in rows if re.search(r"\.ssm_(alpha|beta)\.weight$", row.name)}
            head = {row.type for row in rows if row.role == "mtp" and len(row.shape) > 1}
            assert (gates, head) == ({"Q8_0"}, {"Q8_0"})


def assert_sizes_fall(model: ModelInfo) -> None:
    sizes = [resolve_plan(model, tier, GUARDED.plan, None).tensor_bytes for tier in GUARDED.plan.tiers]
    assert all(a > b for a, b in itertools.pairwise(sizes)), sizes
