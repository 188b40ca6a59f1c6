"""Whatever is done to a spec, loading ends with a Spec or a SpecError, and quickly."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from moegraph.errors import SpecError
from moegraph.specs import Spec, load_spec
from moegraph.specs.fields import walk
from moegraph.specs.resolved import resolved_yaml, spec_data
from moegraph.specs.sources import PRESETS
from tests.specs.small import write

TEXT = (PRESETS / "tiny.yaml").read_text()
SNIPPETS = ["{", "}", "[", "]", ":", "- ", "&a ", "*a", "!!str ", "<<: ", "'", '"', "|\n", ">\n", "#", "%", "\t", "\n"]
SNIPPETS += ["? ", "---\n", "...\n", "\\", "\x00", "é", "1e999", "~", ",", "@", "`"]
JUNK: list[Any] = [None, True, -1, 0, 2**70, 1e-300, float("nan"), float("inf"), 0.5, 3.0, "", "x" * 300, "on", "1e4"]
JUNK += [[], {}, [[]], [None], {"a": 1}, {"kind": "x"}, [1, "a"], "../x", "\x1b[0m"]


def loads_or_refuses(source: Path | dict[str, Any], overrides: list[str] | None = None) -> Spec | None:
    """The Spec, or None after a SpecError; anything else is a fault, and so is taking long."""
    start = time.perf_counter()
    spec, text = None, ""
    try:
        spec = load_spec(source, overrides or [])
    except SpecError as error:
        text = str(error)
    assert time.perf_counter() - start < 2
    assert text.replace("\n", "").isprintable()
    return spec


@pytest.mark.parametrize("seed", range(8))
def test_text_that_is_cut_and_mixed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        text = TEXT
        for _ in range(chance.randint(1, 4)):
            at, end = sorted(chance.choices(range(len(text) + 1), k=2))
            action = chance.randrange(4)
            if action == 0:
                text = text[:at] + chance.choice(SNIPPETS) + text[at:]
            elif action == 1:
                text = text[:at] + text[min(end, at + 20) :]
            elif action == 2:
                text = text[:at] + text[at : at + 30] + text[at:]
            else:
                text = text[:at] + chr(chance.randrange(1, 0x2FF)) + text[at + 1 :]
        loads_or_refuses(write(tmp_path, text))


@pytest.mark.parametrize("seed", range(8))
def test_values_that_are_replaced_dropped_and_renamed(seed: int) -> None:
    chance = random.Random(100 + seed)
    for _ in range(25):
        data = spec_data(load_spec("presets/tiny.yaml"))
        for _ in range(chance.randint(1, 3)):
            mutate(data, chance)
        loads_or_refuses(data)


def mutate(data: dict[str, Any], chance: random.Random) -> None:
    """One random change somewhere in nested mappings."""
    here = data
    while True:
        if not here:
            here["new"] = chance.choice(JUNK)
            return
        key = chance.choice(list(here))
        if isinstance(here[key], dict) and chance.random() < 0.8:
            here = here[key]
            continue
        action = chance.randrange(3)
        if action == 0:
            here[key] = chance.choice(JUNK)
        elif action == 1:
            del here[key]
        else:
            here[f"{key}{chance.choice('sx_')}"] = here.pop(key)
        return


@pytest.mark.parametrize("seed", range(4))
def test_overrides_of_anything_by_anything(tmp_path: Path, seed: int) -> None:
    chance = random.Random(200 + seed)
    paths = [path for path, _, _, _ in walk()]
    values = [
        "",
        "null",
        "0",
        "1",
        "2",
        "-1",
        ".nan",
        "1e9",
        "on",
        "true",
        "[]",
        "{}",
        "[1, 2]",
        "{kind: yarn}",
        "&a [*a]",
        "!!x 1",
        "a: b",
        "'x'",
    ]
    for _ in range(40):
        overrides = [f"{chance.choice(paths)}={chance.choice(values)}" for _ in range(chance.randint(1, 3))]
        spec = loads_or_refuses(Path("presets/tiny.yaml"), overrides)
        if spec is not None:
            assert load_spec(write(tmp_path, resolved_yaml(spec)), trusted=True) == spec
