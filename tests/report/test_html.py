"""`report.html`: one file, no network, no markup out of names; what it says of types, sizes and the base. Then in a browser."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.job.rundir import RunFolder, write_json
from quantkit.report.escape import with_error
from quantkit.report.html import report_html
from quantkit.report.html_parts import Cell, Html, element, page, preformatted, table, text
from quantkit.report.pictures import draw_run
from quantkit.report.plot_style import Picture
from quantkit.report.run_data import read_run
from quantkit.spec.verdict_records import FloorVerdict, PairVerdict
from tests.report.document import Document
from tests.report.run_factory import change_json, make_plan, make_run
from tests.report.test_mtp_report import RESULT
from tests.report.test_run_report import add_verdicts

pytestmark = pytest.mark.system

EVIL = "</style></script><script>alert(1)</script><img src=x onerror=alert(2)> \" onmouseover=\"alert(3) \u202egpj"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="5"><rect width="8" height="5"/></svg>'
PICTURE = Picture(b"", SVG, "Mean KLD")


def page_of(run: RunFolder) -> str:
    return report_html(read_run(run.path), {"kld_vs_size": PICTURE})


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    document = Document(page_of(make_run(tmp_path / "run")))
    assert not [tag for tag, _ in document.tags if tag in {"link", "iframe", "object", "form", "base"}]
    assert [attributes["src"].split(",")[0] for tag, attributes in document.tags  # type: ignore[union-attr]
            if "src" in attributes] == ["data:image/svg+xml;base64"]
    assert all(attributes["href"].startswith("#") for _, attributes in document.tags  # type: ignore[union-attr]
               if "href" in attributes)
    policy = next(attributes["content"] for tag, attributes in document.tags if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on") or name == "style"]


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"Q8_0": 0.01}, base_file=EVIL, files={"Q8_0": EVIL}, libraries={EVIL: EVIL},
                   corpus={"name": EVIL, "sha256": "c3" * 32})
    run.protocol.write_bytes(run.protocol.read_bytes() + f"# {EVIL}\n".encode())
    clean, dirty = Document(page_of(make_run(tmp_path / "clean", {"Q8_0": 0.01}))), Document(page_of(run))
    assert [tag for tag, _ in clean.tags] == [tag for tag, _ in dirty.tags]
    assert [set(a) for _, a in clean.tags] == [set(a) for _, a in dirty.tags]
    assert "alert(1)" in dirty.text
    assert "\u202e" not in dirty.text


def test_a_foreign_file_is_told_by_its_source(tmp_path: Path) -> None:
    count = {"kind": EVIL, "type": EVIL, "n_tensors": 3, "n_params": 0, "size_bytes": 1 << 20}
    pages = []
    plain = {"general.name": "Model", "general.quantized_by": "me"}
    for name, said, kinds in (("clean", plain, [{**count, "kind": "a", "type": "b"}]),
                              ("dirty", {"general.name": EVIL, EVIL: EVIL}, [count])):
        run = make_run(tmp_path / name, {"theirs": 0.01, "ours": 0.02}, without_plan=["theirs"])
        sha256 = json.loads(run.manifest.read_bytes())["tiers"]["theirs"]["sha256"]
        write_json(run.source("theirs"), {"sha256": sha256, "repository": "owner/model", "revision": None, "n_parts": 2,
                                          "ftype": "Q4_K_M", "said": said, "types": kinds, "kinds": kinds})
        write_json(run.source("ours"), {"sha256": "0" * 64, "repository": None, "revision": None, "n_parts": 1, "ftype": None,
                                        "said": {}, "types": [], "kinds": []})
        pages.append(Document(page_of(run)))
        (tier,) = [tier for tier in read_run(run.path).tiers if tier.source is not None]
        assert tier.tier == "theirs"
        assert "by_layer_types" in draw_run(read_run(run.path))
    clean, dirty = pages
    assert [tag for tag, _ in clean.tags] == [tag for tag, _ in dirty.tags]
    assert "bpw, not made here, calls itself Q4_K_M, 2 parts" in clean.text
    assert "owner/model" in clean.text
    assert "alert(1)" in dirty.text


def test_a_record_of_other_bytes_is_no_source(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"theirs": 0.01}, without_plan=["theirs"])
    write_json(run.source("theirs"), {"sha256": "0" * 64, "repository": "owner/model", "revision": None, "n_parts": 1,
                                      "ftype": None, "said": {}, "types": [], "kinds": []})
    assert read_run(run.path).tiers[0].source is None
    assert "owner/model" not in page_of(run)


def test_the_table_says_what_was_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_verdicts(run)
    document = Document(page_of(run))
    assert document.row("Tier") == ["Tier", "Size", "of BF16", "bpw / core", "Mean KLD", "99.9 % KLD", "PPL drift",
                                    "Same top token", "Group", "Noise floor", "Card at 4k"]
    data = read_run(run.path)
    row = document.row("Q8_0")
    assert row[1].endswith(" KiB")
    assert row[2].endswith(" %")
    assert row[8:] == ["a", "0.00050", "8 GiB"]
    cells = [attributes.get("data-v") for tag, attributes in document.tags if tag == "td" and "data-v" in attributes]
    assert repr(data.tiers[0].summary.kld.value) in cells  # sorts by the number itself, not by what is shown
    assert "Sharing a letter is not equality" in document.text


def test_the_base_is_named_with_type_and_hash(tmp_path: Path) -> None:
    document = Document(page_of(make_run(tmp_path / "run")))
    assert "tiny-BF16.gguf, BF16" in document.text
    assert "b2" * 32 in document.text
    assert document.row("BF16")[4:8] == ["0", "0", "0 %", "100.0 %"]


def test_types_are_told_and_not_the_ftype(tmp_path: Path) -> None:
    """A tier named Q8_0 whose matrices are all Q2_K: the page says Q2_K, by parameters and bytes, and its true bpw."""
    run = make_run(tmp_path / "run", {"Q8_0": 0.01})
    plan = make_plan("Q8_0", "Q2_K", n_block=20)
    write_json(run.plan("Q8_0"), plan.to_json())
    tiers = read_run(run.path).manifest["tiers"]
    tiers["Q8_0"] |= {"bpw": plan.bpw, "bpw_core": plan.bpw_core}
    change_json(run.manifest, tiers=tiers)
    document = Document(page_of(run))
    q2, q2_bytes = 20 * 512 * 256, 20 * 256 * 168  # rows of 512 at Q2_K are 2 * 84 bytes, rows of 256 at Q6_K 210
    n_params, n_bytes = 2 * 256 * 512 + 256 + q2, 2 * 512 * 210 + 256 * 4 + q2_bytes
    assert document.row("Q2_K") == ["Q2_K", "20", f"{q2 / n_params:.1%}", f"{q2_bytes / n_bytes:.1%}", "840.00 KiB"]
    assert document.row("Q8_0")[3] == f"{8 * n_bytes / n_params:.2f} / {8 * (256 * 4 + q2_bytes) / (256 + q2):.2f}"
    assert "ftype Q8_0" in document.text


def test_neighbours_and_floors_are_told_in_words(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_verdicts(run)
    data = read_run(run.path)
    assert data.verdicts is not None
    by_kld = data.verdicts.comparison("kld")
    near = PairVerdict(a="Q8_0", b="Q4_K_M", statistic="kld", difference=-math.log(2), se=0.1, lo_simultaneous=-math.log(4),
                       hi_simultaneous=0.0, p_holm=0.06, detectable=math.log(1.5), n_article_needed=1234, verdict="not resolved",
                       arithmetic=True)
    far = PairVerdict(a="Q4_K_M", b="IQ1_M", statistic="kld", verdict="not resolved", reason="2 articles")
    floors = (FloorVerdict(tier="Q8_0", kernel="flash_attn", kld=0.002, floor=0.001, ratio=2.0, lo=1.5, hi=2.5,
                           indistinguishable=True),
              FloorVerdict(tier="Q4_K_M", kernel="no_repack", kld=0.02, floor=0.001, ratio=20.0, lo=15.0, hi=25.0),
              FloorVerdict(tier="IQ1_M", reason="no rows"))
    verdicts = dataclasses.replace(data.verdicts, floors=floors, n_looks=3,
                                   comparisons=(dataclasses.replace(by_kld, pairs=(near, by_kld.pairs[1], far)),))
    document = Document(report_html(dataclasses.replace(data, verdicts=verdicts), {}))
    shown = [row for row in document.rows if row[1:2] in (["Q4_K_M"], ["IQ1_M"])]
    words = "not resolved (by no more than arithmetic); about 1,234 articles like these would resolve the margin"
    assert shown[0] == ["Q8_0", "Q4_K_M", "0.500", "0.250 to 1.00", "0.060", words, "50.0 %"]
    assert shown[1] == ["Q4_K_M", "IQ1_M", "", "", "", "not resolved: 2 articles", ""]
    told = {row[0]: row for row in document.rows if row and len(row) == 7 and row not in shown}
    assert told["Q8_0"] == ["Q8_0", "0.00200", "0.00100", "2.00", "1.50 to 2.50", "flash_attn", "not told from the base"]
    assert told["Q4_K_M"][-1] == "more than arithmetic"
    assert told["IQ1_M"][-1] == "no rows"
    assert "looked at up to 3 times" in document.text


def test_mtp_heads_have_both_columns_with_counts(tmp_path: Path) -> None:
    """Acceptance of the tier's own head beside that of the base's, on the same trunk, never assumed."""
    run = make_run(tmp_path / "run")
    results = (dataclasses.replace(RESULT, tier="Q8_0"),
               dataclasses.replace(RESULT, tier="IQ1_M", head=None, reason="no head in the file"))
    rows = Document(report_html(dataclasses.replace(read_run(run.path), mtp=results), {})).rows
    rows = rows[next(i for i, row in enumerate(rows) if row[1] == "Head"):]
    teacher, own = RESULT.teacher_forced_acceptance, RESULT.reference
    assert rows[0][3:8] == ["Accepted", "of drafted", "Tokens a step", "Teacher-forced", "unquantized head"]
    assert rows[1][4] == f"{RESULT.n_accepted} of {RESULT.n_drafted}"
    assert teacher is not None
    assert rows[1][6] == with_error(teacher.value, teacher.se)
    assert own is not None
    assert rows[1][7] == with_error(own.teacher_forced_acceptance.value, own.teacher_forced_acceptance.se)
    assert rows[2][:2] == ["IQ1_M", "no head in the file"]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", without_plan=["IQ1_M"])
    said = Document(page_of(run)).text
    for words in ("no paired tests were run", "no noise floor was measured", "no slices were made", "What an MTP head accepts"):
        assert words in said


def test_parts_escape_what_comes_in() -> None:
    assert text("<b>") == "&lt;b&gt;"
    assert text(Html("<b>")) == "<b>"
    assert element("p", "a & b", class_='"x"', data_v="1") == '<p class="&quot;x&quot;" data-v="1">a &amp; b</p>'
    assert preformatted("a\n<b>\x1b[31m\u202e") == "<pre>a\n&lt;b&gt;[31m</pre>"
    made = table(["a", "b"], [[Cell("x"), Cell("y", 1.5)]], sortable=True)
    assert '<td>x</td><td data-v="1.5">y</td>' in made
    assert "<title>&lt;/title&gt;</title>" in page("</title>")


# In a real browser.

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


@functools.cache
def chromium() -> str | None:
    """The system's chromium, or the one that $QUANTKIT_CHROMIUM names."""
    named = os.environ.get("QUANTKIT_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = chromium()
    if path is None:
        if os.environ.get("QUANTKIT_REQUIRE_BROWSER") == "1":
            pytest.fail("no chromium found, and QUANTKIT_REQUIRE_BROWSER=1: apt-get install chromium")
        pytest.skip("no chromium found: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=path, headless=True, args=FLAGS, offline=True,
            viewport={"width": 1280, "height": 900})
        yield context
        context.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three tiers in a folder with a space, with verdicts, and a hostile name among them."""
    evil = EVIL.replace("/", "|").replace("\u202e", "")  # as a tier can be called
    run = make_run(tmp_path_factory.mktemp("html") / "my run", {"Q8_0": 0.002, "Q4_K_M": 0.02, evil: 0.3}, without_plan=[evil])
    path = run.path / "report.html"
    path.write_text(page_of(run), "utf-8")
    return path


def first_column(tab: Any) -> list[str]:
    texts: list[str] = tab.eval_on_selector_all("table.sortable tbody tr", "rows => rows.map(row => row.cells[0].textContent)")
    return [name[:6] for name in texts]


@pytest.mark.browser
def test_the_page_loads_sorts_and_prints(browser: Any, page_path: Path, tmp_path: Path) -> None:
    tab = browser.new_page()
    messages: list[str] = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.on("dialog", lambda dialog: messages.append(f"dialog {dialog.message}"))
    tab.on("request", lambda request: messages.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    tab.goto(page_path.as_uri())
    assert first_column(tab) == ["BF16", "Q8_0", "<|styl", "Q4_K_M"]  # by size
    image = tab.eval_on_selector("figure img", "image => [image.complete, image.naturalWidth]")
    assert image == [True, 8]

    kld = tab.locator("table.sortable thead th", has_text="Mean KLD")
    kld.locator("button").click()
    assert kld.get_attribute("aria-sort") == "ascending"
    assert first_column(tab) == ["BF16", "Q8_0", "Q4_K_M", "<|styl"]
    kld.locator("button").click()
    assert kld.get_attribute("aria-sort") == "descending"
    assert first_column(tab) == ["<|styl", "Q4_K_M", "Q8_0", "BF16"]
    tab.locator("table.sortable thead th", has_text="Size").locator("button").press("Enter")
    assert first_column(tab)[-1] == "BF16"

    wide = tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert wide, "the page must not scroll sideways"
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    tab.screenshot(path=tmp_path / "page.png", full_page=True)
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("[...document.querySelectorAll('details')].every(one => one.open)")
    tab.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert messages == []
    tab.close()


@pytest.mark.browser
def test_without_javascript_the_page_says_the_same(browser: Any, page_path: Path, tmp_path: Path) -> None:
    bare = re.sub(r"<script>.*</script>", "", page_path.read_text("utf-8"), flags=re.DOTALL)
    (tmp_path / "bare.html").write_text(bare, "utf-8")
    texts = []
    for path in (page_path, tmp_path / "bare.html"):
        tab = browser.new_page()
        tab.goto(path.as_uri())
        texts.append(tab.locator("body").inner_text())
        assert tab.locator("details").count() > 0
        tab.close()
    assert texts[0] == texts[1]
