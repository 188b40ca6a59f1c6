"""Initial values depend on seed, name and global expert index only."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch

from moegraph.graph.program import Parameter
from moegraph.runtime.initialise import initial_value, initial_values
from tests.runtime.parameters import parameters


def test_a42_all_layers_and_experts_start_different() -> None:
    values = initial_values(parameters(layers=4).values(), 0, torch.float32)
    for leaf in ("attention.q.weight", "moe.router.weight", "moe.w_up", "moe.w_down"):
        for i, j in itertools.combinations(range(4), 2):
            assert (values[f"layers.{i}.{leaf}"] != values[f"layers.{j}.{leaf}"]).float().mean() > 0.99
    for one, other in itertools.combinations(values["layers.0.moe.w_up"], 2):
        assert (one != other).float().mean() > 0.99
    assert not torch.equal(values["embedding.weight"], values["head.weight"])


def test_a42_values_do_not_depend_on_order_subset_or_the_global_generator() -> None:
    everything = list(parameters(layers=4).values())
    torch.manual_seed(1)
    whole = initial_values(everything, 7, torch.float32)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    stage = initial_values(everything[:-9:-1], 7, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(stage) == 8
    assert all(torch.equal(stage[name], whole[name]) for name in stage)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_ranks_experts_are_rows_of_the_whole(ep: int) -> None:
    parameter = parameters()["layers.1.moe.w_up"]
    whole = initial_value(parameter, 3, torch.float32)
    size = 4 // ep
    shards = [initial_value(parameter, 3, torch.float32, range(r * size, (r + 1) * size)) for r in range(ep)]
    assert torch.equal(torch.cat(shards), whole)


def test_a_dense_parameter_has_no_experts_to_pick() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.q\.weight has no expert axis"):
        initial_value(parameters()["layers.0.attention.q.weight"], 0, torch.float32, range(2))


def test_the_number_of_threads_changes_nothing() -> None:
    parameter = Parameter("w", (300, 1001), "matrix", "normal", 0.02)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = initial_value(parameter, 0, torch.float32)
        torch.set_num_threads(4)
        assert torch.equal(initial_value(parameter, 0, torch.float32), one)
    finally:
        torch.set_num_threads(threads)


def test_another_seed_gives_other_values() -> None:
    one, other = (initial_values(parameters().values(), seed, torch.float32) for seed in (0, 2**63 - 1))
    assert not torch.equal(one["layers.0.moe.w_up"], other["layers.0.moe.w_up"])


def test_float64_starts_where_float32_does() -> None:
    narrow, wide = (initial_values(parameters().values(), 0, dtype) for dtype in (torch.float32, torch.float64))
    assert all(torch.equal(narrow[name].double(), wide[name]) for name in narrow)
    assert all(value.dtype == torch.float64 for value in wide.values())


def test_normal_values_are_cut_at_three_deviations() -> None:
    value = initial_value(Parameter("w", (1000, 1000), "matrix", "normal", 0.02), 0, torch.float64) / 0.02
    assert 2.99 < value.abs().max() <= 3.0 + 1e-6
    # Variance of a normal distribution cut at ±3: 1 - 2·3·φ(3) / (2Φ(3) - 1).
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    variance = 1 - 6 * density / math.erf(3 / math.sqrt(2))
    assert abs(value.mean()) < 4e-3
    assert abs(value.var() - variance) < 6e-3
    inside = math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2))
    assert abs((value.abs() < 1).double().mean() - inside) < 2e-3


def test_norms_start_at_one_and_biases_at_zero() -> None:
    values = initial_values(parameters().values(), 0, torch.float32)
    assert torch.equal(values["layers.0.attention.norm.weight"], torch.ones(8))
    assert torch.equal(values["layers.0.attention.q.bias"], torch.zeros(8))
    assert torch.equal(values["layers.0.moe.select_bias"], torch.zeros(4))


def test_the_seed_of_a_tensor_is_the_documented_hash() -> None:
    """A checkpoint's provenance depends on it: changing how seeds are made must be deliberate."""
    digest = hashlib.sha256(b"5|layers.0.moe.w_up|2").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    edge = math.erf(3 / math.sqrt(2))
    uniform = torch.empty(12, 8).uniform_(-edge, edge, generator=generator)
    value = initial_value(parameters()["layers.0.moe.w_up"], 5, torch.float32)[2]
    torch.testing.assert_close(value, uniform.erfinv() * 0.02 * math.sqrt(2), rtol=1e-6, atol=0)
