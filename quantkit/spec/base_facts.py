"""What reports say about the base and its numbers do not hold: name, licence, origin, and the memory that every tier shares.

Kept in the run directory as `base.json`, since a published bundle has no model file to look into. No result depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quantkit.spec.gguf_header import ArrayValue, GgufHeader
from quantkit.spec.json_records import record_from_json
from quantkit.spec.memory_fit import ContextMemory
from quantkit.spec.model import ModelInfo

_MAX_LIST = 20
_HUB_URL = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+?)/?")
_REPOSITORY_KEYS = ("general.source.repo_url", "general.source.url", "general.repo_url", "general.url")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """The base, for people. What its file does not tell is None or empty.

    `repository` is the hub's `owner/name` that the file says it came from.
    """

    name: str | None
    license: str | None
    repository: str | None
    languages: tuple[str, ...]
    n_ctx_train: int | None
    tied_embeddings: bool
    memory: tuple[ContextMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, keys in the order of the fields."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"schema": 1, **plain, "languages": list(self.languages), "memory": [m.to_json() for m in self.memory]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BaseFacts:
        """The record that `to_json` wrote.

        Raises:
            KeyError, TypeError: a key is missing, unknown or of another kind.
        """
        return record_from_json(cls, {key: value for key, value in data.items() if key != "schema"})


def describe_base(model: ModelInfo, memory: Sequence[ContextMemory]) -> BaseFacts:
    """Facts from a header; a key of an unexpected type counts as missing, since none of these decides anything."""
    header = model.header
    return BaseFacts(name=model.name, license=_text(header, "general.license"), repository=_repository(header),
                     languages=_texts(header, "general.languages"), n_ctx_train=model.n_ctx_train,
                     tied_embeddings=model.tied_embeddings, memory=tuple(memory))


def _repository(header: GgufHeader) -> str | None:
    named = _text(header, "general.source.huggingface.repository")
    if named is not None:
        return named
    found = (_HUB_URL.fullmatch(url) for key in _REPOSITORY_KEYS if (url := _text(header, key)) is not None)
    return next((match[1] for match in found if match), None)


def _text(header: GgufHeader, key: str) -> str | None:
    value = header.metadata.get(key)
    return value if isinstance(value, str) and value else None


def _texts(header: GgufHeader, key: str) -> tuple[str, ...]:
    value = header.metadata.get(key)
    if not isinstance(value, ArrayValue):
        return ()
    return tuple(v for v in value.values or () if isinstance(v, str) and v)[:_MAX_LIST]
