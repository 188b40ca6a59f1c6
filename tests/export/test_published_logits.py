"""Every architecture: what is written, transformers loads whole, and it computes the same logits as our graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.export.architecture import Architecture, choose
from moegraph.export.architectures import ARCHITECTURES
from moegraph.export.model_directory import write_model
from moegraph.specs import Spec
from tests.export.models import MODELS, WIDTH, load_theirs, our_logits, random_values, reader, some_tokens, spec_of
from tests.small_models import relative_error


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


def their_logits(
    folder: Path, spec: Spec, architecture: Architecture, values: dict[str, Tensor], tokens: Tensor
) -> Tensor:
    folder.mkdir()
    write_model(folder, spec.model, architecture, reader(values), "float32")
    with torch.no_grad():
        found: Tensor = load_theirs(folder)(input_ids=tokens).logits.flatten(0, 1)
    return found


@pytest.mark.parametrize("d_ff", [WIDTH // 2, WIDTH, 20])
@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "gpt_oss"])  # the three ways in which experts are stored
def test_a40_experts_are_not_transposed_where_shapes_cannot_tell(name: str, d_ff: int, tmp_path: Path) -> None:
    spec = spec_of(name, f"model.moe.d_ff={d_ff}")
    values, tokens = random_values(spec), some_tokens()
    ours = our_logits(spec, values, tokens)
    right = choose(spec.model, ARCHITECTURES)
    assert relative_error(their_logits(tmp_path / "right", spec, right, values, tokens), ours) < 1e-5
    square = "layers.0.moe.w_up" if 2 * d_ff == WIDTH else "layers.0.moe.w_down"
    if values[square].shape[1] == values[square].shape[2]:
        turned = {**values, square: values[square].transpose(1, 2)}
        assert relative_error(their_logits(tmp_path / "turned", spec, right, turned, tokens), ours) > 1e-3


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {each.name for each in ARCHITECTURES} == set(MODELS)
