"""Attention on CUDA: which of torch's fused kernels runs, and how the masks reach it without a host sync.

| case, for bfloat16 and float16 with a head width that is a multiple of 8 | backend |
| --- | --- |
| no documents, no window, head width ≤ 128 | `cudnn` |
| documents, with or without a window, head width ≤ 128 | `cudnn_bias` |
| no documents, otherwise, head width ≤ 256 | `flash` |
| anything else (float32, float64, other widths) | `reference` |

`cudnn_bias` adds one mask [B, 1, S, S], shared by all heads, made on the device from the document ids. Flash's packed
form would need the number of documents on the host, or a grid for as many sequences as there are tokens.

Legend: B sequences, S sequence length, H query heads, Hkv key/value heads, Dh head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph import _torch_compat

# Far below any score, and finite: a tile of keys that are all hidden then needs no special case in a running softmax,
# because exp(HIDDEN - logsumexp) is exactly zero as soon as one key is visible, and every query sees itself.
HIDDEN = -30000.0


def attention_backend(
    device_type: str, dtype: torch.dtype, head_dim: int, *, documents: bool, window: int | None
) -> tuple[str, str]:
    """(backend, reason) for an attention of this head width; `inspect` prints it."""
    if device_type != "cuda":
        return "reference", f"device {device_type}: exact attention in query blocks"
    if dtype not in (torch.bfloat16, torch.float16):
        return "reference", f"{dtype} has no fused kernel: exact attention in query blocks"
    if head_dim % 8:
        return "reference", f"head width {head_dim} is not a multiple of 8: exact attention in query blocks"
    if head_dim <= 128:
        if documents:
            return "cudnn_bias", "causal cuDNN kernel with the document and window mask as a bias"
        if window is None:
            return "cudnn", "plain causal attention: cuDNN's kernel"
    if head_dim <= 256 and not documents:
        return "flash", "windows, and head widths above 128: flash attention"
    return "reference", f"no fused kernel for head width {head_dim} with these masks: exact attention in query blocks"


def mask_bias(document_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, S]: causal, same document, window. Padding sees padding here; the caller zeroes it."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    distance = position[:, None] - position[None, :]
    outside = distance < 0 if window is None else (distance < 0) | (distance >= window)
    hidden = (document_ids[:, :, None] != document_ids[:, None, :]) | outside
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, HIDDEN)
    return bias[:, None]


def attention_forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, Dh], lse [B, H, S] float32), contiguous, on one of the fused backends."""
    if backend == "flash":
        out, lse = _torch_compat.flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), window, scale)
        return out.contiguous(), lse.contiguous()
    bias = None if document_ids is None else mask_bias(document_ids, window, q.dtype)
    query, key, value = (x.contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = _torch_compat.cudnn_attention(query, key, value, bias, scale)
    out, lse = out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[0], lse.shape[1], lse.shape[2]).contiguous()
    if document_ids is not None:
        padding = document_ids < 0
        out = out.masked_fill_(padding[:, :, None, None], 0.0)
        lse = lse.masked_fill_(padding[:, None, :], 0.0)
    return out, lse


def attention_backward(
    backend: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, on the backend that ran forward."""
    grad = grad.contiguous()
    if backend == "flash":
        dense = (q.contiguous(), k.contiguous(), v.contiguous(), out, lse)
        grads = _torch_compat.flash_attention_backward(grad, *dense, window, scale)
        return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
    bias = None
    if document_ids is not None:
        bias = mask_bias(document_ids, window, q.dtype)
        padding = document_ids < 0
        # Padding: with no gradient coming in, and a logsumexp that makes its probabilities vanish, it moves nothing.
        grad = grad.masked_fill(padding[:, :, None, None], 0.0)
        lse = lse.masked_fill(padding[:, None, :], -HIDDEN)
    grad, query, key, value, out = (x.contiguous().transpose(1, 2) for x in (grad, q, k, v, out))
    grads = _torch_compat.cudnn_attention_backward(grad, query, key, value, out, lse[..., None], bias, scale)
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in grads)
    return dq, dk, dv
