"""Contracts of passes: the order they imply, and what is said when they cannot hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from moegraph.errors import UsageError
from moegraph.passes import Pass, registry
from moegraph.passes.pipeline import order_passes, passes_for
from tests.passes.user_passes import pass_class, restored_registry
from tests.small_models import small_spec

LAYER = ["canonicalize", "balance-losses", "chunk-experts", "dispatch-experts", "fuse-experts", "split-pipeline"]
CASTS = ["cast-mxfp8", "cast-fp8"]
BUILT_IN = [
    *LAYER,
    *CASTS,
    "save-mxfp8",
    "cast-dispatch",
    "fold-casts",
    "recompute",
    "fold-decodes",
    "overlap-communication",
    "accumulate-gradients",
    "split-backward",
    "prepare-weights",
]


def made(name: str, level: str = "layer", **declared: Any) -> Pass:
    return pass_class(name, level, **declared)()


def ordered(*passes: Pass, after: dict[str, str] | None = None) -> list[str]:
    return [p.name for p in order_passes(passes, after)]


def test_the_built_in_passes_run_in_the_documented_order() -> None:
    assert registry.names() == BUILT_IN
    overlap = "overlap-communication: {mode: on, chunks: 2}"
    everything = (
        "layout={dp: 2, ep: 2, transport: padded}",
        f"passes={{fuse-experts: {{enabled: true}}, {overlap}}}",
    )
    low = (
        "precision.compute=bf16",
        "precision.mxfp8={experts: auto, saved: 'on', dispatch: auto}",
    )  # one format at a time
    found = [p.name for p in passes_for(small_spec(*everything, *low))]
    assert found == [name for name in BUILT_IN if name != "cast-fp8"]


def test_layer_passes_come_before_step_passes_and_registration_breaks_ties() -> None:
    assert ordered(made("s", "step"), made("b"), made("a")) == ["b", "a", "s"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_does_not_depend_on_how_the_passes_are_given(order: tuple[int, ...]) -> None:
    passes = [
        made("first", provides={"x"}),
        made("second", requires={"x"}, provides={"y"}),
        made("third", requires={"y"}),
    ]
    assert ordered(*(passes[i] for i in order)) == ["first", "second", "third"]


def test_a_pass_runs_before_one_that_provides_what_it_conflicts_with() -> None:
    assert ordered(made("fuse", provides={"fused"}), made("plain", conflicts={"fused"})) == ["plain", "fuse"]


def test_a_pass_that_needs_the_joint_graph_runs_before_the_cut_without_saying_so() -> None:
    with restored_registry():
        registry.register(pass_class("mine", "step", requires={"joint"}))
        names = [p.name for p in passes_for(small_spec())]
    assert names[-4:] == ["recompute", "accumulate-gradients", "mine", "split-backward"]


def test_after_places_a_pass() -> None:
    assert ordered(made("a"), made("b"), made("c"), after={"a": "c"}) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("passes", "after", "message"),
    [
        ([made("a", requires={"x"})], {}, "pass 'a' requires x, which no enabled pass provides"),
        ([made("a", requires={"joint"})], {}, "'a' works on layer graphs and requires the joint graph"),
        ([made("a"), made("a")], {}, "pass 'a' is listed twice"),
        ([made("a", requires={"y"}, provides={"x"}), made("b", requires={"x"}, provides={"y"})], {}, "a -> b -> a"),
        ([made("a", requires={"x"}, provides={"x"})], {}, "contradict each other: a -> a"),
        ([made("a", requires={"x"}), made("s", "step", provides={"x"})], {}, "contradict each other: a -> s -> a"),
        ([made("alpha"), made("b")], {"b": "alpah"}, "after 'alpah', which is not enabled; did you mean 'alpha'"),
        ([made("a")], {"a": "a"}, "a -> a"),
        ([made("a", conflicts={"x"}), made("b", provides={"x"})], {"a": "b"}, "a -> b -> a"),
    ],
)
def test_contracts_that_cannot_hold_are_told(passes: list[Pass], after: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        order_passes(passes, after)
    assert message in str(caught.value)


def test_a_requirement_that_was_switched_off_names_what_to_switch_on() -> None:
    with restored_registry():
        registry.register(pass_class("mine", requires={"auxiliary-losses"}))
        with pytest.raises(UsageError, match=r"switched off: balance-losses"):
            passes_for(small_spec("passes.balance-losses.enabled=false"))


def test_passes_switched_off_in_the_spec_do_not_run() -> None:
    spec = small_spec("passes.canonicalize.enabled=false", "passes.balance-losses.enabled=false")
    assert [p.name for p in passes_for(spec)] == [
        "dispatch-experts", "split-pipeline", "recompute", "accumulate-gradients", "split-backward",
    ]  # fmt: skip


def test_a_name_is_registered_once() -> None:
    with restored_registry():
        registry.register(pass_class("mine"))
        with pytest.raises(UsageError, match="'mine' is registered already"):
            registry.register(pass_class("mine"))


class NotAPass:
    name = "x"


class NotFrozen(Pass):
    name: ClassVar[str] = "not-frozen"


@dataclass(frozen=True)
class Unfinished(Pass):
    name: ClassVar[str] = "unfinished"
    level: ClassVar[Any] = "layer"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NotAPass, "NotAPass is not a pass"),
        (NotFrozen, "dataclass\\(frozen=True\\)"),
        (Unfinished, "has no apply"),
        (pass_class("../evil"), "small letters"),
        (pass_class("lower"), "other than lower and trace"),
        (pass_class("mine", "block"), "level is one of layer, step"),
        (pass_class("mine", tier="fast"), "tier is one of exact, close"),
        (pass_class("mine", tier="close"), "states its bound"),
        (pass_class("mine", tolerance=0.1), "exact means 0"),
    ],
)
def test_a_declaration_that_does_not_hold_together_is_refused(wrong: Any, message: str) -> None:
    with restored_registry(), pytest.raises(UsageError, match=message):
        registry.register(wrong)
    assert registry.names() == BUILT_IN
