"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from moegraph.errors import MoegraphError, UsageError

DEFAULT_SPEC = "moegraph.yaml"

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a value of the spec, such as train.steps=10. Repeatable."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, errors included.")]
PassFile = Annotated[
    list[Path] | None,
    typer.Option("--pass-file", metavar="FILE", help="Run a Python file that registers passes. Repeatable."),
]
SpecArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SPEC]", help=f"A spec file or a preset (presets/tiny.yaml). Default: ./{DEFAULT_SPEC}."),
]


def spec_name(given: str | None) -> str:
    """The spec that is meant: the one given, else ./moegraph.yaml. Raises UsageError where there is neither."""
    if given is not None:
        return given
    if not Path(DEFAULT_SPEC).exists():
        raise UsageError(
            f"no SPEC is given and there is no ./{DEFAULT_SPEC}: name one, such as presets/tiny.yaml, or write one "
            "with `moegraph init`"
        )
    return DEFAULT_SPEC


def load_pass_files(files: Iterable[Path] | None) -> dict[str, list[str]]:
    """Runs the files; returns the names of the passes that each one registered. Raises UsageError if one fails."""
    if not files:
        return {}
    from moegraph.passes import registry

    registered = {}
    for file in files:
        try:
            registered[str(file)] = registry.load_file(file)
        except MoegraphError:
            raise
        except (Exception, SystemExit) as error:
            text = f"--pass-file {file} fails when it is run: {type(error).__name__}: {error}"
            raise UsageError(f"{text}; --debug shows where") from error
    return registered


def refuse(**given: Any) -> None:
    """Raises UsageError for the first option that is set; keys are option names, `_` for `-`, and `because` says why
    it cannot be given here."""
    because = given.pop("because")
    for name, value in given.items():
        if value not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} {because}")
