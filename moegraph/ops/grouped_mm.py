"""Grouped matrix product: each expert multiplies its own run of rows.

Contract of `grouped_mm` and its two gradients. Rows are sorted by expert; `offsets[E]` (int32, on the device) are the
inclusive ends of the experts' runs. Rows past `offsets[-1]` do not exist: never read, written as zeros. An expert
without rows has a weight gradient of exactly zero. On CPU the implementation loops over the experts; on CUDA see
`grouped_mm_backend`.

Legend: R routed rows, E experts, K input width, N output width.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph import _torch_compat
from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.shapes import ShapeClass, rows_class
from moegraph.kernels.tuning import cached_choice, measured


@cached_choice
def grouped_mm_backend(
    kernel: str, dtype: torch.dtype, n: int, k: int, rows: int, experts: int, where: torch.device | Card
) -> tuple[str, str]:
    """(backend, reason) of a grouped product on a device or a card; `inspect` and `doctor` print it.

    `kernel` is one of `moegraph.kernels.shapes.KERNELS`, n and k the widths as its shape classes have them: output
    columns and contraction. `triton`: moegraph's kernel, `_grouped_mm`: torch's; with both, offsets stay on the device.
    `loop`: one product per expert; on CUDA it reads the offsets on the host and so waits for the device. Where the
    shape class was measured on the card, the faster one runs; elsewhere the device's default. `up_swiglu` and
    `dgrad_swiglu` are kernels of the fused experts, for which `_grouped_mm` means separate operators.

    Raises RunError if a tuning table for the card cannot be used.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is None:
        return "loop", f"no CUDA device ({where}): one matrix product per expert"
    if no_kernel(dtype, n, k):
        return "loop", f"{no_kernel(dtype, n, k)}; waits for the device"
    found = measured(ShapeClass(kernel, dtype, n, k, rows_class(rows, experts)), card)
    if found is not None:
        source, entry = found
        return entry.backend, f"{source}: {entry.reason(card.name)}"
    major = card.capability // 10
    if major == 9 and dtype == torch.float32:
        return "triton", f"torch has no grouped kernel for {dtype}"
    if major == 9:
        return "triton", "5 to 25 % faster than torch's grouped kernel on H200 (docs/performance.md)"
    if major == 10 and dtype == torch.bfloat16:
        return "_grouped_mm", "moegraph's kernels compile for this chip but have not been measured on it"
    return "loop", f"no grouped kernel for {dtype} on compute capability {major}.x; waits for the device"


_ALIGNED = {torch.bfloat16: 8, torch.float32: 4}  # elements in 16 bytes, what a tensor map can address


def no_kernel(dtype: torch.dtype, n: int, k: int) -> str:
    """Why no grouped kernel takes products of widths n and k in this dtype; empty where one does."""
    few = _ALIGNED.get(dtype)
    if few is None:
        return f"{dtype} has no grouped kernel"
    if n % few or k % few:
        return f"rows of {n} and {k} elements are not multiples of 16 bytes ({few} elements)"
    return ""


def uses_kernels(kernel: str, rows: Tensor, n: int, k: int, num_rows: int, experts: int) -> bool:
    """Whether this product runs on moegraph's Triton kernels on the device and in the dtype of `rows`."""
    return grouped_mm_backend(kernel, rows.dtype, n, k, num_rows, experts, rows.device)[0] == "triton"


