"""config.json says everything that the class of transformers has a default for, and nothing that it does not know."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moegraph.export.architecture import choose
from moegraph.export.architectures import ARCHITECTURES
from tests.export.models import MODELS, spec_of

# Of older versions and of other loaders; a class takes them without naming them, and the logits tests see that it does.
TOLERATED = {"architectures", "model_type", "rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"}
ALSO = {
    "qwen3_moe": {"max_window_layers"},
    "ernie4_5_moe": {"attention_dropout"},
    "dots1": {"scoring_func", "topk_method"},
    "minimax_m2": {"rotary_dim", "scoring_func", "use_qk_norm", "use_routing_bias", "sliding_window"},
    "glm4_moe": {"num_nextn_predict_layers"},  # the name of num_mtp_layers in published files
    "granitemoe": {"shared_intermediate_size"},
}
UNSAID = {"bos_token_id", "eos_token_id", "pad_token_id"}  # said with the tokenizer


def config_class(model_class: str) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    return getattr(transformers, model_class).config_class


@pytest.mark.parametrize("name", MODELS)
def test_every_value_is_written_and_known(name: str) -> None:
    spec = spec_of(name)
    architecture = choose(spec.model, ARCHITECTURES)
    written = architecture.config(spec.model)
    theirs = config_class(architecture.model_class)
    assert (written["model_type"], written["architectures"]) == (theirs.model_type, [architecture.model_class])
    own = {each.name for each in dataclasses.fields(theirs)} - base_fields()
    own -= {each for each, other in theirs.attribute_map.items() if other in written}
    assert own - UNSAID - written.keys() == set()
    assert written.keys() - own - TOLERATED - base_fields() == ALSO.get(name, set())


def base_fields() -> set[str]:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    return {each.name for each in dataclasses.fields(transformers.PreTrainedConfig)}
