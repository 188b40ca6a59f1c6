"""MXFP8 products in the interpreter against float64 products of the same quantised values.

Triton 3.6's interpreter has no `dot_scaled`: the fixture gives it one in numpy, which reads scales as the kernels hand
them over. So what is tested is what the kernels do with tiles and with the swizzled layout; that tensor cores agree is
for a Blackwell GPU to say (tests/kernels/test_scaled_cuda.py). A tile has 128 rows, like a block of scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from moegraph.kernels import mx_dgrad_swiglu, mx_rows_gemm, mx_up_swiglu
from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_format import mx_dequantize, mx_quantize
from moegraph.ops.mx_scales import swizzle_row_scales, swizzle_scales
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.quantize_cases import mismatch, mx_ragged
from tests.kernels.scaled_cases import grouped64, mx_quantised, mx_restored, poisoned

SMALL = Config(128, 128, 128, num_warps=4, num_stages=2)
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation(True, 1.7, 0.8)}
SIZES = [((0, 1, 127, 128, 129), 9), ((0, 0), 9), ((200, 0), 0)]
CASES = [pytest.param(ragged(*each), id=f"{each[0]}+{each[1]}") for each in SIZES]
BOUND = 6e-3


def _dequantised(data: Any, scale: Any) -> Any:
    values = torch.from_numpy(data.handle.data.copy()).view(torch.float8_e4m3fn).float().numpy()
    return values, np.exp2(scale.handle.data.astype(np.float32) - 127).repeat(32, 1)


def _dot_scaled(self: Any, a: Any, sa: Any, a_format: str, b: Any, sb: Any, b_format: str, acc: Any, *rest: Any) -> Any:
    """a [M, K] with scales [M, K/32], b [K, N] with scales [N, K/32], the accumulator [M, N]."""
    assert (a_format, b_format) == ("e4m3", "e4m3")
    (left, by_row), (right, by_column) = _dequantised(a, sa), _dequantised(b, sb)
    total = (left * by_row) @ (right * by_column.T) + acc.handle.data
    return self.tensor(interpreter.TensorHandle(total.astype(np.float32), acc.handle.dtype.scalar), acc.type)


@pytest.fixture(autouse=True)
def dot_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSemantic, "dot_scaled", _dot_scaled)


def operands(case: Ragged, k: int, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """(the arguments of a kernel, NaN in what does not exist; their product in float64)."""
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = mx_quantised(torch.randn(case.rows, k) * torch.exp(torch.randn(case.rows, 1)))
    weight, weight_scale = mx_quantised(torch.randn(len(case.sizes), n, k) * torch.exp(torch.randn(n, k)))
    want = grouped64(mx_restored(rows, row_scale), mx_restored(weight, weight_scale), case)
    scales = swizzle_row_scales(poisoned(row_scale, real), case.offsets)
    scales[128 * sum(-(-size // 128) for size in case.sizes) :] = 255  # blocks of no expert
    made = {
        "rows": poisoned(rows, real),
        "row_scale": scales,
        "weight": weight,
        "weight_scale": swizzle_scales(weight_scale),
    }
    return {**made, "offsets": case.offsets}, want


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "n"), [(128, 128), (288, 144)])
@pytest.mark.parametrize(("parts", "block_n", "full"), [(1, 128, False), (2, 256, True)])
def test_the_product(case: Ragged, k: int, n: int, parts: int, block_n: int, full: bool) -> None:
    p, want = operands(case, k, n)
    options: dict[str, Any] = {"config": replace(SMALL, block_n=block_n, parts=parts)}
    real = case.rows - case.tail
    if full:
        options |= {"bias": torch.randn(len(case.sizes), n).bfloat16(), "row_weight": torch.rand(case.rows)}
        want[:real] += options["bias"][case.expert_of_row].double()
        want *= options["row_weight"].double()[:, None]
    have = mx_rows_gemm.mx_grouped_mm(*p.values(), **options)
    assert relative_error(have, want) < BOUND
    assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "biased", "parts"), [("swiglu", False, 1), ("clamped", True, 2)])
def test_the_up_projection_and_its_activation(case: Ragged, name: str, biased: bool, parts: int) -> None:
    (p, want), activation, real = operands(case, 160, 256), ACTIVATIONS[name], case.rows - case.tail
    bias = torch.randn(len(case.sizes), 256).bfloat16() if biased else None
    config = replace(SMALL, block_n=256, parts=parts)
    z, act = mx_up_swiglu.mx_up_swiglu(*p.values(), bias=bias, activation=activation, config=config)
    if bias is not None:
        want[:real] += bias[case.expert_of_row].double()
    assert relative_error(z, want) < BOUND
    limit = activation.limit if activation.clamped else 0.0
    assert relative_error(act, activation_slopes(z.double(), activation.alpha, limit)[0]) < BOUND
    assert not z[real:].any()
    assert not act[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "kind"), [("swiglu", "2"), ("clamped", "separate")])
def test_the_gradient_through_down_and_activation(case: Ragged, name: str, kind: str) -> None:
    (p, want), activation, real = operands(case, 160, 128), ACTIVATIONS[name], case.rows - case.tail
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, parts=int(kind))
    z, row_weight = torch.randn(case.rows, 256).bfloat16(), torch.rand(case.rows)
    tensors = (*list(p.values())[:4], poisoned(z, real), poisoned(row_weight, real), case.offsets)
    have = mx_dgrad_swiglu.mx_dgrad_swiglu(*tensors, activation=activation, config=config)
    limit = activation.limit if activation.clamped else 0.0
    expected = gated_gradient(want, z.double(), row_weight.double(), case.offsets, activation.alpha, limit)
    for mine, true in zip(have, expected, strict=True):
        assert relative_error(mine, true) < 2 * BOUND
        assert not mine[real:].any()


QUANTISED = [pytest.param(ragged(*each), id=f"{each[0]}+{each[1]}") for each in [((0, 1, 130), 9), ((0, 0), 9)]]


def same(have: Tensor, want: Tensor, what: str) -> None:
    assert mismatch(have, want) == "", what


@pytest.mark.parametrize("case", QUANTISED)
@pytest.mark.parametrize(("name", "biased"), [("swiglu", False), ("clamped", True)])
def test_an_activation_is_quantised_as_it_would_have_been_stored(case: Ragged, name: str, biased: bool) -> None:
    """A row of NaN among them."""
    p, _ = operands(case, 160, 512)
    p["rows"].view(torch.uint8)[0, 3] = 0x7F
    bias = torch.randn(len(case.sizes), 512).bfloat16() if biased else None
    options: dict[str, Any] = {"bias": bias, "activation": ACTIVATIONS[name]}
    options["config"] = replace(SMALL, block_n=256, parts=2)
    have_z, data, scale = mx_up_swiglu.mx_up_swiglu_quantized(*p.values(), **options)
    z, act = mx_up_swiglu.mx_up_swiglu(*p.values(), **options)
    same(have_z, z, "z")
    want, want_scale, *_ = mx_ragged(act, case.offsets, True)
    same(data, want, "data")
    same(scale, want_scale, "scale")


@pytest.mark.parametrize(
    ("sizes", "f", "kind"), [((0, 1, 130), 384, "8"), ((0, 0), 384, "8"), ((2, 130), 128, "separate")]
)
def test_a_gradient_is_quantised_as_it_is_stored(sizes: tuple[int, ...], f: int, kind: str) -> None:
    """Of 384 columns the second tile of 256 has half that do not exist: they must not reach the scales of `up`."""
    case = ragged(sizes, 9)
    (p, _), real = operands(case, 160, f), case.rows - case.tail
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, parts=int(kind))
    config = replace(config, block_n=256 if f == 384 else 128)
    z, row_weight = torch.randn(case.rows, 2 * f).bfloat16(), torch.rand(case.rows)
    z[:1, 40] = float("nan")
    tensors = (*list(p.values())[:4], poisoned(z, real), poisoned(row_weight, real), case.offsets)
    dz, act, ds, data, scale = mx_dgrad_swiglu.mx_dgrad_swiglu_quantized(*tensors, config=config)
    plain = mx_dgrad_swiglu.mx_dgrad_swiglu(*tensors, config=replace(config, parts=min(config.parts, 4)))
    same(dz, plain[0], "dz")
    same(act, plain[1], "act")
    assert relative_error(ds[1:], plain[2][1:]) < 1e-6  # eight slices are added up in another order than four
    want, want_scale, *_ = mx_ragged(dz, case.offsets, True)
    same(data, want, "data")
    same(scale, want_scale, "scale")


def test_a_pre_activation_is_saved_as_it_would_have_been_stored() -> None:
    case = ragged((0, 1, 130), 9)
    p, _ = operands(case, 160, 512)
    options: dict[str, Any] = {"bias": torch.randn(3, 512).bfloat16(), "activation": ACTIVATIONS["clamped"]}
    options["config"] = replace(SMALL, block_n=256, parts=2)
    z, *act = mx_up_swiglu.mx_up_swiglu_quantized(*p.values(), **options)
    have = mx_up_swiglu.mx_up_swiglu_saved(*p.values(), **options)
    for what, a, b in zip(("z", "its scale", "data", "scale"), have, (*mx_quantize(z), *act), strict=True):
        same(a, b, what)


@pytest.mark.parametrize(("sizes", "kind"), [((0, 1, 130), "4"), ((1, 3), "separate")])
def test_a_saved_pre_activation_gives_the_gradients_of_the_restored_one(sizes: tuple[int, ...], kind: str) -> None:
    case, f = ragged(sizes, 9), 256
    (p, _), real = operands(case, 160, f), case.rows - case.tail
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, parts=int(kind))
    z, row_weight = mx_quantize(torch.randn(case.rows, 2 * f)), torch.rand(case.rows)
    rest = (poisoned(row_weight, real), case.offsets)
    products = list(p.values())[:4]
    want = mx_dgrad_swiglu.mx_dgrad_swiglu_quantized(*products, mx_dequantize(*z), *rest, config=config)
    saved = (poisoned(z[0], real), poisoned(z[1], real))
    have = mx_dgrad_swiglu.mx_dgrad_swiglu_saved(*products, *saved, *rest, config=config)
    for what, a, b in zip(("dz", "act", "ds", "data", "scale"), have, want, strict=True):
        same(a, b, what)
