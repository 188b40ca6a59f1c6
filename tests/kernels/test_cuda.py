"""Kernels on a GPU, through the operators: against float64, tile by tile, at every awkward group size; reproducible;
without a host synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from tests.kernels.cases import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZES = [(0, 1, 127, 128, 129, 300), (0, 0, 900, 0), (64,) * 8]
WIDTHS = [(256, 512), (272, 144), (2048, 1024)]
BOUND = {torch.bfloat16: 6e-3, torch.float32: 1e-5}


def problem(sizes: tuple[int, ...], d: int, f: int, dtype: torch.dtype, tail: int = 0) -> dict[str, Tensor]:
    """One choice per token (K = 1), rows in expert order, `tail` dropped choices at the end."""
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    ids = torch.cat([ids, torch.full((tail,), -1)])[torch.randperm(len(ids) + tail)].int().cuda()
    order, inverse, offsets = ops.sort_by_expert(ids[:, None], len(sizes))
    made = {
        "x": torch.randn(ids.shape[0], d),
        "row_weight": torch.rand(ids.shape[0]),
        "w_up": torch.randn(len(sizes), 2 * f, d) * d**-0.5,
        "w_down": torch.randn(len(sizes), d, f) * f**-0.5,
        "grad": torch.randn(ids.shape[0], d),
    }
    placed = {n: t.cuda().to(torch.float32 if n == "row_weight" else dtype) for n, t in made.items()}
    return {**placed, "order": order, "inverse": inverse, "offsets": offsets}


def run(p: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output and every gradient of permute … combine as one operator."""
    names = ("x", "row_weight", "w_up", "w_down")
    leaves = {n: (p[n] if dtype is None else p[n].to(dtype)).detach().requires_grad_() for n in names}
    metadata = (p["order"], p["inverse"], p["offsets"])
    y, _ = ops.expert_ffn(leaves["x"], *metadata, leaves["row_weight"], leaves["w_up"], leaves["w_down"], top_k=1)
    out = ops.combine(y, *metadata, top_k=1)
    out.backward(p["grad"].to(out.dtype))
    return {"out": out.detach(), **{n: leaf.grad for n, leaf in leaves.items()}}  # type: ignore[dict-item]


def worst_tile(have: Tensor, want: Tensor) -> float:
    """The largest relative error over blocks of 64 rows, against the mean size of a block: a wrong tile cannot hide."""
    have, want = have.double().flatten(0, -2), want.double().flatten(0, -2)
    scale = want.norm() / max(want.shape[0] / 64, 1) ** 0.5
    blocks = zip(have.split(64), want.split(64), strict=True)
    return max(float((a - b).norm() / scale) for a, b in blocks)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize("sizes", SIZES)
def test_experts_and_their_gradients_equal_float64(sizes: tuple[int, ...], d: int, f: int, dtype: torch.dtype) -> None:
    p = problem(sizes, d, f, dtype, tail=37)
    have, want = run(p), run(p, torch.float64)
    for name, value in have.items():
        assert relative_error(value, want[name]) < BOUND[dtype], name
        if value.dim() > 1:
            assert worst_tile(value, want[name]) < 4 * BOUND[dtype], name
    for e, size in enumerate(sizes):
        if size == 0:
            assert (have["w_up"][e] == 0).all()
            assert (have["w_down"][e] == 0).all()


def test_two_runs_are_bitwise_equal() -> None:
    p = problem((0, 1, 127, 700, 129, 300), 512, 256, torch.bfloat16)
    first, second = run(p), run(p)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_nothing_waits_for_the_device() -> None:
    p = problem((100, 200, 0, 300), 256, 128, torch.bfloat16)
    run(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(p)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_that_do_not_exist_are_not_felt() -> None:
    p = problem((5, 0, 300), 256, 128, torch.bfloat16, tail=200)
    rows = ops.permute(p["x"], p["order"], p["inverse"], p["offsets"], top_k=1)
    end = int(p["offsets"][-1])
    assert (rows[end:] == 0).all()
    poisoned = rows.clone()
    poisoned[end:] = float("nan")
    out = ops.grouped_mm(poisoned, p["w_up"], p["offsets"])
    assert torch.equal(out, ops.grouped_mm(rows, p["w_up"], p["offsets"]))
    wgrad = ops.grouped_mm_wgrad(out, poisoned, p["offsets"])
    assert torch.isfinite(wgrad).all()
    z = torch.full_like(out, float("nan"))
    z[:end] = out[:end]
    grad = torch.full((rows.shape[0], 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    grad[:end] = 1.0
    for value in ops.expert_ffn_dgrad(grad, z, p["row_weight"], p["w_down"], p["offsets"], 0.0, 0.0):
        assert torch.isfinite(value).all()
        assert (value[end:] == 0).all()


def test_a34_the_last_expert_of_a_stack_past_two_billion_elements_is_right() -> None:
    experts, d, f = 64, 4096, 8704  # E · N · K = 2.28e9 > 2³¹
    weight = torch.zeros(experts, f, d, device="cuda", dtype=torch.bfloat16)
    weight[-1].normal_()
    rows = torch.randn(130, d, device="cuda", dtype=torch.bfloat16)
    offsets = torch.zeros(experts, dtype=torch.int32, device="cuda")
    offsets[-1] = 130
    have = ops.grouped_mm(rows, weight, offsets)
    assert relative_error(have, rows.float() @ weight[-1].float().t()) < 6e-3
    grad = ops.grouped_mm_wgrad(have, rows, offsets)
    assert relative_error(grad[-1], have.float().t() @ rows.float()) < 6e-3
    assert not grad[:-1].any()


@pytest.mark.parametrize("sizes", SIZES)
def test_weight_gradients_are_added_in_fp32_where_the_flag_says_so(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows = sum(sizes)
    grad, x = (torch.randn(rows + 7, width, device="cuda").bfloat16() for width in (272, 512))
    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int().cuda()
    held = torch.randn(len(sizes), 272, 512, device="cuda")
    exact = torch.zeros_like(held, dtype=torch.float64)
    for e, end in enumerate(offsets.tolist()):
        run = slice(end - sizes[e], end)
        exact[e] = grad[run].double().T @ x[run].double()
    into = torch.full_like(held, torch.nan)
    ops.grouped_mm_wgrad_add(into, torch.tensor([0], dtype=torch.int32), grad, x, offsets)
    assert relative_error(into, exact) < 1e-6  # fp32 sums of exact products of bf16
    first = into.clone()
    into = held.clone()
    for _ in range(2):
        ops.grouped_mm_wgrad_add(into, torch.tensor([1], dtype=torch.int32), grad, x, offsets)
    assert torch.equal(into, held + first + first)
    assert all((first[e] == 0).all() for e, size in enumerate(sizes) if size == 0)
