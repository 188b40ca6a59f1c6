"""AdamW equals torch's, is repeatable bit for bit, and treats an unvisited expert as its documentation says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.errors import RunError
from moegraph.runtime.initialise import initial_values
from moegraph.runtime.optimizer import AdamW
from moegraph.specs.schema import AdamW as Options
from moegraph.specs.schema import ParameterGroup
from tests.runtime.parameters import parameters

OPTIONS = Options(
    lr=1e-2,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    groups=(ParameterGroup(match="*norm*", weight_decay=0.0), ParameterGroup(match="*.router.*", lr_scale=0.5)),
)


def _optimizer(dtype: torch.dtype, options: Options = OPTIONS) -> AdamW:
    model = parameters()
    return AdamW(model, initial_values(model.values(), 0, dtype), options)


def _gradients(optimizer: AdamW, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = optimizer.masters.flat.dtype
    return {n: torch.randn(m.shape, generator=generator, dtype=dtype) for n, m in optimizer.masters.items()}


def test_ten_steps_equal_torch_adamw_in_float64() -> None:
    optimizer = _optimizer(torch.float64)
    reference = {name: master.clone().requires_grad_() for name, master in optimizer.masters.items()}

    def group(name: str) -> dict[str, object]:
        decay, scale = (0.0 if "norm" in name else 0.1), (0.5 if "router" in name else 1.0)
        return {"params": [reference[name]], "weight_decay": decay, "lr": 1e-2 * scale, "scale": scale}

    adamw = torch.optim.AdamW([group(n) for n in reference], betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(10):
        gradients = _gradients(optimizer, step)
        lr = 1e-2 / (step + 1)
        for each in adamw.param_groups:
            each["lr"] = lr * each["scale"]
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        adamw.step()
        optimizer.step(gradients, lr)
    assert optimizer.steps == 10
    for name, parameter in reference.items():
        torch.testing.assert_close(optimizer.masters[name], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_the_first_step_moves_by_the_learning_rate_against_the_gradient() -> None:
    optimizer = _optimizer(torch.float64, Options(weight_decay=0.1))
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    gradients = _gradients(optimizer, 0)
    optimizer.step(gradients, 1e-2)
    for name, master in optimizer.masters.items():
        g = gradients[name]
        expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(master, expected, rtol=1e-12, atol=1e-14)


def test_steps_are_bitwise_repeatable_whatever_the_number_of_threads() -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            optimizer = _optimizer(torch.float32)
            for step in range(3):
                optimizer.step(_gradients(optimizer, step), 1e-2)
            results.append(optimizer.masters.flat)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_a18_an_expert_without_tokens_decays_like_any_parameter() -> None:
    """Zero gradients for ten steps: v decays by β2, m by β1, and the weights follow the formula, decay included."""
    optimizer = _optimizer(torch.float64)
    name, expert, lr = "layers.0.moe.w_up", 2, 1e-2
    gradients = _gradients(optimizer, 0)
    optimizer.step(gradients, lr)
    w, m, v = (t[name][expert].clone() for t in (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq))
    for step in range(2, 12):
        gradients = _gradients(optimizer, step)
        gradients[name][expert] = 0.0
        optimizer.step(gradients, lr)
        m, v = 0.9 * m, 0.95 * v
        w = w * (1 - lr * 0.1) - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(optimizer.masters[name][expert], w, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(optimizer.exp_avg_sq[name][expert], v, rtol=1e-12, atol=0)


def test_a18_an_expert_that_never_had_a_token_shrinks_by_weight_decay_alone() -> None:
    optimizer = _optimizer(torch.float64)
    start = optimizer.masters["layers.1.moe.w_down"][3].clone()
    for step in range(10):
        gradients = _gradients(optimizer, step)
        gradients["layers.1.moe.w_down"][3] = 0.0
        optimizer.step(gradients, 1e-2)
    expected = start * (1 - 1e-2 * 0.1) ** 10
    torch.testing.assert_close(optimizer.masters["layers.1.moe.w_down"][3], expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("ep", [2, 4])
def test_a18_the_policy_is_the_same_however_experts_are_spread(ep: int) -> None:
    model, name = parameters(), "layers.0.moe.w_up"
    whole = _optimizer(torch.float64)
    size = 4 // ep
    small = {name: type(model[name])(name, (size, 12, 8), "expert", "normal", 0.02)}
    options = Options(weight_decay=0.1)
    shards = [AdamW(small, {name: whole.masters[name][r * size :][:size].clone()}, options) for r in range(ep)]
    for step in range(10):
        gradients = _gradients(whole, step)
        gradients[name][1] = 0.0
        whole.step(gradients, 1e-2)
        for rank, shard in enumerate(shards):
            shard.step({name: gradients[name][rank * size :][:size].contiguous()}, 1e-2)
    joined = torch.cat([shard.masters[name] for shard in shards])
    torch.testing.assert_close(joined, whole.masters[name], rtol=1e-13, atol=0)


def test_bf16_moments_are_rounded_where_they_are_kept_and_nowhere_else() -> None:
    """Against the formula in float32 with the moments rounded after each step; half the bytes."""
    model = parameters()
    narrow = AdamW(model, initial_values(model.values(), 0, torch.float32), Options(moments="bf16"))
    assert narrow.exp_avg.flat.dtype == narrow.exp_avg_sq.flat.dtype == torch.bfloat16
    name = next(iter(narrow.masters))
    w, m, v = narrow.masters[name].clone(), torch.zeros(()), torch.zeros(())
    for step in range(1, 6):
        gradients = _gradients(narrow, step)
        narrow.step(gradients, 1e-2)
        g = gradients[name]
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        m, v = m.bfloat16().float(), v.bfloat16().float()
        torch.testing.assert_close(narrow.masters[name], w, rtol=2e-5, atol=1e-7)
    assert torch.equal(narrow.exp_avg[name], m.bfloat16())


def test_compute_copies_are_the_rounded_masters() -> None:
    optimizer = _optimizer(torch.float32)
    copies = {name: torch.zeros(m.shape, dtype=torch.bfloat16) for name, m in optimizer.masters.items()}
    optimizer.step(_gradients(optimizer, 0), 1e-2)
    optimizer.write_compute_copies(copies)
    assert all(torch.equal(copies[name], m.bfloat16()) for name, m in optimizer.masters.items())


def test_small_updates_gather_in_the_masters_though_the_copies_cannot_show_them() -> None:
    """lr 1e-5 on weights of 1.0 is below what bfloat16 resolves; 400 such steps are not."""
    optimizer = _optimizer(torch.float32, Options(weight_decay=0.0))
    name = "layers.0.attention.norm.weight"
    ones = {n: torch.ones_like(m) for n, m in optimizer.masters.items()}
    for _ in range(400):
        optimizer.step(ones, 1e-5)
    torch.testing.assert_close(optimizer.masters[name], torch.full((8,), 0.996), rtol=0, atol=1e-4)


def test_buffers_are_left_alone() -> None:
    assert "layers.0.moe.select_bias" not in _optimizer(torch.float32).masters


def test_the_masters_are_copies_of_what_was_given() -> None:
    model = parameters()
    given = initial_values(model.values(), 0, torch.float32)
    before = given["head.weight"].clone()
    optimizer = AdamW(model, given, OPTIONS)
    optimizer.step(_gradients(optimizer, 0), 1e-2)
    assert torch.equal(given["head.weight"], before)


def test_a_run_that_loads_its_state_goes_on_bit_for_bit() -> None:
    straight, saved, resumed = (_optimizer(torch.float32) for _ in range(3))
    for step in range(3):
        straight.step(_gradients(straight, step), 1e-2)
        saved.step(_gradients(saved, step), 1e-2)
    resumed.load_state_dict({name: value.clone() for name, value in saved.state_dict().items()})
    for step in range(3, 6):
        straight.step(_gradients(straight, step), 1e-2)
        resumed.step(_gradients(resumed, step), 1e-2)
    assert resumed.steps == 6
    assert torch.equal(straight.masters.flat, resumed.masters.flat)
    assert torch.equal(straight.exp_avg_sq.flat, resumed.exp_avg_sq.flat)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    optimizer = _optimizer(torch.float32)
    state = {name: value.clone() + 1 for name, value in optimizer.state_dict().items()}
    before = optimizer.masters.flat.clone()
    lacking = {name: value for name, value in state.items() if name != "exp_avg.head.weight"}
    with pytest.raises(RunError, match=r"lacks exp_avg\.head\.weight"):
        optimizer.load_state_dict(lacking)
    with pytest.raises(RunError, match=r"unknown here, master\.extra"):
        optimizer.load_state_dict({**state, "master.extra": torch.zeros(1)})
    with pytest.raises(RunError, match=r"master\.head\.weight is torch\.float32 \(8, 16\)"):
        optimizer.load_state_dict({**state, "master.head.weight": state["master.head.weight"].t()})
    assert torch.equal(optimizer.masters.flat, before)
    assert optimizer.steps == 0
