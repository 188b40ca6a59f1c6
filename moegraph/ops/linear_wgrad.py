"""The weight gradient of a linear layer, added to its gradient buffer by the product that makes it.

Legend: T tokens, K input width, N output width.
"""

import torch
from torch import Tensor

from moegraph import _torch_compat


@torch.library.custom_op("moegraph::linear_wgrad_add", mutates_args=("into",))
def linear_wgrad_add(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """Weight gradient gradᵀ · rows, grad [T, N], rows [T, K], added to `into` [N, K] where `keep` [1] int32 is not 0,
    else written there. `keep` lives on the host, which knows it. `into` has the dtype of the operands or, for bfloat16,
    float32. On CUDA the sum is not rounded to the dtype of the operands first. Returns an empty tensor, by which a
    graph says that this has been done."""
    accumulate = bool(keep)
    if grad.is_cuda:
        _torch_compat.mm_into(into, grad.t(), rows, accumulate=accumulate)
    elif accumulate:
        into.add_(grad.t() @ rows)
    else:
        into.copy_(grad.t() @ rows)
    return into.new_empty(0)


@linear_wgrad_add.register_fake
def _(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    return into.new_empty(0)