def _runs(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert, read on the host."""
    ends = offsets.tolist()
    return list(zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True))


def _zero_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows past offsets[-1] set to zero in place, without the host knowing how many there are."""
    index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return rows.masked_fill_((index >= offsets[-1])[:, None], 0.0)


def _loop_rows(rows: Tensor, weight: Tensor, offsets: Tensor, width: int) -> Tensor:
    """rows of expert e times weight[e], where weight is [E, K, width] in any strides."""
    out = rows.new_empty(rows.shape[0], width)
    end = 0
    for expert, start, end in _runs(offsets):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
    out[end:].zero_()
    return out


def torch_grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm` by torch's grouped kernel, bf16 on CUDA."""
    return _zero_tail(_torch_compat.grouped_mm(rows, weight.transpose(1, 2), offsets), offsets)


def torch_grouped_mm_dgrad(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm_dgrad` by torch's grouped kernel, bf16 on CUDA."""
    return _zero_tail(_torch_compat.grouped_mm(grad, weight, offsets), offsets)


def torch_grouped_mm_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm_wgrad` by torch's grouped kernel, bf16 on CUDA."""
    out = _torch_compat.grouped_mm(grad.t(), rows, offsets)
    empty = offsets == torch.cat((offsets.new_zeros(1), offsets[:-1]))
    return out.masked_fill_(empty[:, None, None], 0.0)


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm` without its gradient, on the backend that its shape class gets."""
    (num_rows, k), (experts, n, _) = rows.shape, weight.shape
    backend, _why = grouped_mm_backend("grouped_mm", rows.dtype, n, k, num_rows, experts, rows.device)
    if backend == "triton":
        from moegraph.kernels import rows_gemm

        return rows_gemm.grouped_mm(rows, weight, offsets)
    if backend == "_grouped_mm":
        return torch_grouped_mm(rows, weight, offsets)
    return _loop_rows(rows, weight.transpose(1, 2), offsets, n)


def product_dgrad(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm_dgrad` without its gradient, on the backend that its shape class gets."""
    num_rows, (experts, k, n) = grad.shape[0], weight.shape
    backend, _why = grouped_mm_backend("grouped_mm_dgrad", grad.dtype, n, k, num_rows, experts, grad.device)
    if backend == "triton":
        from moegraph.kernels import rows_gemm

        return rows_gemm.grouped_mm(grad, weight, offsets, transposed=True)
    if backend == "_grouped_mm":
        return torch_grouped_mm_dgrad(grad, weight, offsets)
    return _loop_rows(grad, weight, offsets, n)


@torch.library.custom_op("moegraph::grouped_mm", mutates_args=())
def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return product(rows.contiguous(), weight.contiguous(), offsets)


@_grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("moegraph::grouped_mm_dgrad", mutates_args=())
def grouped_mm_dgrad(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Input gradient: rows of grad [R, N] of expert e times weight[e] [N, K] → [R, K]; zero past the last offset."""
    return product_dgrad(grad.contiguous(), weight.contiguous(), offsets)


@grouped_mm_dgrad.register_fake
def _(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


@torch.library.custom_op("moegraph::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Weight gradient: gradᵀ · rows over each expert's run, grad [R, N], rows [R, K] → [E, N, K]; empty runs zero."""
    grad, rows = grad.contiguous(), rows.contiguous()
    n, k = grad.shape[1], rows.shape[1]
    num_rows, experts = grad.shape[0], offsets.shape[0]
    backend, _why = grouped_mm_backend("wgrad", grad.dtype, n, k, num_rows, experts, grad.device)
    if backend == "triton":
        from moegraph.kernels import wgrad

        return wgrad.wgrad(grad, rows, offsets)
    if backend == "_grouped_mm":
        return torch_grouped_mm_wgrad(grad, rows, offsets)
    out = grad.new_empty(offsets.shape[0], n, k)
    for expert, start, end in _runs(offsets):
        if end > start:
            torch.mm(grad[start:end].t(), rows[start:end], out=out[expert])
        else:
            out[expert].zero_()
    return out


@grouped_mm_wgrad.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])


@torch.library.custom_op("moegraph::grouped_mm_wgrad_add", mutates_args=("into",))
def grouped_mm_wgrad_add(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Weight gradient gradᵀ · rows [E, N, K] added to `into` [E, N, K] where `keep` [1] int32 is not 0, else written
    there. `keep` lives on the host, which knows it. On moegraph's kernels the sum is not rounded to the dtype of the
    rows first. Returns an empty tensor, by which a graph says that this has been done."""
    n, k = grad.shape[1], rows.shape[1]
    accumulate = bool(keep)
    if grad.shape[0] and uses_kernels("wgrad", grad, n, k, grad.shape[0], offsets.shape[0]):
        from moegraph.kernels import wgrad

        wgrad.wgrad_into(grad.contiguous(), rows.contiguous(), offsets, into, accumulate=accumulate)
    elif accumulate:
        into.add_(grouped_mm_wgrad(grad, rows, offsets))
    else:
        into.copy_(grouped_mm_wgrad(grad, rows, offsets))
    return into.new_empty(0)


@grouped_mm_wgrad_add.register_fake
def _(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return into.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, offsets = ctx.saved_tensors
    grad_rows = grouped_mm_dgrad(grad, weight, offsets) if ctx.needs_input_grad[0] else None
    grad_weight = grouped_mm_wgrad(grad, rows, offsets) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weight, None


_grouped_mm.register_autograd(_backward, setup_context=_setup)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] of expert e times weight[e]ᵀ, weight [E, N, K], offsets [E] int32 → [R, N], one dtype throughout.

    Accumulated in float32 or wider by the matrix products. `grouped_mm_backend` says what it runs on and why; a dtype
    or widths without a grouped kernel loop over the experts, on CUDA waiting for the device.
    """
    out: Tensor = _grouped_mm(rows, weight, offsets)
    return out
