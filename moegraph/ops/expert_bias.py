"""Biases: one per expert, added to the rows that visit it, and one for all tokens.

Rows are sorted by expert; `offsets` [E] (int32, on the device) are the inclusive ends of the experts' runs. Rows past
`offsets[-1]` do not exist: never read, written as zeros. The addition is plain functional aten, which Inductor fuses
with the activation or weighting that follows; the gradient of the bias is an operator of its own, so that a schedule
can put it off. It is summed in float32 (float64 for float64) in a fixed order, on CUDA by a Triton kernel that never
waits for the host (`kernels/bias_grad.py`), and is exactly zero for an expert without rows.

Legend: R routed rows, E experts, N width, T tokens, D model width.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


@torch.library.custom_op("moegraph::expert_bias_wgrad", mutates_args=())
def expert_bias_wgrad(grad: Tensor, offsets: Tensor) -> Tensor:
    """Bias gradient: the sum of grad [R, N] over each expert's run → [E, N] in grad's dtype; empty runs zero."""
    if grad.device.type == "cuda":
        from moegraph.kernels import bias_grad

        return bias_grad.bias_grad(grad.contiguous(), offsets)
    wide = accumulate_dtype(grad.dtype)
    total = grad.new_zeros(offsets.shape[0], grad.shape[1], dtype=wide)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.sum(grad[start:end], 0, dtype=wide, out=total[expert])
        start = end
    return total if wide == grad.dtype else total.to(grad.dtype)


@expert_bias_wgrad.register_fake
def _(grad: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(offsets.shape[0], grad.shape[1])


def expert_of_row(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(the expert of each of R = `rows` rows [R] int32, whether the row exists [R] bool); the last expert if not."""
    index = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.searchsorted(offsets, index, right=True, out_int32=True)
    return expert.clamp(max=offsets.shape[0] - 1), index < offsets[-1]


class _AddExpertBias(torch.autograd.Function):
    """Saves the offsets only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        expert, real = expert_of_row(rows.shape[0], offsets)
        return torch.where(real[:, None], rows + bias.index_select(0, expert), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (offsets,) = ctx.saved_tensors
        (grad,) = grads
        index = torch.arange(grad.shape[0], dtype=offsets.dtype, device=offsets.device)
        grad_rows = torch.where((index < offsets[-1])[:, None], grad, 0.0) if ctx.needs_input_grad[0] else None
        return grad_rows, expert_bias_wgrad(grad, offsets) if ctx.needs_input_grad[1] else None, None


def add_expert_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] of expert e plus bias[e], bias [E, N] of the same dtype, offsets [E] int32 → [R, N].

    Rows past offsets[-1] are zeros whatever they held, NaN included, and so is their gradient. Raises ValueError where
    the bias does not fit rows and offsets. The experts of gpt-oss have one behind each of their two products.
    """
    if bias.shape != (offsets.shape[0], rows.shape[1]) or bias.dtype != rows.dtype:
        wanted = f"[{offsets.shape[0]}, {rows.shape[1]}] of {rows.dtype}"
        raise ValueError(f"add_expert_bias needs a bias {wanted}, got {list(bias.shape)} of {bias.dtype}")
    return _AddExpertBias.apply(rows, bias, offsets)  # type: ignore[no-any-return, no-untyped-call]


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [T, D] plus bias [D], of one dtype; JetMoE adds one to what its experts give (arXiv 2404.07413)."""
    return x + bias
