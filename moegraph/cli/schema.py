"""`moegraph schema`: the JSON Schema of a spec."""

from __future__ import annotations

from typing import Annotated

import typer

from moegraph.cli.output import print_json


def schema_command(
    json: Annotated[bool, typer.Option("--json", help="As without it: a schema is JSON.")] = False,
) -> None:
    """Print the JSON Schema of a spec, for editors."""
    from moegraph.specs.schema_json import json_schema

    print_json(json_schema())
