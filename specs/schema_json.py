"""The JSON Schema of a spec, for editors and for other programs (`moegraph schema`).

It says what keys and values exist, not the cross-field rules. A spec with `extends:` may leave out whatever the spec it
extends has, so the schema holds every section twice, once with its required keys and once without.
"""

from __future__ import annotations

import copy
from typing import Any

from moegraph.specs.not_yet import NOT_YET
from moegraph.specs.schema.spec import Spec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "Another spec below this one's folder, or a shipped preset (presets/tiny.yaml), that this one is "
    "laid over: mapping by mapping; lists and single values are replaced.",
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec file."""
    root = Spec.model_json_schema(by_alias=True)
    sections: dict[str, Any] = root.pop("$defs")
    sections["Spec"] = root
    partial = {f"Partial{name}": _partial(section) for name, section in sections.items()}
    partial["PartialSpec"]["properties"] = {"extends": EXTENDS, **partial["PartialSpec"]["properties"]}
    partial["PartialSpec"]["required"] = ["extends"]
    return {
        "$schema": DIALECT,
        "title": "moegraph spec",
        "description": "A model, its parallel layout, and the run that trains it.",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": "#/$defs/PartialSpec"},
        "else": {"$ref": "#/$defs/Spec"},
        "$defs": {**sections, **partial},
        "x-waits-for-later-work": {path: row.what for path, row in NOT_YET.items()},
    }


def _partial(section: dict[str, Any]) -> dict[str, Any]:
    """A section without required keys, except `kind`, which tells sections apart."""
    changed: dict[str, Any] = _redirect(copy.deepcopy(section))
    required = [key for key in changed.pop("required", []) if key == "kind"]
    return {**changed, "required": required} if required else changed


def _redirect(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redirect(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redirect(item) for item in value]
    if isinstance(value, str) and value.startswith("#/$defs/"):
        return value.replace("#/$defs/", "#/$defs/Partial", 1)
    return value
