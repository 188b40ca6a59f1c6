"""Every private or version-dependent torch API that moegraph touches, each with the reason. Tried on 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload as OpOverload  # what a node of a step graph calls; no public name
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # values without data; no public name
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def traced_graph() -> fx.Graph:
    """The graph that the running `make_fx` is writing.

    Joint tracing credits each new node to the layer node being evaluated by looking at how far the graph has grown;
    torch offers the proxy mode but no public way to its graph.
    """
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("traced_graph() is only meaningful inside make_fx")
    graph: fx.Graph = mode.tracer.graph
    return graph


def compile_backend(name: str) -> Callable[..., Any]:
    """The backend of torch.compile of this name, to be wrapped. `torch.compiler` lists names, but hands none out."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Grouped product in bfloat16 on CUDA; rows past the last offset are left unwritten.

    The private name because it is the one known to be the same operator in 2.11 and 2.13.
    """
    return torch.ops.aten._grouped_mm.default(a, b, offsets)  # type: ignore[no-any-return]


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Causal cuDNN attention of q, k, v [B, H, S, Dh] plus an optional additive bias [B, 1, S, S].

    Returns (out [B, H, S, Dh], lse [B, H, S, 1] float32). The public `scaled_dot_product_attention` does not return
    the logsumexp, picks its kernel by itself, and refuses a bias together with causality.
    """
    out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, True, False, scale=scale)
    return out[0], out[1]


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `cudnn_attention`. Without dropout the random state is not read, but the schema wants tensors."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse, unused, unused, bias, None, None, q.shape[2], k.shape[2], 0.0, True, scale=scale
    )
    return grads[0], grads[1], grads[2]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """Causal flash attention of q, k, v [B, S, H, Dh] → (out [B, S, H, Dh], lse [B, H, S] float32).

    `window` counts the query itself. The public `scaled_dot_product_attention` knows no windows.
    """
    left, right = (None, None) if window is None else (window - 1, 0)
    out = torch.ops.aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out[0], out[1]


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_attention`. Without dropout the random state is not read, but the schema wants tensors."""
    left, right = (None, None) if window is None else (window - 1, 0)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, True, state, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@contextmanager
def inductor_headers_in(folder: Path) -> Iterator[None]:
    """Within, Inductor keeps the C++ headers that it compiles once for all kernels in `folder`.

    They are code that goes into every kernel, and no setting says where: torch puts them under a name that anyone can
    guess in the folder for temporary files, where another user may have been first.
    """
    from torch._inductor import codecache

    before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")
    codecache._precompile_header.cache_clear()
    try:
        yield
    finally:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = before
        codecache._precompile_header.cache_clear()
