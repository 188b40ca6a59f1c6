"""Which published architecture a model is: the first of the table whose rules all hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moegraph.errors import ExportError, UsageError
from moegraph.export.canonical import canonical
from moegraph.export.names import Names, Published, published_tensors
from moegraph.export.rules import REQUIRED, Rules, misfits
from moegraph.specs.schema.model import Model

QWEN_NAMES = Names()  # what most of them call things


@dataclass(frozen=True)
class Architecture:
    """A published architecture: its `model_type`, its class in transformers, which models it computes (`rules`), what
    config.json says of them, and what it calls their tensors. `note` and, where a tokenizer is written too,
    `tokenizer_note`: what the user should know of a model that is written so, if anything."""

    name: str
    model_class: str
    rules: Rules
    settings: Callable[[Model], dict[str, Any]]
    names: Names = QWEN_NAMES
    note: Callable[[Model], str] = lambda model: ""
    tokenizer_note: str = ""

    @property
    def experts(self) -> bool:
        """Whether it has experts."""
        return self.rules["moe"] is REQUIRED

    def misfits(self, model: Model) -> list[str]:
        """What of a model it does not compute, a sentence each; nothing if it is this architecture."""
        return misfits(canonical(model), self.rules)

    def config(self, model: Model) -> dict[str, Any]:
        """config.json without dtype and token ids. The model has to fit."""
        said = {"architectures": [self.model_class], "model_type": self.name}
        return {**said, **self.settings(canonical(model))}

    def tensors(self, model: Model) -> Iterator[Published]:
        """The tensors of its checkpoint."""
        return published_tensors(model, self.names)


def choose(model: Model, table: Sequence[Architecture], name: str | None = None) -> Architecture:
    """The first architecture of the table that computes exactly this model, or the one called `name`.

    Raises ExportError naming what does not fit: of each architecture the first, the nearest one before the others, or
    everything of the one that was named; UsageError where the table has none of that name.
    """
    if name is not None:
        return _named(model, table, name)
    found = [(each, each.misfits(model)) for each in table]
    for architecture, problems in found:
        if not problems:
            return architecture
    near = [each for each in found if each[0].experts == (model.moe is not None)]
    near.sort(key=lambda each: len(each[1]))
    lines = [f"    {each.name}: {problems[0]}{_more(len(problems) - 1)}" for each, problems in near]
    text = "\n".join(["none of the published architectures that can be written computes this model:", *lines])
    raise ExportError(f"{text}\n    --architecture NAME lists all that does not fit one of them")


def _named(model: Model, table: Sequence[Architecture], name: str) -> Architecture:
    for architecture in table:
        if architecture.name == name:
            problems = architecture.misfits(model)
            if problems:
                lines = "\n".join(f"    {each}" for each in problems)
                raise ExportError(f"this model is not {name}:\n{lines}")
            return architecture
    known = ", ".join(each.name for each in table)
    raise UsageError(f"--architecture {name}: there is no such one; known: {known}")


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""
