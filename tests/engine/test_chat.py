"""Templates out of files of strangers: rendered in a sandbox, on a day that never passes."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from quantkit.core.errors import InputError
from quantkit.engine.chat import render


def test_one_user_turn_and_the_start_of_the_answer() -> None:
    template = ("{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
                "{% if add_generation_prompt %}<assistant>{% endif %}")
    assert render(template, "Hi", "[B]", "[E]") == "[B]<user>Hi[E]<assistant>"


def test_today_is_always_the_same_day() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", "x", "", "") == "01 Jan 2026"


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InputError, match="only system prompts"):
        render("{{ raise_exception('only system prompts') }}", "x", "", "")


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
])
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)):
        render(template, "x", "", "")
