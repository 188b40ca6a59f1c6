"""Every architecture: what is written, transformers loads whole, and it computes the same logits as our graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.export.architecture import choose
from moegraph.export.architectures import ARCHITECTURES
from moegraph.export.model_directory import write_model
from tests.export.models import MODELS, load_theirs, our_logits, random_values, some_tokens, spec_of
from tests.small_models import relative_error


def reader(values: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    return lambda name, start, count: values[name].reshape(-1)[start : start + count].clone()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_our_logits_from_what_is_written(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    architecture = choose(spec.model, ARCHITECTURES)
    assert architecture.name == name
    values, tokens = random_values(spec), some_tokens()
    write_model(tmp_path, spec.model, architecture, reader(values), "float32")
    theirs = load_theirs(tmp_path)
    assert type(theirs).__name__ == architecture.model_class
    with torch.no_grad():
        found = theirs(input_ids=tokens).logits.flatten(0, 1)
    assert relative_error(found, our_logits(spec, values, tokens)) < 1e-5


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {each.name for each in ARCHITECTURES} == set(MODELS)
