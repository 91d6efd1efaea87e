"""The model card: front matter, the block between its markers, hostile names, and guidance that ranks nothing inside the noise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from quantkit.cli.report import report
from quantkit.core.errors import CheckFailed, InputError
from quantkit.core.units import GIB
from quantkit.job.manifest import APART, refresh_files
from quantkit.job.rundir import RunFolder, write_json
from quantkit.report.card import BEGIN, END, CardOptions, card_block, front_matter, missing_keys, new_card, updated_card, write_card
from quantkit.report.check import check_card
from quantkit.report.guidance import recommend
from quantkit.report.run_data import read_run
from tests.report.run_factory import change_json, make_plan, make_run
from tests.report.test_run_report import add_verdicts
from tests.report.test_table import PACK

EVIL = "`x`|<script>alert(1)</script> [a](javascript:b) **b** <!-- quantkit:end --> https://e.vil @all \u202egpj $x$"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "a run")


def test_front_matter_is_yaml_with_what_is_known(run: RunFolder) -> None:
    data = read_run(run.path)
    text = front_matter(data, CardOptions(quantized_by='Me: "x"'))
    assert text.splitlines()[:7] == [
        "---", 'base_model: "Owner/Tiny"', 'base_model_relation: "quantized"', 'license: "apache-2.0"',
        'pipeline_tag: "text-generation"', 'library_name: "gguf"', 'quantized_by: "Me: \\"x\\""']
    assert 'language:\n- "en"\n' in text
    assert missing_keys(data, CardOptions()) == ["quantized_by"]
    (run.path / "base.json").unlink()
    bare = read_run(run.path)
    assert "base_model" not in front_matter(bare, CardOptions())
    assert missing_keys(bare, CardOptions(license="mit")) == ["base_model", "quantized_by"]
    assert 'base_model: "A/B"' in front_matter(bare, CardOptions(base_model="A/B\nevil: 1"))[:40].replace(" evil: 1", "")


def test_the_card_states_base_file_type_and_hash(run: RunFolder) -> None:
    """A KLD against an unnamed baseline says nothing: the base, its type and its hash stand first."""
    first = card_block(read_run(run.path)).splitlines()[1]
    assert first.startswith(f"Made from tiny-BF16.gguf (BF16, sha256 `{'b2' * 32}`) and measured against it")


def test_the_card_renders_as_meant(run: RunFolder) -> None:
    add_verdicts(run)
    for name in ("kld_vs_size", "by_slice"):
        run.report.mkdir(exist_ok=True)
        (run.report / f"{name}.png").write_bytes(b"")
    change_json(run.manifest, files={"quants/tiny-Q8_0.gguf": {}})
    card = new_card(read_run(run.path), CardOptions())
    body = card.split("---\n", 2)[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert html.count("<table>") == 1
    assert html.count("<tr>") == 5
    assert '<a href="quants/tiny-Q8_0.gguf">Q8_0</a>' in html
    assert "<td>Q4" in html.replace(' style="text-align:left"', "")  # its file is not in the bundle: no link
    assert '<img src="report/kld_vs_size.png" alt="Mean KLD against file size"' in html
    assert '<img src="report/by_slice.png"' in html
    assert "kld_tail.png" not in html
    for part in ("Which file?", "Retention", "What was not measured", "Evidence", "How to verify"):
        assert f"<h2>{part}</h2>" in html
    assert f"<code>quantkit verify RUN --id {'a1' * 32}</code>" in html
    assert re.search(r"\b(nan|None)\b", html) is None


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01}, base_file="/home/user/" + EVIL, files={"Q8_0": EVIL},
                   corpus={"name": EVIL, "sha256": "c3" * 32})
    write_json(run.path / "base.json", {**json.loads((run.path / "base.json").read_bytes()), "name": EVIL, "license": EVIL})
    data = read_run(run.path)
    text = new_card(data, CardOptions())
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    body = text.split("---\n", 2)[2]
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(body)
    tags = set(re.findall(r"<(\w+)", html)) - {"h1", "h2", "p", "ul", "li", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert tags == {"a", "strong"}
    assert set(re.findall(r'href="([^"]*)"', html)) == {"report/retention.csv", "report/report.html", "report/kld_vs_size.svg"}
    assert "@all" not in re.sub(r"`[^`\n]*`", "", body.replace(r"\`", ""))  # what is in code mentions nobody
    assert "\u202e" not in text
    assert "/home/" not in text
    assert all(line.startswith('license: "') for line in text.splitlines() if line.startswith("license"))
    card = tmp_path / "README.md"
    write_card(card, updated_card(card, data, CardOptions()), data)
    assert updated_card(card, data, CardOptions()) == card.read_text("utf-8")


def test_update_replaces_only_the_block(run: RunFolder, tmp_path: Path) -> None:
    data = read_run(run.path)
    card = tmp_path / "README.md"
    before, after = b"---\nlicense: mine\n---\r\n# My own words \xff\n\n", b"\n\nMore of them.\n"
    card.write_bytes(before + f"{BEGIN}\nold\n{END}".encode() + after)
    write_card(card, updated_card(card, data, CardOptions()), data)
    now = card.read_bytes()
    assert now.startswith(before)
    assert now.endswith(END.encode() + after)
    assert b"\nold" not in now
    assert b"](a%20run/report/retention.csv)" in now  # relative to the card
    assert b"\r\n## Retention\r\n" in now  # the line ends of the file


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN}\n", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_card_without_a_place_for_the_block_is_left_alone(run: RunFolder, tmp_path: Path, text: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    with pytest.raises(InputError, match=r"expected one line <!-- quantkit:begin --> and below it one line"):
        updated_card(card, read_run(run.path), CardOptions())


def test_check_finds_a_block_that_is_out_of_date(run: RunFolder) -> None:
    refresh_files(run)
    data = read_run(run.path)
    card = run.path / "README.md"
    with pytest.raises(InputError, match="expected a card at"):
        check_card(card, run.path)
    write_card(card, updated_card(card, data, CardOptions(quantized_by="me")), data)
    assert "README.md" in json.loads((run.path / APART).read_bytes())["files"]
    assert "](report/retention.csv)" in card.read_text("utf-8")
    check_card(card, run.path)
    card.write_text(card.read_text("utf-8").replace("IQ1", "IQ9"), "utf-8")
    with pytest.raises(CheckFailed, match=r"the block in .* line \d+ is .*IQ9"):
        check_card(card, run.path)


@pytest.mark.slow
def test_cli_prints_a_card_and_says_what_the_hub_wants(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.report.run_report.draw_run", lambda data: {})
    words = [str(run.path), "--card", "--license", "mit"]
    result = CliRunner().invoke(report, words, catch_exceptions=False)
    assert result.stdout.startswith("---\nbase_model")
    assert 'license: "mit"' in result.stdout
    assert result.stderr == "the hub also wants quantized_by in a card's front matter: see --help\n"
    result = CliRunner().invoke(report, [str(run.path), "--update", str(run.path / "README.md"), "--quantized-by", "me"],
                                catch_exceptions=False)
    assert (result.stdout, result.stderr) == ("", f"card: {run.path / 'README.md'}\n")
    result = CliRunner().invoke(report, [str(run.path), "--check", "--update", str(run.path / "README.md")], catch_exceptions=False)
    assert "and the card are what the records give" in result.stderr


def sized(run: RunFolder, **gib: float) -> RunFolder:
    """The same run with files of these sizes and no plans: all of a file counts."""
    tiers = json.loads(run.manifest.read_bytes())["tiers"]
    for tier, size in gib.items():
        tiers[tier]["size_bytes"] = int(size * GIB)
        run.plan(tier).unlink()
    change_json(run.manifest, tiers=tiers)
    return run


def test_a_card_gets_the_least_kld_that_fits(run: RunFolder) -> None:
    """1.25 GiB of context and half a GiB for the driver: 6 GiB fit an 8 GiB card, 10 a 12 GiB one; 16.79 need more than 16."""
    lines = recommend(read_run(sized(run, Q8_0=16.79, Q4_K_M=10.0, IQ1_M=6.0).path))
    assert [line.split(", ")[0] + ", " + line.split(": ")[1].split(",")[0] for line in lines] == [
        "8 GiB card, IQ1_M", "12 GiB card, Q4_K_M", "24 GiB card, Q8_0"]
    assert "4k tokens of context" in lines[0]


def test_what_is_not_told_apart_is_named_beside_it(run: RunFolder) -> None:
    add_verdicts(run)
    lines = recommend(read_run(sized(run, Q8_0=20.0, Q4_K_M=10.0, IQ1_M=6.0).path))
    assert lines[-1].endswith("; smaller and not told apart from it: Q4_K_M")
    assert "not told apart" not in lines[1]


def test_a_substituted_or_collapsed_tier_is_never_recommended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01, "Q4_K_M": 0.02, "IQ1_M": 3.0})
    write_json(run.plan("Q8_0"), make_plan("Q8_0", "Q8_0", change="substituted").to_json())
    lines = recommend(read_run(run.path))
    assert len(lines) == 1
    assert lines[0].startswith("Every card from 8 GiB up holds the file with the least KLD: Q4_K_M")
    (run.path / "base.json").unlink()
    assert recommend(read_run(run.path)) == []


def test_a_tier_measured_against_a_pack_is_marked_on_the_card(run: RunFolder) -> None:
    assert "‡" not in card_block(read_run(run.path))
    change_json(run.summary("Q4_K_M"), ref=PACK.to_json())
    data = read_run(run.path)
    assert {row.tier: row.reference and row.reference.mass for row in data.tiers} == {"Q8_0": None, "Q4_K_M": 0.999, "IQ1_M": None}
    text = card_block(data)
    assert "| Q4_K_M ‡ |" in text
    assert "mass 0.999: KLD is a lower bound, short by an estimated 2.13e" in text
    assert "KLD of at least" in data.sentences["Q4_K_M"]
    assert "KLD of at least" not in data.sentences["Q8_0"]
