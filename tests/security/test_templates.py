"""Chat templates of strangers: nothing outside the sandbox, no end without a limit."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from pathlib import Path

import pytest

from quantkit.core.errors import InputError
from quantkit.engine import template_limits
from quantkit.engine.chat import chat_prompts, render
from quantkit.engine.pool import WorkerPool
from quantkit.engine.template_limits import BeyondLimits
from tests.gguf_factory import tiny_model


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_S", 0.2)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['os'].system('touch owned') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch owned').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ strftime_now.__self__.__class__.__subclasses__() }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% set _ = messages.append(1) %}",
    "{% set _ = messages[0].update({'content': 'x'}) %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_leads_out_of_the_sandbox(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused, or writes nothing that it should not have had."""
    monkeypatch.chdir(tmp_path)
    try:
        text = render(template, "x", "", "")
    except Exception as error:
        text = str(error)
    assert "<class" not in text
    assert "root:" not in text
    assert "module" not in text.replace("no attribute", "")
    assert list(tmp_path.iterdir()) == []


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that doubles": "{% macro f(n) %}{% for i in (1, 2) %}{{ f(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ f(60) }}",
    "powers": "{{ 7 ** (7 ** 9) % 3 }}",
    "powers at run time": "{% set n = messages|length %}{{ (6 + n) ** (7 ** 9) % 3 }}",
    "text without end": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_what_does_not_end_is_ended(template: str) -> None:
    with pytest.raises(BeyondLimits, match=r"it (does not end within|takes more than|writes more than)"):
        render(template, "x", "", "")


def test_more_text_than_any_prompt_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_TEXT_CHARACTERS", 1000)
    with pytest.raises(BeyondLimits, match="it writes more than 1000 characters"):
        render("{% for i in range(100) %}{{ 'x' * 99 }}{% endfor %}", "x", "", "")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_is_bounded() -> None:
    with pytest.raises(BeyondLimits, match=r"it takes more than 1\.00 GiB of memory"):
        render("{% set x = 'x' * 3000000000 %}{{ x|length }}", "x", "", "")


def test_a_template_too_long_to_compile_is_refused() -> None:
    with pytest.raises(BeyondLimits, match="it has 1048577 characters, more than 1048576"):
        render("x" * (1 << 20 | 1), "x", "", "")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ 1 / 0 }}", "{% for a in range(99999) %}{% for b in "
                                      "range(99999) %}{% endfor %}{% endfor %}"], ids=["fine", "fails", "endless"])
def test_limits_end_with_the_template(template: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    with contextlib.suppress(ZeroDivisionError, BeyondLimits):
        assert render(template, "x", "", "") == "x"
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_loop_controls_and_json_are_those_of_other_renderers() -> None:
    assert render("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}", "x", "", "") == "012"
    said = "<b> & 'é'"
    assert render("{{ messages[0].content|tojson }}", said, "", "") == json.dumps(said, ensure_ascii=False)


@pytest.mark.engine
def test_a_model_with_an_endless_template_is_one_clear_error(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{{ 'x' * 3000000000 }}"})[0]
    fine = tiny_model(tmp_path / "fine.gguf", metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})[0]
    with WorkerPool(1) as pool:
        with pytest.raises(InputError, match=r"the chat template of m\.gguf fails: it takes more than 1\.00 GiB of memory; take"):
            pool.call("prompts", chat_prompts, path=path, texts=("Hi",))
        assert pool.call("prompts", chat_prompts, path=fine, texts=("Hi",))[0].templated
