"""Options of a user's pass: `passes.custom.NAME.options` of the spec become the fields of its dataclass.

Each value is checked against the field's type, as strictly as the rest of the spec: "4" is no number. Unknown and
missing options are refused, all problems at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from moegraph.errors import UsageError
from moegraph.specs.suggest import nearest_word

P = TypeVar("P")


def build_from_options(pass_class: type[P], name: str, options: Mapping[str, Any]) -> P:
    """An instance of a pass's dataclass; raises UsageError with every option that is unknown, missing or wrong."""
    fields = {field.name: field for field in dataclasses.fields(pass_class) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(pass_class)
    problems, values = [], {}
    for key, value in options.items():
        if key not in fields:
            near = nearest_word(key, fields)
            hint = f"did you mean {near!r}?" if near else f"its options are: {', '.join(fields) or 'none'}"
            problems.append(f"{key}: pass {name!r} has no such option; {hint}")
            continue
        try:
            values[key] = TypeAdapter(hints[key]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            problems.append(f"{key} = {value!r}: {why}")
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in options:
            problems.append(f"{key}: pass {name!r} needs this option")
    if problems:
        raise UsageError("\n".join(f"passes.custom.{name}.options.{problem}" for problem in problems))
    return pass_class(**values)
