"""What a header tells people about the base, whatever types its keys have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.spec.base_facts import BaseFacts, describe_base
from quantkit.spec.gguf_header import read_header
from quantkit.spec.memory_fit import context_memory
from quantkit.spec.model import describe_model
from tests.gguf_factory import tiny_model as write_tiny


def facts_of(path: Path, metadata: dict[str, Any]) -> BaseFacts:
    model = describe_model(read_header(write_tiny(path / "m.gguf", metadata=metadata)[0]))
    return describe_base(model, [context_memory(model, 8192)])


def test_facts_come_back_from_json(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {"general.license": "apache-2.0", "general.languages": ["en", "de"]})
    assert (facts.name, facts.license, facts.languages, facts.n_ctx_train) == ("tiny", "apache-2.0", ("en", "de"), 512)
    assert facts.memory[0].n_ctx == 8192
    assert BaseFacts.from_json(facts.to_json()) == facts


def test_keys_of_other_types_count_as_missing(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {"general.license": 7, "general.languages": "en", "general.source.url": 1})
    assert (facts.license, facts.languages, facts.repository) == (None, (), None)


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("general.source.url", "https://huggingface.co/Owner/Model-1.5/", "Owner/Model-1.5"),
    ("general.source.huggingface.repository", "Owner/Model", "Owner/Model"),
    ("general.repo_url", "https://huggingface.co/Owner/Model/tree/main", None),
    ("general.url", "https://example.org/Owner/Model", None),
])
def test_the_hub_repository_is_told_where_the_file_names_it(tmp_path: Path, key: str, value: str, expected: str | None) -> None:
    assert facts_of(tmp_path, {key: value}).repository == expected
