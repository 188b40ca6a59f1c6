"""`moegraph init`: a commented spec to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegraph.cli.options import DEFAULT_SPEC, Json
from moegraph.cli.output import print_json
from moegraph.errors import UsageError


def init_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PATH", help="The file to write.")] = Path(
        DEFAULT_SPEC
    ),
    json: Json = False,
) -> None:
    """Write a commented spec with every setting there is."""
    from moegraph.specs.template import template

    text = template()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:  # x: never over a file that is there
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists already: name another file with -o") from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from None
    if json:
        print_json({"written": str(output)})
    else:
        name = "" if output == Path(DEFAULT_SPEC) else f" {output}"
        print(f"wrote {output}; `moegraph inspect{name}` shows its graphs, `moegraph train{name}` trains it")
