"""The JSON Schema says the same as the loader about keys and single values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moegraph.specs import load_spec
from moegraph.specs.not_yet import NOT_YET
from moegraph.specs.resolved import spec_data
from moegraph.specs.schema_json import DIALECT, json_schema
from moegraph.specs.sources import preset_names
from tests.specs.small import MINIMAL, write

SCHEMA = json_schema()
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int,),
    "null": (type(None),),
}
NOTES = {
    "title",
    "description",
    "default",
    "discriminator",
    "$schema",
    "$defs",
    "then",
    "else",
    "x-waits-for-later-work",
}


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema; knows the keywords that this schema uses and fails on any other."""
    return all(_holds(key, rule, value, schema) for key, rule in schema.items() if key not in NOTES)


def _holds(key: str, rule: Any, value: Any, schema: dict[str, Any]) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    mapping, sequence = isinstance(value, dict), isinstance(value, list)
    match key:
        case "$ref":
            return valid(value, SCHEMA["$defs"][rule.rpartition("/")[2]])
        case "type":
            return isinstance(value, TYPES[rule]) and not (rule in {"integer", "number"} and isinstance(value, bool))
        case "enum":
            return value in rule
        case "const":
            return bool(value == rule)
        case "anyOf" | "oneOf":
            return any(valid(value, each) for each in rule)
        case "if":
            return valid(value, schema["then" if valid(value, rule) else "else"])
        case "required":
            return not mapping or set(rule) <= set(value)
        case "properties":
            return not mapping or all(valid(value[name], each) for name, each in rule.items() if name in value)
        case "additionalProperties":
            extra = (
                [item for name, item in value.items() if name not in schema.get("properties", {})] if mapping else []
            )
            return not extra or (rule is not False and (rule is True or all(valid(item, rule) for item in extra)))
        case "items":
            return not sequence or all(valid(item, rule) for item in value)
        case "prefixItems":
            return not sequence or all(valid(item, each) for item, each in zip(value, rule, strict=False))
        case "minItems" | "maxItems":
            return not sequence or (len(value) >= rule if key == "minItems" else len(value) <= rule)
        case "minLength" | "maxLength":
            return not isinstance(value, str) or (len(value) >= rule if key == "minLength" else len(value) <= rule)
        case "pattern":
            return not isinstance(value, str) or re.search(rule, value) is not None
        case "minimum":
            return not number or value >= rule
        case "maximum":
            return not number or value <= rule
        case "exclusiveMinimum":
            return not number or value > rule
        case "exclusiveMaximum":
            return not number or value < rule
    raise AssertionError(f"a keyword that this test does not know: {key}")


def test_it_is_plain_json_of_a_named_dialect() -> None:
    assert SCHEMA["$schema"] == DIALECT
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("name", preset_names())
def test_every_resolved_preset_fits_it(name: str) -> None:
    assert valid(spec_data(load_spec(name)), SCHEMA)


def test_a_spec_that_extends_another_may_leave_out_what_that_has() -> None:
    assert valid(
        {"extends": "presets/tiny.yaml", "model": {"moe": {"top_k": 1}}, "train": {"schedule": {"kind": "wsd"}}}, SCHEMA
    )
    assert not valid({"model": {"moe": {"top_k": 1}}}, SCHEMA)
    assert not valid({"extends": "presets/tiny.yaml", "model": {"moe": {"topk": 1}}}, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1},
        {"spec_version": 2},
        {"layout": {"dp": 0}},
        {"layout": {"schedule": "none"}},
        {"passes": {"balance_losses": {}}},
        {"train": {"steps": 3, "tokens_per_step": 256, "schedule": {"kind": "wsdd"}}},
        {"train": {"steps": 3}},
        {"data": {"source": "", "seq_len": 3}},
    ],
)
def test_what_the_loader_refuses_does_not_fit(tmp_path: Path, change: dict[str, Any]) -> None:
    data = spec_data(load_spec(write(tmp_path, MINIMAL)))
    assert valid(data, SCHEMA)
    assert not valid({**data, **change}, SCHEMA)


def test_it_tells_what_waits_for_later_work() -> None:
    assert set(SCHEMA["x-waits-for-later-work"]) == set(NOT_YET)
