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


def grouped_mm_backend(
    device_type: str, dtype: torch.dtype, n: int, k: int, capability: tuple[int, int] | None = None
) -> tuple[str, str]:
    """(backend, reason) that a grouped product of widths n and k runs on; `inspect` and `doctor` print it.

    `triton`: moegraph's kernels, `_grouped_mm`: one torch kernel; with both, offsets stay on the device. `loop`: one
    product per expert; on CUDA it reads the offsets on the host and so waits for the device. `capability` is the CUDA
    compute capability, when known.
    """
    if device_type != "cuda":
        return "loop", f"device {device_type}: one matrix product per expert"
    if dtype not in _ALIGNED:
        return "loop", f"{dtype} has no grouped kernel; waits for the device"
    if n % _ALIGNED[dtype] or k % _ALIGNED[dtype]:
        few = _ALIGNED[dtype]
        return (
            "loop",
            f"rows of {n} and {k} elements are not multiples of 16 bytes ({few} elements); waits for the device",
        )
    major = 9 if capability is None else capability[0]
    if major == 9:
        return "triton", "3 to 13 % faster than torch's grouped kernel on H200 (docs/performance.md)"
    if major == 10 and dtype == torch.bfloat16:
        return "_grouped_mm", "moegraph's kernels compile for this chip but have not been measured on it"
    return "loop", f"no grouped kernel for {dtype} on compute capability {major}.x; waits for the device"


_ALIGNED = {torch.bfloat16: 8, torch.float32: 4}  # elements in 16 bytes, what a tensor map can address


def _runs(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert, read on the host."""
    ends = offsets.tolist()
    return list(zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True))


def _backend(x: Tensor, n: int, k: int) -> str:
    if x.device.type != "cuda":
        return "loop"
    return grouped_mm_backend("cuda", x.dtype, n, k, torch.cuda.get_device_capability(x.device))[0]


def uses_kernels(x: Tensor, n: int, k: int) -> bool:
    """Whether products of widths n and k on this tensor's device and dtype run on moegraph's Triton kernels."""
    return _backend(x, n, k) == "triton"


def _zero_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows past offsets[-1] set to zero in place, without the host knowing how many there are."""
    index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return rows.masked_fill_((index >= offsets[-1])[:, None], 0.0)


def loop_rows(rows: Tensor, weight: Tensor, offsets: Tensor, width: int) -> Tensor:
    """rows of expert e times weight[e], where weight is [E, K, width] in any strides."""
    out = rows.new_empty(rows.shape[0], width)
    end = 0
    for expert, start, end in _runs(offsets):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
    out[end:].zero_()
    return out


@torch.library.custom_op("moegraph::grouped_mm", mutates_args=())
def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    rows = rows.contiguous()
    weight = weight.contiguous()
    backend = _backend(rows, weight.shape[1], weight.shape[2])
    if backend == "triton":
        from moegraph.kernels import rows_gemm

        return rows_gemm.grouped_mm(rows, weight, offsets)
    if backend == "_grouped_mm":
        return _zero_tail(_torch_compat.grouped_mm(rows, weight.transpose(1, 2), offsets), offsets)
    return loop_rows(rows, weight.transpose(1, 2), offsets, weight.shape[1])


@_grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("moegraph::grouped_mm_dgrad", mutates_args=())
def grouped_mm_dgrad(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Input gradient: rows of grad [R, N] of expert e times weight[e] [N, K] → [R, K]; zero past the last offset."""
    grad = grad.contiguous()
    weight = weight.contiguous()
    backend = _backend(grad, weight.shape[1], weight.shape[2])
    if backend == "triton":
        from moegraph.kernels import rows_gemm

        return rows_gemm.grouped_mm(grad, weight, offsets, transposed=True)
    if backend == "_grouped_mm":
        return _zero_tail(_torch_compat.grouped_mm(grad, weight, offsets), offsets)
    return loop_rows(grad, weight, offsets, weight.shape[2])


@grouped_mm_dgrad.register_fake
def _(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


@torch.library.custom_op("moegraph::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Weight gradient: gradᵀ · rows over each expert's run, grad [R, N], rows [R, K] → [E, N, K]; empty runs zero."""
    grad, rows = grad.contiguous(), rows.contiguous()
    n, k = grad.shape[1], rows.shape[1]
    backend = _backend(grad, n, k)
    if backend == "triton":
        from moegraph.kernels import wgrad

        return wgrad.wgrad(grad, rows, offsets)
    if backend == "_grouped_mm":
        out = _torch_compat.grouped_mm(grad.t(), rows, offsets)
        empty = offsets == torch.cat((offsets.new_zeros(1), offsets[:-1]))
        return out.masked_fill_(empty[:, None, None], 0.0)
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

    Accumulated in float32 or wider by the matrix products. On CUDA, bfloat16 with widths that are multiples of 8 runs
    torch's grouped kernel; anything else loops over the experts and waits for the device (`grouped_mm_backend` says
    which and why).
    """
    out: Tensor = _grouped_mm(rows, weight, offsets)
    return out
