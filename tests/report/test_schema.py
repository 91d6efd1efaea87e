"""`retention.json` against the schema that is published with it: one unit for each number, nothing undefined that is not null."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quantkit.report.table import retention_json
from tests.report.test_table import HEADER, make_table

SCHEMA = json.loads((Path(__file__).parents[2] / "quantkit" / "spec" / "report_schema.json").read_bytes())


def made() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(retention_json(HEADER, make_table()))
    return value


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    with pytest.raises(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema({**SCHEMA, "required": "schema"})


def test_the_table_is_valid() -> None:
    assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(made())) == []


def test_every_published_field_is_described() -> None:
    """A key that the table has and the schema does not know would be unpublished interface."""
    tier = made()["tiers"][0]
    known = {name: SCHEMA["properties"][name] for name in ("header", "tiers")}
    assert set(known["header"]["required"]) <= set(made()["header"])
    assert set(known["tiers"]["items"]["required"]) <= set(tier)
    assert set(SCHEMA["$defs"]["summary"]["required"]) == set(tier["summary"])


@pytest.mark.parametrize(("path", "value"), [
    (("tiers", 0, "size_bytes"), "12.94 MiB"), (("tiers", 0, "summary", "kld", "value"), "nan"),
    (("tiers", 0, "file"), "/a/folder/x.gguf"), (("tiers", 0, "substituted"), 97.9), (("header", "base_sha256"), "d4"),
    (("schema",), 2), (("tiers",), []),
])
def test_what_is_wrong_is_refused(path: tuple[str | int, ...], value: object) -> None:
    *way, last = path
    whole = made()
    target: Any = whole
    for key in way:
        target = target[key]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(whole, SCHEMA)


def test_units_are_in_the_schema() -> None:
    """0.953 or 95.3 %: a fraction, and it says so."""
    summary = SCHEMA["$defs"]["summary"]["properties"]
    for name in ("same_top_p", "p_diff", "p_diff_rms", "ppl_drift"):
        assert summary[name]["description"].endswith("a fraction")
    for name in ("kld", "ln_ppl_ratio"):
        assert summary[name]["description"].endswith("nats per token")
    assert made()["tiers"][0]["summary"]["same_top_p"]["value"] == 1.0
