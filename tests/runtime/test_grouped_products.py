"""The grouped products of a spec, read from its step graphs, and what a card makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moegraph
from moegraph.kernels.chips import Card
from moegraph.kernels.shapes import Problem, block_problems
from moegraph.kernels.tuning import forget_choices, user_table
from moegraph.runtime.grouped_products import Product, grouped_products, resolve
from tests.kernels.tables import entry, write

HOPPER, BLACKWELL = Card("Test Hopper", 90), Card("Test Blackwell", 103)
SMALL = ["model.num_layers=2", "precision.compute=bf16"]
BLOCK = block_problems(tokens=4096, d_model=128, d_ff=128, num_experts=8, top_k=2)


def products(*overrides: str) -> list[Product]:
    spec = moegraph.load_spec("presets/tiny.yaml", overrides=[*SMALL, *overrides])
    return grouped_products(moegraph.compile(spec).program)


@pytest.fixture(scope="module")
def fused() -> list[Product]:
    return products("passes.fuse-experts.enabled=true")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_choices()
    yield
    forget_choices()


def test_separate_experts_are_six_products() -> None:
    found = products()
    names = ("up", "down", "up_dgrad", "down_dgrad", "up_wgrad", "down_wgrad")
    assert sorted(map(str, (each.problem for each in found))) == sorted(str(BLOCK[name]) for name in names)
    assert {(each.kind, each.instances) for each in found} == {("moe", "layers.1")}
    assert [each.graph for each in found] == ["forward"] * 2 + ["backward"] * 4


def test_fused_experts_are_those_of_a_block(fused: list[Product]) -> None:
    names = ("up_swiglu", "down", "dgrad_swiglu", "up_dgrad", "up_wgrad", "down_wgrad")
    assert sorted(map(str, (each.problem for each in fused))) == sorted(str(BLOCK[name]) for name in names)


def test_the_clamped_activation_has_its_gradient_behind_the_plain_product() -> None:
    clamped = products("passes.fuse-experts.enabled=true", "model.moe.activation={kind: swiglu_clamped}")
    names = ("up_swiglu", "down", "down_dgrad", "up_dgrad", "up_wgrad", "down_wgrad")
    assert sorted(map(str, (each.problem for each in clamped))) == sorted(str(BLOCK[name]) for name in names)


def test_on_hopper_every_product_has_a_configuration(fused: list[Product]) -> None:
    for each in fused:
        resolved = resolve(each, HOPPER)
        assert (resolved.problem, resolved.backend) == (each.problem, "triton")
        assert resolved.choice is not None
        assert resolved.choice.source == "rule"


def test_where_the_fused_kernels_do_not_run_the_separate_products_are_said(fused: list[Product]) -> None:
    found = [resolve(each, BLACKWELL) for each in fused]
    assert all((each.backend, each.choice) == ("_grouped_mm", None) for each in found)
    assert [each.problem for each in found][:3] == [BLOCK["up"], BLOCK["down"], BLOCK["down_dgrad"]]


def test_the_down_product_of_fused_experts_follows_the_up_product(fused: list[Product]) -> None:
    down = next(each for each in fused if each.problem == BLOCK["down"])
    slower = entry(BLOCK["down"], backend="_grouped_mm", against={"_grouped_mm": 1.0})
    write(user_table(HOPPER.name), [slower], card=HOPPER)
    resolved = resolve(down, HOPPER)
    assert (resolved.backend, resolved.reason) == (
        "triton",
        "bias and row weight in its epilogue, so it runs where up_swiglu does",
    )
    assert resolved.choice is not None
    assert resolved.choice.source == "your table"


def test_a_problem_keeps_the_number_of_tokens_that_are_gathered(fused: list[Product]) -> None:
    assert fused[0].problem == Problem("up_swiglu", torch.bfloat16, 128, 128, 8192, 8, 4096)


def test_weight_gradients_of_payloads_are_listed_with_where_elements_become_bf16() -> None:
    spec = moegraph.load_spec(
        "presets/tiny.yaml",
        overrides=[
            *SMALL, "model.d_model=512", "model.moe.d_ff=256", "passes.fuse-experts.enabled=true",
            "layout={dp: 2, ep: 2, transport: direct}", "precision.mxfp8={experts: 'on', dispatch: 'on'}",
        ],
    )  # fmt: skip
    found = {each.payloads: each for each in grouped_products(moegraph.compile(spec).program) if any(each.payloads)}
    assert set(found) == {(True, False), (False, True)}
    down, up = found[True, False], found[False, True]
    assert [(each.problem.n, each.problem.k, each.problem.dtype) for each in (down, up)] == [
        (512, 256, torch.bfloat16),
        (512, 512, torch.bfloat16),
    ]
    loads = resolve(down, HOPPER)
    assert loads.backend == "triton"
    assert loads.reason.startswith("dequantises as it loads")
    assert loads.choice is not None
    assert loads.choice.config.block_m == 128
    assert resolve(down, BLACKWELL).backend == "_grouped_mm"
