"""Rules on names: the last that matches holds, and one that matches nothing is refused."""

from __future__ import annotations

import pytest

from moegraph.compiled import compile
from moegraph.errors import SpecError
from moegraph.runtime.parameter_groups import GroupValues, parameter_groups
from moegraph.specs.schema import ParameterGroup as Rule
from tests.runtime.parameters import parameters
from tests.small_models import small_spec

MODEL = parameters()


def test_without_rules_every_trained_parameter_has_the_optimizers_values() -> None:
    groups = parameter_groups(MODEL, (), 0.1)
    assert set(groups) == {name for name, parameter in MODEL.items() if parameter.trained}
    assert set(groups.values()) == {GroupValues(1.0, 0.1)}


def test_the_last_matching_rule_holds_whole() -> None:
    rules = (Rule(match="layers.*", lr_scale=0.5, weight_decay=0.3), Rule(match="*norm*", weight_decay=0.0))
    groups = parameter_groups(MODEL, rules, 0.1)
    assert groups["layers.0.moe.w_up"] == GroupValues(0.5, 0.3)
    assert groups["layers.0.attention.norm.weight"] == GroupValues(1.0, 0.0)
    assert groups["head.weight"] == GroupValues(1.0, 0.1)


def test_a_rule_without_weight_decay_keeps_the_optimizers() -> None:
    assert parameter_groups(MODEL, (Rule(match="head.*", lr_scale=2.0),), 0.1)["head.weight"] == GroupValues(2.0, 0.1)


def test_patterns_match_whole_names_and_respect_case() -> None:
    for pattern in ("norm", "HEAD.*", "layers.0"):
        with pytest.raises(SpecError, match="matches no trained parameter"):
            parameter_groups(MODEL, (Rule(match=pattern),), 0.1)


def test_every_rule_that_matches_nothing_is_named_with_names_near_to_it() -> None:
    rules = (Rule(match="*.router.wieght"), Rule(match="*norm*"), Rule(match="layers.9.moe.w_up"))
    with pytest.raises(SpecError) as raised:
        parameter_groups(MODEL, rules, 0.1)
    first, second = raised.value.problems
    assert raised.value.exit_code == 2
    assert first.path == "train.optimizer.groups[0].match"
    assert first.nearest == "*router.weight"
    assert second.path == "train.optimizer.groups[2].match"
    assert second.nearest == "layers.*.moe.w_up"


@pytest.mark.parametrize("pattern", ["*.router.wieght", "*nrom*", "experts", "***x", "lm_head", "layers.0"])
def test_what_is_suggested_does_match(pattern: str) -> None:
    with pytest.raises(SpecError) as raised:
        parameter_groups(MODEL, (Rule(match=pattern),), 0.1)
    (problem,) = raised.value.problems
    assert problem.nearest is not None
    parameter_groups(MODEL, (Rule(match=problem.nearest),), 0.1)


def test_a_rule_for_a_buffer_says_that_the_optimizer_does_not_move_it() -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.moe\.select_bias is moved by its own rule"):
        parameter_groups(MODEL, (Rule(match="*select_bias"),), 0.1)


def test_compile_refuses_it_too_before_any_pass_runs() -> None:
    seen: list[str] = []
    spec = small_spec('train.optimizer.groups=[{match: "*.nrom.*", weight_decay: 0}]')
    with pytest.raises(SpecError, match="matches no trained parameter"):
        compile(spec, progress=seen.append)
    assert not seen
