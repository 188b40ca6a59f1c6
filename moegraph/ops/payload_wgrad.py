"""The weight gradient of rows that arrived as payloads of MXFP8: dW[e] = gradᵀ · rows over expert e's run, in bf16.

    dW = payload_grouped_mm_wgrad(grad, rows, offsets)
       = grouped_mm_wgrad(decoded grad, decoded rows, offsets), bit for bit

grad [R, N] and rows [R, K] are bf16 or payloads (`mx_payload`), uint8 [R, W], at least one of them. Offsets, rows past
the last one and experts without rows are as in `grouped_mm`. `payload_backend` says whether elements become bf16 as the
product loads them, or all of them before it, by `mx_decode`. Nothing here has a gradient.

Legend: R rows, E experts, N and K the sizes of a weight, W bytes of a payload's row.
"""

import torch
from torch import Tensor

from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.tuning import cached_choice
from moegraph.ops.grouped_mm import grouped_mm_backend, grouped_mm_wgrad, grouped_mm_wgrad_add
from moegraph.ops.mx_payload import mx_decode, payload_width

_WHOLE = 512  # elements of a row: its payload is then a multiple of 16 bytes, as a tensor map wants
_OPERATIONS_PER_BYTE = {9: 159.0, 10: 217.0}  # of products in bf16 and of copies, as graph/machine.py has H200 and B300
_DECODED = 1 + 1 / 32 + 2  # bytes read and written for an element
# How much longer a product takes that dequantises: on an H200 25 to 70 %, and 25 to 30 % where it is added to an fp32
# buffer (docs/performance.md); on a B300 it has not been measured.
_LONGER = {9: 0.5, 10: 0.5}


@cached_choice
def payload_backend(
    n: int, k: int, rows: int, experts: int, payloads: tuple[bool, bool], where: torch.device | Card
) -> tuple[str, str]:
    """(backend, reason) of a weight gradient [E, n, k] over R = `rows` on a device or a card; `payloads`: whether the
    gradient and the rows are such.

    `triton`: moegraph's kernel dequantises as it loads. `decode`: `mx_decode`, then `grouped_mm_wgrad`. To decode takes
    a share of the product's time that shrinks with the other side of the weight, while a product that dequantises takes
    longer by a share that does not: the former is predicted, and compared with the latter.

    Raises RunError if a tuning table for the card cannot be used.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is None:
        return "decode", f"no CUDA device ({where})"
    product = grouped_mm_backend("wgrad", torch.bfloat16, n, k, rows, experts, card)
    if product[0] != "triton":
        return "decode", f"decoded before the product, which is not moegraph's kernel: {product[1]}"
    major, sides = card.capability // 10, [(n, k), (k, n)]
    wide = [width for (width, _), payload in zip(sides, payloads, strict=True) if payload and width % _WHOLE]
    if wide:
        return "decode", f"rows of {wide[0]} elements are no whole multiples of {_WHOLE}"
    if major not in _LONGER:
        return "decode", f"no kernel dequantises on compute capability {major}.x"
    shares = [_OPERATIONS_PER_BYTE[major] * _DECODED / (2 * other) for _, other in sides]
    share = sum(each for each, payload in zip(shares, payloads, strict=True) if payload)
    longer = _LONGER[major]
    predicted = f"to decode is predicted to take {share:.0%} of the product, to dequantise in it {longer:.0%}"
    return "triton" if share > longer else "decode", f"{predicted}, as on an H200"


def _sizes(grad: Tensor, rows: Tensor) -> tuple[int, int, tuple[bool, bool]]:
    """(N, K, which are payloads). Raises ValueError for what the operators do not take."""
    payloads = grad.dtype == torch.uint8, rows.dtype == torch.uint8
    if not any(payloads):
        raise ValueError("payload_grouped_mm_wgrad: neither operand is a payload; that is grouped_mm_wgrad")
    for name, operand in (("grad", grad), ("rows", rows)):
        if operand.dim() != 2 or operand.dtype not in (torch.uint8, torch.bfloat16):
            raise ValueError(
                f"payload_grouped_mm_wgrad: {name} {operand.dtype} {list(operand.shape)} is neither a payload nor rows "
                "in bf16"
            )
    if grad.shape[0] != rows.shape[0]:
        raise ValueError(f"payload_grouped_mm_wgrad: {grad.shape[0]} rows of grad and {rows.shape[0]} of rows")
    n, k = (payload_width(each) if low else each.shape[1] for each, low in zip((grad, rows), payloads, strict=True))
    return n, k, payloads


def _decoded(operand: Tensor) -> Tensor:
    return mx_decode(operand) if operand.dtype == torch.uint8 else operand


def _loads(grad: Tensor, rows: Tensor, offsets: Tensor) -> bool:
    """Whether the kernel that dequantises runs."""
    n, k, payloads = _sizes(grad, rows)
    return payload_backend(n, k, grad.shape[0], offsets.shape[0], payloads, grad.device)[0] == "triton"


@torch.library.custom_op("moegraph::payload_grouped_mm_wgrad", mutates_args=())
def payload_grouped_mm_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """grad [R, N] and rows [R, K], bf16 or payloads of such, offsets [E] int32 → dW [E, N, K] bf16.

    Raises ValueError where neither is a payload, and for other shapes and dtypes.
    """
    if _loads(grad, rows, offsets):
        from moegraph.kernels import payload_wgrad as kernels

        return kernels.payload_wgrad(grad.contiguous(), rows.contiguous(), offsets)
    out: Tensor = grouped_mm_wgrad(_decoded(grad), _decoded(rows), offsets)
    return out


@payload_grouped_mm_wgrad.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    n, k, _ = _sizes(grad, rows)
    return grad.new_empty(offsets.shape[0], n, k, dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::payload_grouped_mm_wgrad_add", mutates_args=("into",))
def payload_grouped_mm_wgrad_add(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The weight gradient added to `into` [E, N, K] where `keep` [1] int32, on the host, is not 0, else written there,
    as `grouped_mm_wgrad_add` does it. Returns an empty tensor, by which a graph says that this has been done."""
    if grad.shape[0] and _loads(grad, rows, offsets):
        from moegraph.kernels import payload_wgrad as kernels

        kernels.payload_wgrad_into(grad.contiguous(), rows.contiguous(), offsets, into, accumulate=bool(keep))
    else:
        grouped_mm_wgrad_add(into, keep, _decoded(grad), _decoded(rows), offsets)
    return into.new_empty(0)


@payload_grouped_mm_wgrad_add.register_fake
def _(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    _sizes(grad, rows)
    return into.new_empty(0)
