"""rms_norm and rope equal the textbook formulas, and their precision is float32 inside."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from moegraph import ops


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 4, 16), (0, 16)])
def test_rms_norm_equals_torch(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))


def test_rms_norm_in_bfloat16_rounds_once() -> None:
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    exact = ops.rms_norm(x.double(), weight.double(), 1e-6)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.float(), weight.float(), 1e-6).bfloat16())
    assert float(((ops.rms_norm(x, weight, 1e-6).double() - exact) / exact).abs().max()) <= 2**-8


def test_rms_norm_of_large_bfloat16_values_does_not_overflow() -> None:
    assert ops.rms_norm(torch.full((1, 8), 1e18).bfloat16(), torch.ones(8).bfloat16(), 1e-6).isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_each_pair_by_position_times_frequency(interleaved: bool) -> None:
    x = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 7, 100]], dtype=torch.int32)
    out = ops.rope(x, positions, theta=100.0, rotary_dim=6, interleaved=interleaved)
    for s, position in enumerate(positions[0].tolist()):
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
            angle = position * 100.0 ** (-2 * i / 6)
            turned = complex(x[0, s, 0, a], x[0, s, 0, b]) * complex(math.cos(angle), math.sin(angle))
            assert complex(out[0, s, 0, a], out[0, s, 0, b]) == pytest.approx(turned)
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert torch.equal(out[:, 0], x[:, 0])


def test_rope_scores_depend_on_distances_only() -> None:
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> float:
        turned = (ops.rope(x, torch.tensor([[at]]), theta=1e4) for x, at in ((q, at_q), (k, at_k)))
        return float(torch.einsum("bshd,bshd->", *turned))

    assert score(5, 2) == pytest.approx(score(1003, 1000))
    assert score(5, 2) != pytest.approx(score(5, 3))


def test_rope_of_long_contexts_is_exact_to_float32_in_bfloat16() -> None:
    x = torch.ones(1, 1, 1, 2).bfloat16()
    out = ops.rope(x, torch.tensor([[131071]], dtype=torch.int32), theta=1e4)
    angle = 131071.0
    want = torch.tensor([math.cos(angle) - math.sin(angle), math.sin(angle) + math.cos(angle)])
    torch.testing.assert_close(out.flatten().float(), want, rtol=2**-8, atol=2**-8)


def test_swiglu_gate_is_the_first_half() -> None:
    z = torch.randn(3, 8)
    torch.testing.assert_close(ops.swiglu(z), F.silu(z[:, :4]) * z[:, 4:])


def test_scale_rows_takes_a_column_as_well() -> None:
    y, weight = torch.randn(3, 4), torch.randn(3)
    assert torch.equal(ops.scale_rows(y, weight), ops.scale_rows(y, weight[:, None]))
    assert torch.equal(ops.scale_rows(y, weight), y * weight[:, None])


def test_router_logits_of_bfloat16_are_float32() -> None:
    x, weight = torch.randn(64, 128).bfloat16(), (torch.randn(8, 128) * 0.02).bfloat16()
    logits = ops.router_logits(x, weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), weight.float()))
    assert ops.router_logits(x.double(), weight.double()).dtype == torch.float64
